#!/bin/busybox sh
# The init program of a guest: sets up the system and the device, runs the script, and reports its exit code. NODE,
# NODES, DEVICE_KIND, NETWORK and MODULES are kernel parameters: the kernel passes unknown ones to init as environment
# variables.

/bin/busybox mkdir -p /proc /sys /dev /tmp /run /root /var/run /var/log /var/lib
/bin/busybox --install -s /bin
export PATH=/usr/bin:/usr/sbin:/bin HOME=/root TERM=dumb
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mount -t devpts devpts /dev/pts
hostname "$NODE"
ip link set lo up

# The channel to the lab: one line in each direction per message.
exec 3<>/dev/ttyS1
stty -F /dev/ttyS1 raw -echo

end() {
    # Setting the mode of a terminal waits until its output is drained, so the last line is printed before the lab
    # receives the exit message.
    stty -F /dev/ttyS0 raw
    echo "exit $1" >&3
    sleep 60
    poweroff -f
}

fail() {
    echo "init: $*"
    end 1
}

# Finds the addresses of the ivshmem devices, in PCI order.
find_ivshmem() {
    DEVICES=
    for device in /sys/bus/pci/devices/*; do
        [ "$(cat "$device/vendor" "$device/device")" = "$(printf '0x1af4\n0x1110')" ] || continue
        DEVICES=$DEVICES${DEVICES:+,}${device##*/}
    done
    [ -n "$DEVICES" ] || fail "no ivshmem device on the PCI bus"
    DEVICE=${DEVICES%%,*}
}

bind_vfio() {
    for device in $(echo "$DEVICES" | tr , ' '); do
        echo vfio-pci >"/sys/bus/pci/devices/$device/driver_override"
        echo "$device" >/sys/bus/pci/drivers_probe
        group=$(readlink "/sys/bus/pci/devices/$device/iommu_group") || fail "$device has no IOMMU group"
        group=/dev/vfio/${group##*/}
        [ -c "$group" ] || fail "vfio-pci does not bind $device: no $group"
        VFIO_GROUP=${VFIO_GROUP:-$group} # of the first device
    done
    export VFIO_GROUP
}

# Creates a character device that maps the memory directly. The first guest writes its configuration into its first
# pages, like ndctl; later guests find it there.
make_dax() {
    nd=/sys/bus/nd/devices
    [ -c /dev/dax0.0 ] && return
    [ -e $nd/namespace0.0 ] || fail "no persistent memory"
    echo namespace0.0 >/sys/bus/nd/drivers/nd_pmem/unbind
    echo ram >$nd/dax0.0/mode # the kernel keeps its page structs in RAM, not in the device
    cat /proc/sys/kernel/random/uuid >$nd/dax0.0/uuid
    echo namespace0.0 >$nd/dax0.0/namespace
    echo dax0.0 >/sys/bus/nd/drivers/dax_pmem/bind
    [ -c /dev/dax0.0 ] || fail "no /dev/dax0.0"
}

DEVICE='' DEVICES='' MEMORY='' MEMORY_BYTES=''
for module in $(echo "$MODULES" | tr , ' '); do
    insmod "/lib/modules/$module" || fail "module $module"
done

if [ -n "${NETWORK:=}" ]; then
    ip link set eth0 up || fail "no network device"
    ip address add "$NETWORK/24" dev eth0 || fail "address $NETWORK"
fi
case $DEVICE_KIND in
plain | doorbell)
    find_ivshmem
    for device in $(echo "$DEVICES" | tr , ' '); do
        echo 1 >"/sys/bus/pci/devices/$device/enable"
    done
    MEMORY=/sys/bus/pci/devices/$DEVICE/resource2
    MEMORY_BYTES=$(stat -c %s "$MEMORY")
    ;;
vfio)
    find_ivshmem
    bind_vfio
    ;;
dax)
    make_dax
    DEVICE=/dev/dax0.0
    DEVICES=$DEVICE
    MEMORY=$DEVICE
    MEMORY_BYTES=$(cat /sys/bus/dax/devices/dax0.0/size)
    ;;
esac
RACK=/tmp/rack.toml
export NODE NODES DEVICE DEVICES DEVICE_KIND MEMORY MEMORY_BYTES NETWORK RACK

sh -eu -c '. /lab/functions; . /lab/script' lab
end $?
