#!/usr/bin/env bash
# Runs Redis in containers of podman that meet in a shared rack, and the examples of docs/examples. Needs root; nothing
# on the machine changes, because all of it happens in namespaces of its own. `./x exam` runs it.
# usage: tests/containers/run.sh FOLDER WORK [ROUNDS]    the folder with crosslane and libcrosslane.so, one for files,
#        in which WORK/machine is made anew, and a number of rounds, to measure on an idle machine instead
set -euo pipefail
[ $# = 2 ] || [ $# = 3 ] || { echo 'usage: tests/containers/run.sh FOLDER WORK [ROUNDS]' >&2; exit 2; }
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
programs=$(realpath "$1")
mkdir -p "$2"
work=$(realpath "$2")/machine
rm -rf --one-file-system "$work"
mkdir "$work"
readonly here programs work

# The files of an image with the programs, their libraries, and users.
make_image() { # ROOT PROGRAM...
    local root=$1 program file
    shift
    mkdir -p "$root"/{etc,tmp,proc,sys,dev,run,usr/bin,usr/lib/x86_64-linux-gnu}
    chmod 1777 "$root/tmp"
    for program in "$@"; do
        cp "$(realpath "$(command -v "$program")")" "$root/usr/bin/$program"
        ldd "$root/usr/bin/$program" | grep -oE '/[^ ]+' | while read -r file; do
            mkdir -p "$root${file%/*}"
            cp -L "$file" "$root$file"
        done
    done
    printf '%s:x:%s:%s::/:/bin/sh\n' root 0 0 www-data 33 33 games 5 5 redis 999 999 >"$root/etc/passwd"
    tar -C "$root" -cf "$root.tar" .
}

make_image "$work/image" redis-server redis-cli redis-benchmark sh sleep
exec timeout --signal KILL 1800 unshare --mount --net --pid --fork --kill-child --mount-proc \
    "$here/inside.sh" "$programs" "$work" "${3:-}"
