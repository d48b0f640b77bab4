# lab: --guests 2 --program redis-server --program redis-cli
# kill -9 of the proxy and of the monitor of guest a: programs meet again, and the server never ended.

ping() { [ "$(lanes redis-cli -h 127.77.0.1 ping 2>/dev/null)" = PONG ]; }

barrier booted
rack_up
if [ "$NODE" = a ]; then
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    server=$!
    wait_for 30 grep -q 'Ready to accept connections' /tmp/redis.log
fi
barrier serving
[ "$NODE" = a ] || wait_for 30 ping
for victim in proxy monitor; do
    barrier "$victim"
    if [ "$NODE" = a ]; then
        process=$(rack_process $victim)
        kill -9 "$process"
        [ $victim = proxy ] || crosslane up --rack "$RACK" --node a
        wait_for 30 rack_process $victim >/dev/null
        [ "$(rack_process $victim)" != "$process" ]
    fi
    barrier "after $victim"
    [ "$NODE" = a ] || wait_for 60 ping
    echo "after kill -9 of the $victim: fine"
done
barrier measured
[ "$NODE" = b ] || kill -0 "$server"
crosslane down --rack "$RACK"
