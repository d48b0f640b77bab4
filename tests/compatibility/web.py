"""HTTP servers."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

from trial import (
    Failed,
    Missing,
    curl_many,
    entry,
    free_port,
    last_words,
    make_certificate,
    number,
    program,
)


def serve_nginx(trial, port, extra="", daemon=False):
    """Starts nginx. As a daemon, it keeps the library when it replaces its program."""
    (trial.folder / "page.html").write_bytes(b"x" * 1000)
    configuration = trial.folder / "nginx.conf"
    mode = "daemon on; env LD_PRELOAD; env CROSSLANE_RACK;" if daemon else "daemon off;"
    configuration.write_text(
        f"{mode} worker_processes 1; pid {trial.folder}/pid; error_log {trial.folder}/error;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")
        + "events { worker_connections 512; }\n"
        + f"http {{ access_log off; keepalive_requests 1000000; client_body_temp_path {trial.folder}/body;\n"
        + f"server {{ listen 127.0.0.1:{port}; root {trial.folder}; {extra} }} }}\n"
    )
    server = [program("nginx"), "-c", str(configuration), "-p", str(trial.folder)]
    return trial.serve(["sh", "-c", '"$@" && exec sleep infinity', "sh", *server] if daemon else server, port)


def wrk(trial, url, *options):
    output, _ = trial.client([program("wrk"), "-t", "1", "-c", "8", "-d", "3", *options, url])
    if "Socket errors" in output or "Non-2xx" in output:
        errors = [line for line in output.split("\n") if "Socket errors" in line or "Non-2xx" in line]
        raise Failed(f"wrk: {last_words(errors[0])}")
    return number(r"Requests/sec:\s+([\d.]+)", output)


@entry("nginx", "wrk, 8 connections, 1 kB", "requests/s")
def nginx(trial):
    port = free_port()
    serve_nginx(trial, port)
    return wrk(trial, f"http://127.0.0.1:{port}/page.html")


@entry("nginx, reloaded every 0.3 s", "curl, 1 connection a request", "requests/s")
def nginx_reload(trial):
    port = free_port()
    server = serve_nginx(trial, port)
    # The old worker may close a kept connection after an answer, so each request has its own connection.
    pid = int((trial.folder / "pid").read_text())
    reloads = subprocess.Popen(["sh", "-c", f"while sleep 0.3; do kill -HUP {pid}; done"], start_new_session=True)
    try:
        result = curl_many(trial, f"http://127.0.0.1:{port}/page.html", 6000, "--header", "Connection: close")
    finally:
        os.killpg(reloads.pid, signal.SIGKILL)
        reloads.wait()
    if server.poll() is not None:
        raise Failed("nginx ended in a reload")
    return result


@entry("HAProxy before nginx", "wrk, 8 connections, 1 kB", "requests/s")
def haproxy(trial):
    front, back = free_port(), free_port()
    serve_nginx(trial, back)
    configuration = trial.folder / "haproxy.cfg"
    times = "timeout connect 5s\n timeout client 30s\n timeout server 30s\n"
    configuration.write_text(
        f"defaults\n mode http\n {times}"
        f"listen one\n bind 127.0.0.1:{front}\n server web 127.0.0.1:{back}\n"
    )
    trial.serve([program("haproxy"), "-db", "-f", str(configuration)], front)
    return wrk(trial, f"http://127.0.0.1:{front}/page.html")


@entry("Apache", "wrk, 8 connections, 1 kB", "requests/s")
def apache(trial):
    port = free_port()
    (trial.folder / "page.html").write_bytes(b"x" * 1000)
    os.chmod(trial.folder, 0o755)
    modules = pathlib.Path("/usr/lib/apache2/modules")
    names = ["mpm_event", "authz_core", "mime"]
    configuration = trial.folder / "apache.conf"
    configuration.write_text(
        "".join(f"LoadModule {name}_module {modules}/mod_{name}.so\n" for name in names)
        + f"ServerName localhost\nListen 127.0.0.1:{port}\nPidFile {trial.folder}/pid\n"
        + f"ErrorLog {trial.folder}/error\nDocumentRoot {trial.folder}\nTypesConfig /dev/null\n"
        + ("User www-data\nGroup www-data\n" if os.geteuid() == 0 else "")
        + f"KeepAlive On\nMaxKeepAliveRequests 0\n<Directory {trial.folder}>\nRequire all granted\n</Directory>\n"
    )
    trial.serve([program("apache2"), "-D", "FOREGROUND", "-f", str(configuration)], port)
    return wrk(trial, f"http://127.0.0.1:{port}/page.html")


@entry("Python http.server", "curl, 1 connection a request", "requests/s")
def http_server(trial):
    port = free_port()
    (trial.folder / "page.html").write_bytes(b"x" * 1000)
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port), "--directory", str(trial.folder)]
    trial.serve(server, port)
    return curl_many(trial, f"http://127.0.0.1:{port}/page.html", 2000)


NODE = """
const http = require('http');
const body = Buffer.alloc(1000, 'x');
http.createServer((request, response) => response.end(body)).listen(+process.argv[2], '127.0.0.1');
"""

NODE_CLUSTER = """
const cluster = require('cluster');
if (cluster.isPrimary) { cluster.fork(); cluster.fork(); } else {
""" + NODE + "}\n"


def node_program(trial, text):
    port = free_port()
    script = trial.folder / "server.js"
    script.write_text(text)
    trial.serve([program("node"), str(script), str(port)], port)
    return wrk(trial, f"http://127.0.0.1:{port}/")


@entry("Node.js", "wrk, 8 connections, 1 kB", "requests/s")
def node(trial):
    return node_program(trial, NODE)


@entry("Node.js, cluster of two", "wrk, 8 connections, 1 kB", "requests/s")
def node_cluster(trial):
    return node_program(trial, NODE_CLUSTER)


JAVA = """
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

public class Server {
    public static void main(String[] arguments) throws Exception {
        byte[] body = "x".repeat(1000).getBytes();
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0])), 64);
        server.createContext("/", exchange -> {
            exchange.sendResponseHeaders(200, body.length);
            try (var stream = exchange.getResponseBody()) { stream.write(body); }
        });
        server.start();
    }
}
"""


@entry("Java, com.sun.net.httpserver", "wrk, 8 connections, 1 kB", "requests/s")
def java(trial):
    port = free_port()
    source = trial.folder / "Server.java"
    source.write_text(JAVA)
    trial.serve([program("java"), str(source), str(port)], port)
    return wrk(trial, f"http://127.0.0.1:{port}/")


# --- gateways and caches ----------------------------------------------------------------------------------------------


@entry("nginx, its program replaced (USR2) every 0.5 s", "curl, 1 connection a request", "requests/s")
def nginx_upgrade(trial):
    port = free_port()
    serve_nginx(trial, port, daemon=True)  # otherwise it ignores USR2
    pid = trial.folder / "pid"
    # As in its manual: USR2 starts the new master, and QUIT ends the old one once the new one has written its pid file.
    script = (
        f"while sleep 0.5; do old=$(cat {pid}); kill -USR2 $old || exit 1; "
        f"until [ -s {pid} ] && ! grep -qx $old {pid}; do sleep 0.05; done; sleep 0.1; "
        f"echo done >>{trial.folder}/upgrades; kill -QUIT $old; done"
    )
    upgrades = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:
        result = curl_many(trial, f"http://127.0.0.1:{port}/page.html", 12000, "--header", "Connection: close")
        if upgrades.poll() is not None:
            raise Failed("the old nginx ended before it was told to quit")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(upgrades.pid, signal.SIGKILL)
        upgrades.wait()
    if not (trial.folder / "upgrades").exists():
        raise Failed("no upgrade completed in time")
    return result


@entry("Squid before nginx", "curl, 1 connection", "requests/s")
def squid(trial):
    front, back, folder = free_port(), free_port(), trial.folder
    trial.run_as("proxy")
    serve_nginx(trial, back)
    configuration = folder / "squid.conf"
    configuration.write_text(
        f"http_port 127.0.0.1:{front}\nhttp_access allow all\ncache_mem 16 MB\ncache deny all\n"
        f"pid_filename {folder}/squid-pid\naccess_log none\ncache_log {folder}/cache.log\nshutdown_lifetime 0 seconds\n"
        f"coredump_dir {folder}\npinger_enable off\nnetdb_filename none\n"
    )
    trial.serve([program("squid"), "-N", "-f", str(configuration)], front)
    return curl_many(trial, f"http://127.0.0.1:{back}/page.html", 4000, "--proxy", f"http://127.0.0.1:{front}")


@entry("Varnish before nginx", "wrk, 8 connections, 1 kB", "requests/s")
def varnish(trial):
    front, back = free_port(), free_port()
    serve_nginx(trial, back)
    server = [program("varnishd"), "-F", "-j", "none", "-n", str(trial.folder / "varnish"), "-s", "malloc,64m"]
    trial.serve([*server, "-a", f"127.0.0.1:{front}", "-b", f"127.0.0.1:{back}", "-T", "none"], front)
    # One request in two is passed to nginx.
    passed = wrk(trial, f"http://127.0.0.1:{front}/page.html", "-H", "Authorization: Basic YTpi")
    return (passed + wrk(trial, f"http://127.0.0.1:{front}/page.html")) / 2


@entry("stunnel before nginx", "wrk over TLS, 8 connections, 1 kB", "requests/s")
def stunnel(trial):
    front, back = free_port(), free_port()
    serve_nginx(trial, back)
    key, certificate = make_certificate(trial)
    configuration = trial.folder / "stunnel.conf"
    configuration.write_text(
        f"foreground = yes\npid =\ndebug = err\n[one]\naccept = 127.0.0.1:{front}\nconnect = 127.0.0.1:{back}\n"
        f"cert = {certificate}\nkey = {key}\n"
    )
    trial.serve([program("stunnel4"), str(configuration)], front)
    return wrk(trial, f"https://127.0.0.1:{front}/page.html")


# --- application servers ----------------------------------------------------------------------------------------------

WSGI = """
def app(environ, start_response):
    length = int(environ.get('CONTENT_LENGTH') or 0)
    body = environ['wsgi.input'].read(length) or b'x' * 1000
    start_response('200 OK', [('Content-Type', 'text/plain'), ('Content-Length', str(len(body)))])
    return [body]
