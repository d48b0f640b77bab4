# lab: --guests 2 --memory 64M
# Two guests train a link over shared memory and send a word back and forth a hundred times, each waking the other.

# shellcheck disable=SC2153 # DEVICE comes from the first program
case $DEVICE_KIND in
dax) device=file:$DEVICE ;;
vfio) device=vfio:$DEVICE ;;
*) device=pci:$DEVICE ;;
esac

[ "$(ls /sys/class/net)" = lo ] # no network but the loopback
case $NODE in
a) lab-link "$device" 0 2 1 ;;
b) lab-link "$device" 1 2 0 ;;
esac
barrier end
