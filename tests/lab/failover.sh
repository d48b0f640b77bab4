# lab: --guests 2 --network --timeout 300
# The guests have a window and a network. The link of the window is lost because a monitor hangs: a stream in both
# directions, every byte of which is compared, continues over kernel TCP. Then the link is trained again.

# Whether the status of this node contains this text.
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
