# lab: --guests 3 --device vfio --memory 64M
# Three guests over one device with a window for each ordered pair: every pair trains its link and uses it, woken by
# interrupts, while the third does the same with another.

own=$(printf '%d' "'$NODE")
own=$((own - 97))
for peer in 0 1 2; do
    [ $peer = $own ] || lab-link "vfio:$DEVICE" $own 3 $peer
done
barrier end
