# lab: --guests 2 --timeout 300
# Streams between the guests for a minute, in both directions of two connections; every byte is compared.

barrier booted
rack_up
if [ "$NODE" = a ]; then
    lanes lab-stream serve 127.77.0.1:9001 60 &
    first=$!
    lanes lab-stream serve 127.77.0.1:9002 60 &
else
    wait_for lanes lab-stream connect 127.77.0.1:9001 60 &
    first=$!
    wait_for lanes lab-stream connect 127.77.0.1:9002 60 &
fi
second=$!
wait $first
wait $second
barrier measured
crosslane down --rack "$RACK"
