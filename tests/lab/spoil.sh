# lab: --guests 2 --device plain --memory 16M --program redis-server --program redis-cli
# Guest b overwrites the whole memory with garbage while both nodes are up. Guest a survives: its node takes the link
# down, logs that, and trains it again; the programs of both connect again over it.

# The only monitor.log is in the rack directory.
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
    ping # the programs within one node are not affected
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
