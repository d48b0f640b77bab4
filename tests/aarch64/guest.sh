#!/bin/busybox sh
# The first program of the guest: runs the test programs in /tests, and the suite of socket semantics bare and over
# lanes. `run.sh` evaluates what it prints.

/bin/busybox --install -s /bin
/bin/ln -sf /usr/bin/* /bin/
export PATH=/bin HOME=/root RUST_BACKTRACE=0
mkdir -p /proc /sys /dev /run /root /tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs run /run
mount -t devpts devpts /dev/pts
ln -s /proc/self/fd /dev/fd
hostname guest
ip link set lo up
ulimit -Hn 1048576
ulimit -Sn 65536
for module in /modules/*; do insmod "$module"; done

# Prints the tests of a program that are listed in /left-out.
left_out() { # PROGRAM
    awk -F ': ' -v "program=$1" '{ split($1, words, " ") } words[1] == program { print words[2] }' /left-out
}

run_program() { # NAME, such as lane/unit
    echo "program $1"
    # shellcheck disable=SC2046 # words without spaces
    (cd /tmp && "/tests/$1" --exact $(left_out "$1" | sed 's/^/--skip /'))
    echo "status $?"
}

# Prints the checks of a suite that are not left out.
checks() { # SUITE
    /tests/semantics --list >/tmp/all
    left_out "$1" >/tmp/left-out
    grep -vxFf /tmp/left-out /tmp/all
}

run_suite() { # SUITE VARIABLES...
    suite=$1
    shift
    echo "program $suite"
    # shellcheck disable=SC2046 # words without spaces
    (cd /tmp && env SEMANTICS_TIMEOUT_S=300 SEMANTICS_ALARM_US=200 RANDOM_COUNT=2 "$@" \
        /tests/semantics $(checks "$suite"))
    echo "status $?"
}

echo "kernel $(uname -r) $(uname -m), $(nproc) processors"
for program in /tests/*/*; do
    [ ! -x "$program" ] || run_program "${program#/tests/}"
done
run_suite semantics-bare
mkdir -m 700 /run/rack
run_suite semantics-lanes SEMANTICS_ROUNDS=8 CROSSLANE_RACK=/run/rack LD_PRELOAD=/tests/libcrosslane.so
echo 'guest ends'
poweroff -f
