#!/usr/bin/env bash
# What tests/services/run.sh does beside systemd: a client, HAProxy, nginx, PHP-FPM, and behind it Redis, memcached and
# PostgreSQL, each with the unit file and the user of Debian.
set -euo pipefail
grep -qz '^container=test$' /proc/1/environ || { echo "$0: tests/services/run.sh starts it" >&2; exit 2; }
programs=$1 work=$2
library=/usr/lib/crosslane/lib/x86_64-linux-gnu/libcrosslane.so
readonly programs work library rack=/var/lib/crosslane client=5 # games
export CROSSLANE_RACK=$rack
# shellcheck source=tests/own-machine.sh
. "$work/own-machine.sh"

until_it_works() { # COMMAND...
    local tries
    for tries in {1..100}; do
        "$@" >"$work/wait.log" 2>&1 && return
        sleep 0.1
    done
    cat "$work/wait.log"
    echo "$* did not work in $tries tries"
    return 1
}

configure() {
    postgresql=$(pg_lsclusters --no-header | awk '$2 == "main" { print $1; exit }')
    php=$(basename "$(dirname /etc/php/*/fpm)")
    # The first request of a process opens connections that stay.
    cat >/var/www/html/index.php <<'PHP'
<?php
function talk($server, $request, $last) {
    for ($count = 0; $count < 40; $count++) {
        fwrite($server, $request);
        do { $line = fgets($server); } while ($line !== false && rtrim($line) !== $last);
    }
}
$text = str_repeat("x", 500);
$redis = pfsockopen("127.0.0.1", 6379);
talk($redis, "*2\r\n$4\r\nECHO\r\n$500\r\n$text\r\n", $text);
$memcached = pfsockopen("127.0.0.1", 11211);
talk($memcached, "set key 0 0 500\r\n$text\r\n", "STORED");
$database = pg_pconnect("host=127.0.0.1 user=shop password=shop dbname=postgres sslmode=disable gssencmode=disable");
for ($count = 0; $count < 40; $count++) {
    $row = pg_fetch_row(pg_query($database, "select repeat('y', 500)"));
    if (strlen($row[0]) !== 500) { http_response_code(500); }
}
echo $text;
PHP
    head -c 500 /dev/zero | tr '\0' x >/var/www/html/text
    sed -i -e 's/^listen = .*/listen = 127.0.0.1:9000/' -e 's/^pm = .*/pm = static/' \
        -e 's/^pm.max_children = .*/pm.max_children = 2/' "/etc/php/$php/fpm/pool.d/www.conf"
    cat >/etc/nginx/sites-enabled/default <<'TEXT'
upstream php { server 127.0.0.1:9000; keepalive 4; }
server {
    listen 127.0.0.1:8001;
    root /var/www/html;
    location = /text { }
    location / {
        include fastcgi_params;
        fastcgi_param SCRIPT_FILENAME $document_root/index.php;
        fastcgi_keep_conn on;
        fastcgi_pass php;
    }
}
TEXT
    # nginx gives a program that it starts in its own place only these variables.
    echo 'env LD_PRELOAD; env CROSSLANE_RACK;' >/etc/nginx/modules-enabled/10-crosslane.conf
    cat >>/etc/haproxy/haproxy.cfg <<'TEXT'
frontend shop
    bind 127.0.0.1:8000
    default_backend nginx
backend nginx
    http-reuse always
    server nginx 127.0.0.1:8001
TEXT
    systemd-tmpfiles --create --prefix=/run
    services=(redis-server memcached nginx haproxy "php$php-fpm")
}

make_rack() {
    crosslane rack-dir create $rack --group 61000
    # Clients, the proxy, the web server, and what is behind it.
    local rule rules=("$client haproxy 8000" "$client www-data 8001" 'haproxy www-data 8001' 'www-data redis 6379'
        'www-data memcache 11211' 'www-data postgres 5432')
    for rule in "${rules[@]}"; do
        # shellcheck disable=SC2086 # words
        set -- $rule
        crosslane rack-dir allow $rack --from "$1" --to "$2" --ports "$3"
    done
}

main_process() { # SERVICE
    systemctl show --property MainPID --value "$1"
}

start() { # SERVICE: as the documents say
    crosslane enable --check "$1" --library $library &&
        crosslane enable "$1" --library $library &&
        systemctl restart "$1" &&
        systemctl is-active "$1" &&
        until_it_works grep -q libcrosslane "/proc/$(main_process "$1")/maps"
}

