#!/usr/bin/env bash
# Starts systemd as the first process of namespaces that tests/services/run.sh has made.
set -euo pipefail
[ $$ = 1 ] || { echo 'tests/services/boot.sh: tests/services/run.sh starts it' >&2; exit 2; }
programs=$1 work=$2
# shellcheck source=tests/own-machine.sh
. "$(dirname "${BASH_SOURCE[0]}")/../own-machine.sh"

own_folders "$work" /etc /usr/lib /var
own_devices
mkdir /run/programs /run/work
mount --bind "$programs" /run/programs
mount --bind "$work" /run/work
# systemd may empty these.
for folder in /tmp /var/tmp; do mount -t tmpfs -o mode=1777 none "$folder"; done
ln -s null /dev/console
mkdir -p /var/lib/crosslane
mount -t tmpfs -o mode=700 none /var/lib/crosslane
# Nothing of the machine itself may be set up again: no settings of the kernel, no devices, no other services.
mount --bind -o ro /proc/sys /proc/sys
mount --bind -o ro /sys /sys
mount -t cgroup2 none /sys/fs/cgroup
rm -rf /etc/systemd/system/*.wants
find /usr/lib/systemd/system -path '*.target.wants/*' ! -name '*journald*' -delete
mkdir -p /usr/lib/crosslane/lib/x86_64-linux-gnu
cp /run/programs/libcrosslane.so /usr/lib/crosslane/lib/x86_64-linux-gnu/
ip link set lo up
export container=test
exec /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=no
