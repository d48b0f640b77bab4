# lab: --guests 2 --memory 64M
# Two guests share one memory: each writes words that the other reads, at its start and at its end.

word() { lab-word "$MEMORY" "$MEMORY_BYTES" "$@"; }
is() { [ "$(word "$1")" = "$2" ]; }

[ "$(ls /sys/class/net)" = lo ] # no network but the loopback
last=$((MEMORY_BYTES - 8))
barrier booted
case $NODE in
a)
    word 0 0xc0ffee01
    wait_for is 0x1000 0xc0ffee02
    word $last 0x12345678
    ;;
b)
    wait_for is 0 0xc0ffee01
    word 0x1000 0xc0ffee02
    wait_for is $last 0x12345678
    ;;
esac
echo "guest $NODE has seen the other's word"
