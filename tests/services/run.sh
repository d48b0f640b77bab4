#!/usr/bin/env bash
# Runs services of Debian under systemd with their own unit files and users, enabled by `crosslane enable`. Needs root;
# nothing on the machine changes, because systemd runs in namespaces of its own. `./x exam` runs it.
# usage: tests/services/run.sh FOLDER WORK    the folder with crosslane and libcrosslane.so, and one for files
set -euo pipefail
[ $# = 2 ] || { echo 'usage: tests/services/run.sh FOLDER WORK' >&2; exit 2; }
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
programs=$(realpath "$1")
rm -rf --one-file-system "$2"
mkdir -p "$2"
work=$(realpath "$2")
readonly here programs work
cp "$here/inside.sh" "$work"

# Prints the process of systemd, which is the first one of its namespace.
systemd() {
    local child
    child=$(pgrep --parent "$machine" || true)
    [ -n "$child" ] && [ "$(cat "/proc/$child/comm")" = systemd ] && echo "$child"
}

unshare --mount --net --uts --ipc --cgroup --pid --fork --kill-child --mount-proc "$here/boot.sh" "$programs" "$work" \
    >"$work/systemd.log" 2>&1 &
machine=$!
trap 'kill -KILL $machine 2>/dev/null || true' EXIT
for _ in {1..100}; do
    if process=$(systemd); then break; fi
    sleep 0.1
done
status=0
nsenter --target "${process:?systemd has not started: see $work/systemd.log}" --mount --net --uts --ipc --cgroup --pid \
    /run/work/inside.sh /run/programs /run/work || status=$?
exit $status
