# lab: --guests 2 --timeout 300
# For some seconds, streams between the guests, both ways in each of two connections; every byte is compared.

: "${seconds:=15}" # a test may want more
barrier booted
rack_up
if [ "$NODE" = a ]; then
    lanes lab-stream serve 127.77.0.1:9001 "$seconds" &
    first=$!
    lanes lab-stream serve 127.77.0.1:9002 "$seconds" &
else
    wait_for lanes lab-stream connect 127.77.0.1:9001 "$seconds" &
    first=$!
    wait_for lanes lab-stream connect 127.77.0.1:9002 "$seconds" &
fi
second=$!
wait $first
wait $second
barrier measured
crosslane down --rack "$RACK"
