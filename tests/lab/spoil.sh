# lab: --guests 2 --device plain --memory 16M --program redis-server --program redis-cli
# Guest b writes garbage over the whole memory while both nodes are up. Guest a lives: its node drops the link, says so,
# and trains it again; the programs of both meet again over it.

# The monitor's log is the only one in the rack's directory.
log() { cat "$(find /dev/shm -name monitor.log)"; }
ping() { [ "$(lanes redis-cli -h 127.77.0.1 ping 2>/dev/null)" = PONG ]; }

barrier booted
rack_up
case $NODE in
a)
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    wait_for grep -q 'Ready to accept connections' /tmp/redis.log
    barrier serving
    barrier spoiled
    ping # the programs of one node do not notice
    barrier again
    log | grep -q 'link down'
    ;;
b)
    barrier serving
    wait_for ping
    for seed in 1 2 3; do
        lab-spoil "$MEMORY" "$MEMORY_BYTES" $seed
        wait_for ping
    done
    barrier spoiled
    barrier again
    ;;
esac
log
crosslane down --rack "$RACK"
