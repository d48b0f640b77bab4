# lab: --guests 2 --program nginx --program curl --program iperf3
# nginx in guest a and curl in guest b; then iperf3 in both directions.

mkdir -p /srv /var/lib/nginx /var/log/nginx
seq 1 150000 >/srv/numbers
cat >/tmp/nginx.conf <<'TEXT'
user root;
daemon off;
pid /tmp/nginx.pid;
events {}
http {
    access_log off;
    server { listen 8080; root /srv; }
}
TEXT

barrier booted
rack_up
case $NODE in
a)
    lanes nginx -e /tmp/nginx.log -c /tmp/nginx.conf &
    lanes iperf3 --server --one-off >/tmp/iperf.log &
    wait_for lanes curl -s -o /dev/null http://127.77.0.1:8080/numbers
    barrier serving
    ;;
b)
    barrier serving
    wait_for lanes curl -s -o /dev/null http://127.77.0.1:8080/numbers
    for _ in 1 2 3 4 5; do
        lanes curl -s http://127.77.0.1:8080/numbers | cmp - /srv/numbers
    done
    echo "curl: five times the same $(stat -c %s /srv/numbers) bytes"
    lanes iperf3 --client 127.77.0.1 --bytes 16M --bidir --format M
    ;;
esac
barrier measured
crosslane down --rack "$RACK"
