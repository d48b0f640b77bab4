# lab: --guests 2 --program redis-server --program redis-cli
# For a test that kills guest a's machine while a program of guest b waits for its bytes, and boots it again.

ping() { [ "$(lanes redis-cli -h 127.77.0.1 ping 2>/dev/null)" = PONG ]; }

rack_up proxy "5 s" # a killed machine is detected by its missing heartbeats
case $NODE in
a)
    lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
    wait_for grep -q 'Ready to accept connections' /tmp/redis.log
    host serving
    ;;
b)
    wait_for ping
    lanes redis-cli -h 127.77.0.1 subscribe news >/tmp/news 2>&1 &
    subscriber=$!
    wait_for grep -q subscribe /tmp/news
    host connected
    must_fail $subscriber
    host reset
    wait_for ping
    host again
    ;;
esac
crosslane down --rack "$RACK"
