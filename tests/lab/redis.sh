# lab: --guests 2 --program redis-server --program redis-cli --program redis-benchmark
# redis-server in guest a, redis-benchmark in guest b; there is no network between them, only the device's memory. Then
# again with programs that write the windows themselves, on DAX memory also as if it were not coherent; there a
# connection is passed on by exec and by SCM_RIGHTS. Run by a test, which provides hand-on.

[ "$(ls /sys/class/net)" = lo ] # no network but the loopback

serve() {
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    server=$!
    wait_for grep -q 'Ready to accept connections' /tmp/redis.log
}

shut_down() {
    lanes redis-cli -h 127.77.0.1 shutdown nosave
    wait "$server"
}

# Stores a word in the server and reads it back.
set_and_get() {
    wait_for lanes redis-cli -h 127.77.0.1 set word "$1"
    [ "$(lanes redis-cli -h 127.77.0.1 get word)" = "$1" ]
}

# Without doorbells, proxies would poll periodically.
count_doorbells() { # AT LEAST
    [ "$DEVICE_KIND" = vfio ] || return 0
    echo "$(doorbells) doorbells"
    [ "$(doorbells)" -ge "$1" ]
}

barrier booted
rack_up
[ "$NODE" = b ] || serve
barrier serving
if [ "$NODE" = b ]; then
    set_and_get "$NODE"
    lanes redis-benchmark -h 127.77.0.1 -c 4 -n 2000 -d 64 -t set,get --csv
    lanes redis-benchmark -h 127.77.0.1 -c 2 -n 200 -d 65536 -t set,get --csv
fi
barrier measured
count_doorbells 100
[ "$NODE" = b ] || shut_down
crosslane down --rack "$RACK"

# With programs that write the windows themselves.
directly() {
    barrier "down $1"
    export COHERENCE="$1"
    rack_up direct
    [ "$NODE" = b ] || serve
    barrier "serving $1"
    if [ "$NODE" = b ]; then
        set_and_get "$1"
        lanes hand-on 127.77.0.1 6379
        lanes redis-benchmark -h 127.77.0.1 -c 4 -n 300 -d 64 -t set,get --csv
        lanes redis-benchmark -h 127.77.0.1 -c 2 -n 60 -d 65536 -t set,get --csv
    fi
    barrier "measured $1"
    direct=$(carried direct_total) missed=$(carried direct_missed) bytes=$(carried bytes_sent)
    # Over a PCI device, and in memory that is not coherent, the proxies forward such connections for now.
    echo "$direct direct connections, $missed missed, $bytes bytes by proxies"
    count_doorbells 20 # a program rings only a peer that sleeps
    barrier "counted $1"
    [ "$NODE" = b ] || shut_down
    crosslane down --rack "$RACK"
}

directly coherent
[ "$DEVICE_KIND" != dax ] || directly non-coherent
