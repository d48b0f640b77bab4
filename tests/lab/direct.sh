# lab: --guests 2 --device vfio --program redis-server --program redis-cli --timeout 300
# `trust = "direct"` over a device under VFIO, where the proxies forward the connections. Killed and stopped programs
# block neither the device nor others; a connection is passed on by exec and by SCM_RIGHTS, and is reset with its proxy
# and with its monitor. The rack comes up also where the kernel reserves the memory for VFIO. Run by a test, which
# provides hand-on.

KILLS=8 # more than there are spans in windows of this rack's size

serve() { # PORT
    lanes redis-server --port "$1" --protected-mode no --save '' >"/tmp/redis.$1" 2>&1 &
    wait_for grep -q 'Ready to accept connections' "/tmp/redis.$1"
}
ask() { lanes redis-cli -h 127.77.0.1 -p "$@" 2>/dev/null; }
ping() { [ "$(ask "$1" ping)" = PONG ]; }
# A subscriber waits for published messages.
subscribe() { # FILE
    lanes redis-cli -h 127.77.0.1 subscribe news >"$1" 2>&1 &
    subscriber=$!
    wait_for grep -q subscribe "$1"
}
has_open() { [ "$(carried connections_open)" = "$1" ]; }
# The process saw the reset, and was not killed because its memory vanished.
must_be_reset() { # PROCESS
    status=0
    wait "$1" || status=$?
    [ $status = 1 ]
}

barrier booted
rack_up direct
[ "$NODE" = b ] || serve 6379
barrier serving

if [ "$NODE" = b ]; then
    wait_for ping 6379
    for number in $(seq $KILLS); do
        subscribe "/tmp/killed.$number"
        kill -9 "$(pidof redis-cli)"
        wait_for has_open 0
    done
    lanes hand-on 127.77.0.1 6379
    subscribe /tmp/news
fi
barrier subscribed

# The next proxy serves new connections.
if [ "$NODE" = a ]; then
    kill_now proxy
    wait_for rack_process proxy >/dev/null
else
    must_be_reset "$subscriber"
    wait_for ping 6379
    subscribe /tmp/news
fi
barrier 'after the proxy'

# The proxy ends with the monitor, and connections are reset: those of busy programs and those of stopped ones. That
# blocks neither the device nor the clients of another server.
if [ "$NODE" = a ]; then
    lanes lab-stream serve 127.77.0.1:9001 1000 &
    stream=$!
    wait_for grep -q ':2329 ' /proc/net/tcp
    program=$(pidof redis-server)
    barrier listening
else
    program=$(pidof redis-cli)
    barrier listening
    lanes lab-stream connect 127.77.0.1:9001 1000 &
    stream=$!
fi
wait_for has_open 2
kill -STOP "$program"
barrier stopped
if [ "$NODE" = a ]; then
    kill_now monitor
    must_be_reset "$stream"
    crosslane up --rack "$RACK" --node a
    serve 6380
else
    must_be_reset "$stream"
fi
barrier 'another server'
[ "$NODE" = a ] || wait_for ping 6380
barrier 'by the other server'
kill -CONT "$program"
if [ "$NODE" = b ]; then
    must_be_reset "$subscriber"
    wait_for ping 6379
fi
barrier 'served again'
if [ "$NODE" = a ]; then
    kill -0 "$program"
    # shellcheck disable=SC2046 # there are two
    kill $(pidof redis-server)
fi
crosslane down --rack "$RACK"

# Once VFIO has mapped the memory, the kernel does not let programs map it.
barrier down
# shellcheck disable=SC2153 # DEVICE comes from the first program
bar=/sys/bus/pci/devices/$DEVICE/resource2_wc
bytes=$(stat -c %s "$bar")
mount --bind /dev/null "$bar"
rack_up direct 2>/tmp/up
umount "$bar"
grep -q "no effect.*VFIO.*$bar.*iomem=relaxed" /tmp/up
refused=$(lab-word "$bar" "$bytes" 0 2>&1 || true)
echo "$refused" | grep -q 'Invalid argument'
[ "$NODE" = b ] || serve 6379
barrier 'by proxies'
if [ "$NODE" = b ]; then
    wait_for ping 6379
    [ "$(carried bytes_sent)" -gt 0 ]
fi
barrier end
crosslane down --rack "$RACK"
lab-word "$bar" "$bytes" 0
