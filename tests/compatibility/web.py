"""Servers of HTTP."""

import os
import pathlib
import signal
import subprocess
import sys

from trial import Failed, curl_many, entry, free_port, last_words, number, program


def serve_nginx(trial, port, extra=""):
    (trial.folder / "page.html").write_bytes(b"x" * 1000)
    configuration = trial.folder / "nginx.conf"
    configuration.write_text(
        f"daemon off; worker_processes 1; pid {trial.folder}/pid; error_log {trial.folder}/error;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")
        + "events { worker_connections 512; }\n"
        + f"http {{ access_log off; keepalive_requests 1000000; client_body_temp_path {trial.folder}/body;\n"
        + f"server {{ listen 127.0.0.1:{port}; root {trial.folder}; {extra} }} }}\n"
    )
    return trial.serve([program("nginx"), "-c", str(configuration), "-p", str(trial.folder)], port)


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
    # Of a connection that is kept, the old worker may close the end behind an answer: each request has its own.
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
