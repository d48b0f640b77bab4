# lab: --guests 2 --program redis-server --program redis-cli
# kill -9 of the proxy and of the monitor of guest a: programs meet again, and the server never ended.

is_gone() { [ -z "$(cat "/proc/$1/cmdline" 2>/dev/null)" ]; }
ping() { [ "$(lanes redis-cli -h 127.77.0.1 ping 2>/dev/null)" = PONG ]; }

barrier booted
rack_up
if [ "$NODE" = a ]; then
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    server=$!
    wait_for grep -q 'Ready to accept connections' /tmp/redis.log
fi
barrier serving
[ "$NODE" = a ] || wait_for ping
for victim in proxy monitor; do
    barrier "$victim"
    if [ "$NODE" = a ]; then
        process=$(rack_process $victim)
        kill -9 "$process"
        wait_for is_gone "$process"
        [ $victim = proxy ] || crosslane up --rack "$RACK" --node a
        wait_for rack_process $victim >/dev/null
    fi
    barrier "after $victim"
    [ "$NODE" = a ] || wait_for ping
    echo "after kill -9 of the $victim: fine"
done
barrier measured
[ "$NODE" = b ] || kill -0 "$server"
crosslane down --rack "$RACK"
