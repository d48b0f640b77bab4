#!/usr/bin/env bash
# Functions for tests that run system programs in a mount namespace of their own, in which these change files.

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
