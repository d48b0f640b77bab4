# lab: --guests 2 --network --timeout 300
# Beside the window there is a network. The window's link is lost, for a monitor hangs: a stream both ways, every byte
# of which is compared, goes on over kernel TCP. Then the link is trained again.

# Whether this node says so of its link.
says() { crosslane status --rack "$RACK" --json | tr -d ' ' | grep -q "$1"; }

barrier booted
rack_up proxy "5 s" failover
case $NODE in
a) lanes lab-stream serve 10.77.0.1:9001 60 & ;;
b) wait_for lanes lab-stream connect 10.77.0.1:9001 60 & ;;
esac
stream=$!
wait_for says '"connections_open":1'
barrier streaming
[ "$NODE" = b ] || kill -STOP "$(rack_process monitor)"
[ "$NODE" = a ] || wait_for says '"failover_open":1'
barrier moved
[ "$NODE" = b ] || kill -CONT "$(rack_process monitor)"
wait $stream
wait_for says '"state":"up"'
says '"failover_resets":0'
says '"failover_total":1'
barrier measured
crosslane down --rack "$RACK"
