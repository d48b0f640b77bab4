#!/usr/bin/env bash
# Interoperability of the RDMA engine with Linux' RoCEv2: a guest runs rdma_rxe on an emulated network card, the host
# runs the examples rnic-pingpong and rnic-one-sided. Needs root for a network namespace and a TAP; `./x exam` runs it.
# usage: tests/rxe/run.sh EXAMPLES WORK    the folder of the built examples; a folder for packages and the guest image
set -euo pipefail
[ $# = 2 ] || { echo "usage: tests/rxe/run.sh EXAMPLES WORK" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
examples=$(realpath "$1")
mkdir -p "$2"
work=$(realpath "$2")
readonly here examples work space=crosslane-rxe-$$ own=10.99.0.1 guest=10.99.0.2 libraries=lib/x86_64-linux-gnu
qemu=

clean_up() {
    [ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true
    ip netns del $space 2>/dev/null || true
}
trap clean_up EXIT

# Debian packages are unpacked, not installed.
fetch() {
    local kernel package
    [ ! -e "$work/root/fetched" ] || return 0
    kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
    (
        cd "$work"
        apt-get -q download "$kernel" ibverbs-utils ibverbs-providers libibverbs1 libibverbs-dev libnl-3-200 \
            libnl-route-3-200 libmnl0 libelf1 libbpf1 libcap2 iproute2
        for package in *.deb; do dpkg-deb -x "$package" root; done
        rm -f ./*.deb
        touch root/fetched
    ) >"$work/fetch.log" 2>&1 || { echo "packages cannot be fetched: see $work/fetch.log" >&2; exit 1; }
}

search_path="$work/root/usr/$libraries:$work/root/$libraries"

copy_with_libraries() { # PROGRAM...
    local program library
    for program in "$@"; do
        LD_LIBRARY_PATH=$search_path ldd "$program" | awk '/=> \// { print $3 }' | while read -r library; do
            cp -Lu "$library" "$work/image/$libraries/"
        done
    done
}

build_image() {
    local version modules image=$work/image root=$work/root
    version=$(basename "$(echo "$root"/lib/modules/*)")
    modules=lib/modules/$version
    rm -rf "$image"
    mkdir -p "$image"/{bin,etc,proc,sys,dev,lib64} "$image/$libraries/libibverbs" "$image/$modules/kernel"
    cp /bin/busybox "$image/bin/"
    cp -L /lib64/ld-linux-x86-64.so.2 "$image/lib64/"
    cc -O1 -Wall -Wextra -I"$root/usr/include" -o "$image/bin/peer" "$here/peer.c" \
        "$root/usr/$libraries/libibverbs.so.1" -Wl,-rpath-link,"$search_path"
    cp "$root"/usr/bin/ibv_{rc,uc,ud}_pingpong "$root/bin/ip" "$root/usr/bin/rdma" "$image/bin/"
    cp "$root/usr/$libraries"/libibverbs/librxe-* "$image/$libraries/libibverbs/"
    mkdir -p "$image/usr/$libraries" && ln -s "/$libraries/libibverbs" "$image/usr/$libraries/libibverbs"
    mkdir -p "$image/etc/libibverbs.d" && echo 'driver rxe' >"$image/etc/libibverbs.d/rxe.driver"
    copy_with_libraries "$image"/bin/{peer,ibv_rc_pingpong,ip,rdma} "$image/$libraries"/libibverbs/*
    cp "$root/$modules"/modules.{order,builtin,builtin.modinfo} "$image/$modules/"
    (
        cd "$root/$modules/kernel"
        cp -a --parents drivers/infiniband/core drivers/infiniband/sw/rxe drivers/virtio drivers/net/virtio_net.ko \
            drivers/net/net_failover.ko net/core net/ipv4/udp_tunnel.ko net/ipv6/ip6_udp_tunnel.ko crypto lib \
            arch/x86/crypto "$image/$modules/kernel/"
    )
    cp "$here/guest.sh" "$image/init"
    (cd "$image" && find . | cpio -o -H newc 2>/dev/null | gzip -1 >"$work/image.gz")
}

boot() {
    ip netns add $space
    ip -n $space tuntap add tap0 mode tap
    ip -n $space addr add $own/24 dev tap0
    ip -n $space link set tap0 up
    ip netns exec $space qemu-system-x86_64 -accel tcg -m 512 -nographic -no-reboot -nodefaults -serial stdio \
        -kernel "$(echo "$work"/root/boot/vmlinuz-*)" -initrd "$work/image.gz" -append 'console=ttyS0 quiet panic=1' \
        -netdev tap,id=net,ifname=tap0,script=no,downscript=no -device virtio-net-pci,netdev=net,romfile= \
        </dev/null >"$work/guest.log" 2>&1 &
    qemu=$!
    # The emulated guest needs half a minute, or several on a busy machine.
    for _ in $(seq 300); do
        ! grep -aq '^rxe: ready' "$work/guest.log" || return 0
        sleep 1
    done
    echo "the guest does not boot: see $work/guest.log" >&2
    exit 1
}

# The guest starts its servers one after the other, so an example that is too early is tried again.
run_example() { # EXAMPLE ARGS...
    local example=$1
    shift
    for _ in $(seq 60); do
        if timeout 60 ip netns exec $space "$examples/$example" "$@" >"$work/last.log" 2>&1; then
            printf '%-14s %s: ' "$example" "$*"
            tr '\n' ';' <"$work/last.log"
            echo
            return
        fi
        grep -qE 'No route|refused|unreachable' "$work/last.log" || break
        sleep 1
    done
    cat "$work/last.log"
    echo "$example $* failed; the guest's log ends with:" >&2
    tail -n 20 "$work/guest.log" >&2
    exit 1
}

# Also checks that packets were lost in both directions.
run_lossy_example() { # EXAMPLE ARGS...
    run_example "$@"
    grep -qE 'lost: [1-9][0-9]*, lost_sent: [1-9]' "$work/last.log" || { echo "$* lost nothing" >&2; exit 1; }
}

fetch
build_image
boot
for bytes in 1 1024 65536; do run_example rnic-pingpong rc $own $guest $bytes 100; done
run_example rnic-pingpong uc $own $guest 4096 100
run_example rnic-pingpong rc $own - 4096 100
run_example rnic-pingpong uc $own - 3000 100
run_example rnic-pingpong ud $own $guest 1000 100
run_example rnic-pingpong ud $own - 1024 100
run_example rnic-one-sided $own $guest 1
# One percent of the packets is dropped in each direction, determined by a seed, including responses and
# acknowledgements. Packet sequence numbers wrap.
for bytes in 1024 4096 65536; do run_lossy_example rnic-pingpong rc $own $guest $bytes 300 1 "$bytes"; done
run_lossy_example rnic-pingpong rc $own - 4096 300 1 7
run_lossy_example rnic-one-sided $own $guest 20 1 8
wait $qemu
qemu=
grep -aq 'peer: an invalid key is refused' "$work/guest.log"
grep -aE '^(peer|rxe):' "$work/guest.log"
echo 'the engine and rdma_rxe interoperate'
