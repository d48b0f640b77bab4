#!/usr/bin/env bash
# Functions for tests that run system programs in namespaces of their own, in which these change files. The caller sets
# programs, the folder with the command, and work, one for files.
# shellcheck shell=bash disable=SC2154 # set by the caller

# Keeps changes below the folders in a folder of the test.
own_folders() { # KEPT FOLDER...
    local kept=$1 folder name
    for folder in "${@:2}"; do
        name=${folder//\//_}
        mkdir -p "$kept/upper$name" "$kept/lower$name"
        mount -t overlay none -o "lowerdir=$folder,upperdir=$kept/upper$name,workdir=$kept/lower$name" "$folder"
    done
    mount -t tmpfs -o mode=755 none /run
}

# Device nodes, because container engines change the owner of those that a program gets as its standard input.
own_devices() {
    local device
    mkdir /run/dev
    mount -t tmpfs -o mode=755 none /run/dev
    for device in null:3 zero:5 full:7 random:8 urandom:9; do
        mknod -m 666 "/run/dev/${device%:*}" c 1 "${device#*:}"
    done
    mknod -m 666 /run/dev/tty c 5 0
    mkdir /run/dev/{pts,shm,mqueue}
    mount -t devpts -o newinstance,ptmxmode=666,mode=620 none /run/dev/pts
    mount -t tmpfs -o mode=1777 none /run/dev/shm
    ln -s pts/ptmx /run/dev/ptmx
    ln -s /proc/self/fd /run/dev/fd
    for device in stdin:0 stdout:1 stderr:2; do ln -s "fd/${device#*:}" "/run/dev/${device%:*}"; done
    mount --move /run/dev /dev
    exec </dev/null
}

crosslane() { "$programs/crosslane" "$@"; }

passed=0
failed=0

# Runs a command as a test, and counts it. Its output is shown if it fails.
try() { # WHAT COMMAND...
    local outcome=ok
    if "${@:2}" >"$work/command.log" 2>&1; then
        passed=$((passed + 1))
    else
        cat "$work/command.log"
        outcome=FAILED
        failed=$((failed + 1))
    fi
    echo "test $1 ... $outcome"
}

# Prints the counts as ./x reads them. Fails if a test has failed.
print_result() {
    printf 'test result: %s passed; %s failed;\n' "$passed" "$failed"
    [ "$failed" = 0 ]
}

# Prints what lanes have carried, in bytes, for the running programs of a user of the machine whose name begins so.
lane_bytes() { # RACK UID [NAME]
    CROSSLANE_RACK=$1 crosslane stat --all --json | python3 -c '
import json, sys
uid, name = int(sys.argv[1]), sys.argv[2]
processes = json.load(sys.stdin)["processes"]
of_user = [process for process in processes if process["uid"] == uid and process["program"].startswith(name)]
totals = [process["totals"] for process in of_user]
print(sum(total["lane_bytes_sent"] + total["lane_bytes_received"] for total in totals))' "$2" "${3:-}"
}
