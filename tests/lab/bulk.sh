# lab: --guests 2 --device dax --program iperf3 --timeout 300
# Bulk transfers between guests by iperf3, through proxies and in windows, and copies into the same memory. Over DAX
# memory, which programs can map. The processors are emulated: only the ratios of the figures are meaningful.

stream() { # TRUST
    rack_up "$1"
    [ "$NODE" = b ] || lanes iperf3 --server --one-off >/tmp/iperf.log &
    barrier "$1"
    if [ "$NODE" = b ]; then
        wait_for lanes iperf3 --client 127.77.0.1 --time 10 --format M >/tmp/iperf.log
        echo "$1: $(grep receiver /tmp/iperf.log)"
    fi
    barrier "after $1"
    crosslane down --rack "$RACK"
    barrier "down $1"
}

barrier booted
stream proxy
stream direct
[ "$NODE" = b ] || lab-copy "$MEMORY" "$MEMORY_BYTES"
barrier end
