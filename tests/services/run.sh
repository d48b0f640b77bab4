#!/usr/bin/env bash
# Runs services of Debian under systemd with their own unit files and users, enabled by `crosslane enable`. Needs root;
# nothing on the machine changes, because systemd runs in namespaces and in a control group of its own. `./x exam` runs
# it.
# usage: tests/services/run.sh FOLDER WORK    the folder with crosslane and libcrosslane.so, and one for files, in which
#        WORK/machine is made anew
set -euo pipefail
[ $# = 2 ] || { echo 'usage: tests/services/run.sh FOLDER WORK' >&2; exit 2; }
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
programs=$(realpath "$1")
mkdir -p "$2"
work=$(realpath "$2")/machine
rm -rf --one-file-system "$work"
mkdir "$work"
groups=$(mktemp -d)
mount -t cgroup2 none "$groups"
group=$groups/crosslane-test-$$
mkdir "$group"
readonly here programs work groups group
cp "$here/inside.sh" "$here/../own-machine.sh" "$work"

# Prints the process of systemd, which is the first one of its namespace.
systemd() {
    local child
    child=$(pgrep --parent "$machine" || true)
    [ -n "$child" ] && [ "$(cat "/proc/$child/comm")" = systemd ] && echo "$child"
}

# shellcheck disable=SC2317 # a trap runs it
end() {
    kill -KILL "$machine" 2>/dev/null || true
    wait "$machine" 2>/dev/null || true
    echo 1 >"$group/cgroup.kill"
    for _ in {1..100}; do
        find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [ -d "$group" ] || break
        sleep 0.1
    done
    umount "$groups"
    rmdir "$groups"
}

(
    # The root of the machine's control groups.
    echo $BASHPID >"$group/cgroup.procs"
    exec unshare --mount --net --uts --ipc --cgroup --pid --fork --kill-child --mount-proc \
        "$here/boot.sh" "$programs" "$work"
) >"$work/systemd.log" 2>&1 &
machine=$!
trap end EXIT
trap 'exit 130' INT TERM
for _ in {1..100}; do
    if process=$(systemd); then break; fi
    sleep 0.1
done
status=0
nsenter --target "${process:?systemd has not started: see $work/systemd.log}" --mount --net --uts --ipc --cgroup --pid \
    timeout 600 /run/work/inside.sh /run/programs /run/work || status=$?
exit $status
