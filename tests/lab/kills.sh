# lab: --guests 2 --program redis-server --program redis-cli
# kill -9 of the monitor and of the proxy of guest a during a connection from guest b: the first does not affect it, the
# second resets it. Then programs connect again; the server keeps running.

ping() { [ "$(lanes redis-cli -h 127.77.0.1 ping 2>/dev/null)" = PONG ]; }

barrier booted
rack_up
case $NODE in
a)
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    server=$!
    wait_for grep -q 'Ready to accept connections' /tmp/redis.log
    barrier serving
    barrier subscribed
    kill_now monitor
    crosslane up --rack "$RACK" --node a
    [ "$(lanes redis-cli -h 127.77.0.1 publish news 'after the monitor')" = 1 ]
    barrier 'after the monitor'
    kill_now proxy
    wait_for rack_process proxy >/dev/null
    barrier 'after the proxy'
    kill -0 "$server"
    ;;
b)
    barrier serving
    wait_for ping
    lanes redis-cli -h 127.77.0.1 subscribe news >/tmp/news 2>&1 &
    subscriber=$!
    wait_for grep -q subscribe /tmp/news
    barrier subscribed
    wait_for grep -q 'after the monitor' /tmp/news
    wait_for ping
    barrier 'after the monitor'
    must_fail $subscriber
    barrier 'after the proxy'
    wait_for ping
    ;;
esac
barrier end
crosslane down --rack "$RACK"
