# lab: --guests 2 --program nc.openbsd --timeout 400
# About a minute of streams of known bytes between the guests, both ways in each connection, compared by checksum.

a_bytes() { seq 1 100000; }
b_bytes() { seq 100000 -1 1; }

barrier booted
rack_up
for round in $(seq 1 40); do
    port=$((9000 + round))
    if [ "$NODE" = a ]; then
        a_bytes | lanes nc.openbsd -N -l 127.77.0.1 $port >/tmp/received
        expected=$(b_bytes | sha256sum)
    else
        # Not before the other one listens. A connection that breaks later leaves it without what it expects.
        until b_bytes | lanes nc.openbsd -N 127.77.0.1 $port >/tmp/received; do usleep 100000; done
        expected=$(a_bytes | sha256sum)
    fi
    [ "$(sha256sum </tmp/received)" = "$expected" ]
    barrier "round $round"
done
echo "$round rounds of $(a_bytes | wc -c) bytes each way in $(cut -d' ' -f1 /proc/uptime) s"
crosslane down --rack "$RACK"
