# lab: --guests 2 --program redis-server --program redis-cli --program redis-benchmark
# redis-server in guest a, redis-benchmark in guest b; there is no network between them, only the device's memory.

[ "$(ls /sys/class/net)" = lo ] # no network but the loopback
barrier booted
rack_up
case $NODE in
a)
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    wait_for grep -q 'Ready to accept connections' /tmp/redis.log
    barrier serving
    ;;
b)
    barrier serving
    wait_for lanes redis-cli -h 127.77.0.1 set word "$NODE"
    [ "$(lanes redis-cli -h 127.77.0.1 get word)" = "$NODE" ]
    lanes redis-benchmark -h 127.77.0.1 -c 4 -n 2000 -d 64 -t set,get --csv
    lanes redis-benchmark -h 127.77.0.1 -c 2 -n 200 -d 65536 -t set,get --csv
    ;;
esac
barrier measured
crosslane down --rack "$RACK"
