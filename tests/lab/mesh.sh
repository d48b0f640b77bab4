# lab: --guests 3 --device vfio --program redis-server --program redis-cli
# For a test: three nodes over one device, woken by interrupts, each with a server for the programs of all. Guest c is
# killed and booted again; a connection between the other two is not affected.

ping() { [ "$(lanes redis-cli -h "$1" ping 2>/dev/null)" = PONG ]; }
meet_all() {
    for peer in a b c; do
        wait_for ping $peer
    done
}

rack_up proxy "10 s"
lanes redis-server --port 6379 --protected-mode no --save '' >/tmp/redis.log 2>&1 &
meet_all
if [ "$NODE" = b ]; then
    lanes redis-cli -h a subscribe news >/tmp/news 2>&1 &
    subscriber=$!
    wait_for grep -q subscribe /tmp/news
fi
host meshed # guest c is killed here
case $NODE in
a) [ "$(lanes redis-cli -h a publish news 'c is gone')" = 1 ] ;;
b) wait_for grep -q 'c is gone' /tmp/news ;;
esac
host apart
meet_all
[ "$NODE" != b ] || kill "$subscriber"
[ "$(doorbells)" -ge 10 ]
host again
crosslane down --rack "$RACK"