"""

ASGI = """
async def app(scope, receive, send):
    if scope['type'] != 'http':
        return
    body, more = b'', True
    while more:
        event = await receive()
        body, more = body + event.get('body', b''), event.get('more_body', False)
    body = body or b'x' * 1000
    await send({'type': 'http.response.start', 'status': 200, 'headers': [(b'content-length', b'%d' % len(body))]})
    await send({'type': 'http.response.body', 'body': body})
"""

RACK = "run ->(environment) { body = environment['rack.input'].read.to_s; " \
    "[200, {'content-type' => 'text/plain'}, [body.empty? ? 'x' * 1000 : body]] }\n"

PHP = "<?php $body = file_get_contents('php://input'); echo $body === '' ? str_repeat('x', 1000) : $body;\n"


def echo_upload(trial, url):
    """Uploads a file and checks that the same bytes are returned."""
    content = os.urandom(3 << 20)
    (trial.folder / "sent").write_bytes(content)
    options = ["--silent", "--show-error", "--fail", "--data-binary", f"@{trial.folder}/sent"]
    trial.client([program("curl"), *options, "--output", str(trial.folder / "came"), url])
    if (trial.folder / "came").read_bytes() != content:
        raise Failed("the returned bytes differ from those uploaded")


def load_application(trial, port, path="/"):
    url = f"http://127.0.0.1:{port}{path}"
    echo_upload(trial, url)
    return wrk(trial, url)


@entry("gunicorn, two workers of four threads", "wrk, 8 connections, 1 kB", "requests/s")
def gunicorn(trial):
    port = free_port()
    (trial.folder / "application.py").write_text(WSGI)
    server = [program("gunicorn"), "--workers", "2", "--threads", "4", "--bind", f"127.0.0.1:{port}"]
    trial.serve([*server, "--chdir", str(trial.folder), "application:app"], port)
    return load_application(trial, port)


@entry("uvicorn on uvloop", "wrk, 8 connections, 1 kB", "requests/s")
def uvicorn(trial):
    port = free_port()
    (trial.folder / "application.py").write_text(ASGI)
    server = [program("uvicorn"), "--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--no-access-log"]
    trial.serve([*server, "--app-dir", str(trial.folder), "application:app"], port)
    return load_application(trial, port)


@entry("puma, two workers", "wrk, 8 connections, 1 kB", "requests/s")
def puma(trial):
    port = free_port()
    (trial.folder / "config.ru").write_text(RACK)
    server = [program("puma"), "--workers", "2", "--threads", "4:4", "--bind", f"tcp://127.0.0.1:{port}"]
    trial.serve([*server, str(trial.folder / "config.ru")], port, cwd=trial.folder)
    return load_application(trial, port)


@entry("uwsgi behind nginx", "wrk, 8 connections, 1 kB", "requests/s")
def uwsgi(trial):
    front, back = free_port(), free_port()
    (trial.folder / "application.py").write_text(WSGI)
    server = [program("uwsgi"), "--plugin", "python3", "--master", "--processes", "2", "--die-on-term"]
    names = ["--disable-logging", "--wsgi-file", str(trial.folder / "application.py"), "--callable", "app"]
    trial.serve([*server, *names, "--socket", f"127.0.0.1:{back}"], back)
    parameters = "".join(
        f"uwsgi_param {name} {value}; "
        for name, value in {
            "QUERY_STRING": "$query_string", "REQUEST_METHOD": "$request_method", "CONTENT_LENGTH": "$content_length",
            "PATH_INFO": "$document_uri", "SERVER_NAME": "$server_name", "SERVER_PORT": "$server_port",
        }.items()
    )
    serve_nginx(trial, front, f"client_max_body_size 8m; location / {{ uwsgi_pass 127.0.0.1:{back}; {parameters} }}")
    return load_application(trial, front)


@entry("PHP-FPM behind nginx", "wrk, 8 connections, 1 kB", "requests/s")
def php_fpm(trial):
    front, back, folder = free_port(), free_port(), trial.folder
    os.chmod(folder, 0o755)
    (folder / "index.php").write_text(PHP)
    configuration = folder / "fpm.conf"
    user = "user = www-data\ngroup = www-data\n" if os.geteuid() == 0 else ""
    configuration.write_text(
        f"[global]\nerror_log = {folder}/fpm.log\npid = {folder}/fpm-pid\n"
        f"[one]\n{user}listen = 127.0.0.1:{back}\npm = static\npm.max_children = 2\n"
    )
    tools = sorted(pathlib.Path("/usr/sbin").glob("php-fpm*"))
    if not tools:
        raise Missing("php-fpm")
    trial.serve([str(tools[-1]), "--nodaemonize", "--fpm-config", str(configuration)], back)
    parameters = f"include /etc/nginx/fastcgi_params; fastcgi_param SCRIPT_FILENAME {folder}/index.php;"
    serve_nginx(trial, front, f"client_max_body_size 8m; location / {{ fastcgi_pass 127.0.0.1:{back}; {parameters} }}")
    return load_application(trial, front)