# Debian's PostgreSQL passes on only the variables of a file.
start_postgresql() {
    if crosslane enable --check "postgresql@$postgresql-main" --library $library; then return 1; fi
    local variables=/etc/postgresql/$postgresql/main/environment
    # shellcheck disable=SC2016 # the loader replaces $LIB
    echo 'LD_PRELOAD = '"'"'/usr/lib/crosslane/$LIB/libcrosslane.so'"'" >>"$variables"
    echo "CROSSLANE_RACK = '$rack'" >>"$variables"
    systemctl restart "postgresql@$postgresql-main" &&
        until_it_works runuser -u postgres -- psql -c 'select 1' &&
        runuser -u postgres -- psql -c "create role shop login password 'shop'"
}

as_client() { # PROGRAM ARGS...
    runuser -u games -- "$programs/crosslane" run --library $library -- "$@"
}

get() { # REQUESTS: all of one connection
    as_client python3 - "$1" <<'PYTHON'
import http.client, sys
server = http.client.HTTPConnection("127.0.0.1", 8000)
for _ in range(int(sys.argv[1])):
    server.request("GET", "/")
    answer = server.getresponse()
    assert (answer.status, answer.read()) == (200, b"x" * 500), answer.status
PYTHON
}

carries_lanes() { # USER PROGRAM
    local bytes
    bytes=$(lane_bytes $rack "$(id -u "$1")" "$2") || return 1
    echo "lanes of $2 of user $1: $bytes bytes"
    [ "$bytes" -ge 60000 ]
}

until_it_works systemctl is-active basic.target
configure
make_rack
for service in "${services[@]}"; do
    try "$service is enabled and starts" start "$service"
done
try 'PostgreSQL starts with the variables in its file' start_postgresql
try 'requests pass all services' until_it_works get 1
try 'a hundred requests pass all services' get 100
for program in 'redis redis-server' 'memcache memcached' 'postgres postgres' 'haproxy haproxy' 'www-data nginx' \
    'www-data php-fpm'; do
    try "$program has lanes" carries_lanes "${program% *}" "${program#* }"
done

# Requests of several connections while nginx changes. One of a new connection must not fail; one of a connection that
# has carried others may find it closed, as without lanes, and is sent again.
under_load() { # COMMAND...
    as_client python3 - "$work" >"$work/load.log" 2>&1 <<'PYTHON' &
import http.client, os, sys, threading
stop, failures, requests = os.path.join(sys.argv[1], "stop"), [], [0, 0]
def get(server):
    server.request("GET", "/text")
    answer = server.getresponse()
    assert (answer.status, answer.read()) == (200, b"x" * 500), answer.status
def load(keeps):
    server = None
    while not os.path.exists(stop) and not failures:
        is_new = server is None
        server = server or http.client.HTTPConnection("127.0.0.1", 8001)
        try:
            get(server)
            requests[keeps] += 1
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            if is_new:
                failures.append(error)
        except Exception as error:
            failures.append(error)
        else:
            if keeps:
                continue
        server.close()
        server = None
threads = [threading.Thread(target=load, args=(count % 2,)) for count in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(requests, "requests of new and of kept connections", *map(repr, failures))
sys.exit(bool(failures) or min(requests) < 50)
PYTHON
    local load=$! status=0
    sleep 1
    "$@" || status=$?
    sleep 1
    touch "$work/stop"
    wait $load || status=$?
    rm "$work/stop"
    cat "$work/load.log"
    return $status
}
reload_nginx() {
    local _
    for _ in 1 2 3; do
        systemctl reload nginx || return 1
        sleep 0.5
    done
}
upgrade_nginx() { # nginx(8): USR2 starts the new program, QUIT ends the old one
    local old
    old=$(cat /run/nginx.pid)
    kill -USR2 "$old" &&
        until_it_works test -e /run/nginx.pid.oldbin &&
        sleep 0.5 &&
        kill -QUIT "$old" &&
        until_it_works test ! -e "/proc/$old"
}
nginx_has_lanes() {
    crosslane explain --pid "$(cat /run/nginx.pid)"
    local before after
    before=$(lane_bytes $rack "$(id -u www-data)" nginx) || return 1
    get 100 || return 1
    after=$(lane_bytes $rack "$(id -u www-data)" nginx) || return 1
    echo "$before bytes before, $after after"
    [ "$after" -gt $((before + 60000)) ]
}
try 'nginx reloads without a failed request' under_load reload_nginx
try 'nginx has lanes after the reload' nginx_has_lanes
try 'nginx is upgraded without a failed request' under_load upgrade_nginx
try 'nginx has lanes after the upgrade' nginx_has_lanes

runs_bare() { # SERVICE
    crosslane disable "$1" && systemctl restart "$1" && systemctl is-active "$1" || return 1
    ! grep -q libcrosslane "/proc/$(main_process "$1")/maps"
}
for service in "${services[@]}"; do
    try "$service is disabled again" runs_bare "$service"
done

print_result
