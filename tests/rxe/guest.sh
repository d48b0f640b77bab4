#!/bin/busybox sh
# The guest's init: sets up the network card with rdma_rxe, then runs servers and clients in the order of run.sh.
/bin/busybox --install -s /bin
ln -s bin /sbin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
depmod
for module in crc32_generic virtio_pci virtio_net rdma_rxe ib_uverbs; do modprobe $module; done
export LD_LIBRARY_PATH=/lib/x86_64-linux-gnu
ip link set lo up
ip link set eth0 up
ip addr add 10.99.0.2/24 dev eth0
sleep 1
rdma link add rxe0 type rxe netdev eth0
sleep 1
ulimit -l unlimited
# The leading newline ends the firmware's last line: a quiet kernel may print nothing in between.
printf '\nrxe: ready\n'
for bytes in 1 1024 65536; do ibv_rc_pingpong -g 1 -d rxe0 -n 100 -s $bytes; done
ibv_uc_pingpong -g 1 -d rxe0 -n 100 -s 4096
# Retries until the host's example listens, which it does after the test before.
client() { # COMMAND
    for _ in $(seq 30); do "$@" 10.99.0.1 && return; sleep 1; done
}
client ibv_rc_pingpong -g 1 -d rxe0 -n 100 -s 4096
client ibv_uc_pingpong -g 1 -d rxe0 -n 100 -s 3000
ibv_ud_pingpong -g 1 -d rxe0 -n 100 -s 1000
client ibv_ud_pingpong -g 1 -d rxe0 -n 100 -s 1024
peer rxe0 1 1
# From here on packets are dropped in both directions.
for bytes in 1024 4096 65536; do ibv_rc_pingpong -g 1 -d rxe0 -n 300 -s $bytes; done
client ibv_rc_pingpong -g 1 -d rxe0 -n 300 -s 4096
peer rxe0 1 20
cd /sys/class/infiniband/rxe0/ports/1/hw_counters || exit
for counter in duplicate_request out_of_seq_request rcvd_seq_err completer_retry_err retry_exceeded_err; do
    echo "rxe: $counter $(cat $counter)"
done
poweroff -f
