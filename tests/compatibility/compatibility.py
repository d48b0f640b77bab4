#!/usr/bin/env python3
"""Programs that nobody changed, over kernel TCP and over lanes, in turn. Prints a page of documentation.

usage: compatibility.py CROSSLANE [--rounds N] [PROGRAM...]

Each program's own client or benchmark loads it. A program that is not installed is a line that says so. Servers are on
loopback, and each round has a rack directory of its own."""

import argparse
import contextlib
import getpass
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PATIENCE_SECONDS = 30
CLIENT_SECONDS = 120
LOOK_EVERY_SECONDS = 0.2
ENTRIES = []


class Missing(Exception):
    """A program is not installed."""


class Failed(Exception):
    """A program did not do what it does over kernel TCP."""


def entry(name, client, unit):
    def register(function):
        ENTRIES.append((name, client, unit, function))
        return function

    return register


def program(name, *folders):
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", *folders]))
    if found is None:
        raise Missing(name)
    return found


def last_words(text):
    """Fit for a cell of a table."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1].replace("|", "/")[:120] if lines else "nothing said"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Trial:
    """One round of a program over one path."""

    def __init__(self, crosslane, by_lane, folder):
        self.crosslane = crosslane
        self.by_lane = by_lane
        self.folder = pathlib.Path(folder)
        self.environment = dict(os.environ, CROSSLANE_RACK=str(self.folder / "rack"))
        (self.folder / "rack").mkdir(mode=0o700)
        self.servers = []
        self.most = {"lane": 0, "kernel": 0}

    def command(self, arguments):
        return [self.crosslane, "run", "--", *arguments] if self.by_lane else list(arguments)

    def serve(self, arguments, port, **options):
        """Starts a server, and waits until it listens."""
        log = open(self.folder / f"server-{len(self.servers)}.log", "wb")
        with log:
            server = subprocess.Popen(
                self.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | options.pop("environment", {}),
                start_new_session=True,
                **options,
            )
        self.servers.append(server)
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            if server.poll() is not None:
                raise Failed(f"{arguments[0]} ended: {last_words(pathlib.Path(log.name).read_text(errors='replace'))}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return server
            time.sleep(0.05)
        raise Failed(f"{arguments[0]} does not listen after {PATIENCE_SECONDS} s")

    def client(self, arguments, **options):
        """Runs a client to its good end; returns what it printed, and how long it took."""
        began = time.monotonic()
        client = subprocess.Popen(
            self.command(arguments),
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment | options.pop("environment", {}),
            start_new_session=True,
            **options,
        )
        done = threading.Event()
        watcher = threading.Thread(target=self.watch, args=[done])
        watcher.start()
        try:
            output = client.communicate(timeout=CLIENT_SECONDS)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            raise Failed(f"{arguments[0]} was not done after {CLIENT_SECONDS} s") from None
        finally:
            done.set()
            watcher.join()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
        if client.returncode != 0:
            raise Failed(f"{arguments[0]} ended with {client.returncode}: {last_words(output)}")
        return output, time.monotonic() - began

    def watch(self, done):
        """Looks at the bytes of all programs while a client runs: those of a process go with it."""
        while self.by_lane and not done.wait(LOOK_EVERY_SECONDS):
            self.note_paths()

    def note_paths(self):
        """What `crosslane stat` says of all programs of the rack."""
        said = subprocess.run([self.crosslane, "stat", "--json"], env=self.environment, capture_output=True)
        if said.returncode != 0:
            return
        totals = [process["totals"] for process in json.loads(said.stdout)["processes"]]
        for path, most in self.most.items():
            names = f"{path}_bytes_sent", f"{path}_bytes_received"
            self.most[path] = max(most, sum(total[name] for total in totals for name in names))

    def path(self):
        lanes, kernel = self.most["lane"], self.most["kernel"]
        if lanes == 0:
            return "kernel TCP"
        return "lane" if kernel <= lanes / 100 else f"lane {100 * lanes // (lanes + kernel)}%"

    def end(self):
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
        for server in self.servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def number(pattern, text):
    found = re.findall(pattern, text)
    if not found:
        raise Failed(f"no figure in: {last_words(text)}")
    return float(found[-1])


def curl_many(trial, url, count, *options):
    """One connection, one request behind the other; each answer is checked by its length."""
    config = trial.folder / "curl.txt"
    request = f'url = "{url}"\noutput = "/dev/null"\nwrite-out = "%{{http_code}} %{{size_download}}\\n"\n'
    config.write_text(request * count)
    output, seconds = trial.client([program("curl"), "--silent", "--show-error", *options, "--config", str(config)])
    answers = set(output.strip().split("\n"))
    if len(answers) != 1 or not answers.pop().startswith("200 "):
        raise Failed(f"curl's answers differ: {sorted(set(output.split(chr(10))))[:3]}")
    return count / seconds


# --- stores -----------------------------------------------------------------------------------------------------------


def redis_benchmark(trial, connections, requests):
    port = free_port()
    server = ["--bind", "127.0.0.1", "--save", "", "--port", str(port), "--dir", str(trial.folder)]
    trial.serve([program("redis-server"), *server], port)
    options = ["-p", str(port), "-c", str(connections), "-n", str(requests), "-t", "get", "--csv"]
    output, _ = trial.client([program("redis-benchmark"), *options])
    return number(r'"GET","([\d.]+)"', output)


@entry("Redis", "redis-benchmark, 1 connection", "GET/s")
def redis(trial):
    return redis_benchmark(trial, 1, 50000)


@entry("Redis", "redis-benchmark, 50 connections", "GET/s")
def redis_many(trial):
    return redis_benchmark(trial, 50, 100000)


@entry("memcached", "memcslap, 4 connections", "operations/s")
def memcached(trial):
    port = free_port()
    trial.serve([program("memcached"), "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(port)], port)
    count = 100000
    _, seconds = trial.client(
        [program("memcslap"), f"--servers=127.0.0.1:{port}", "--concurrency=4", f"--execute-number={count}"]
    )
    return 4 * count / seconds


@entry("PostgreSQL", "pgbench -S, 4 connections", "transactions/s")
def postgresql(trial):
    folders = [str(folder) for folder in pathlib.Path("/usr/lib/postgresql").glob("*/bin")]
    data, port = trial.folder / "data", free_port()
    os.chmod(trial.folder, 0o777)
    as_user = {}
    if os.geteuid() == 0:
        data.mkdir()
        shutil.chown(data, "postgres")
        as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        # A rack belongs to one user.
        shutil.chown(trial.folder / "rack", "postgres")
    initdb = [program("initdb", *folders), "-D", str(data), "--auth=trust", "--no-sync", "-U", "postgres"]
    done = subprocess.run(initdb, capture_output=True, cwd="/", **as_user)
    if done.returncode != 0:
        raise Failed(f"initdb: {last_words(done.stderr.decode())}")
    server = [program("postgres", *folders), "-D", str(data), "-p", str(port), "-k", "", "-h", "127.0.0.1"]
    trial.serve([*server, "-c", "fsync=off"], port, cwd="/", **as_user)
    bench = [program("pgbench", *folders), "-h", "127.0.0.1", "-p", str(port), "-U", "postgres"]
    trial.client([*bench, "-i", "-q", "postgres"], cwd="/", **as_user)
    output, _ = trial.client([*bench, "-S", "-c", "4", "-T", "3", "postgres"], cwd="/", **as_user)
    return number(r"tps = ([\d.]+)", output)


@entry("etcd", "etcdctl, one put a process", "operations/s")
def etcd(trial):
    client_port, peer_port = free_port(), free_port()
    url, peers = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    names = ["--data-dir", str(trial.folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url]
    trial.serve([program("etcd"), *names, "--listen-peer-urls", peers], client_port)
    put = [program("etcdctl"), "--endpoints", url, "put", "a", "b"]
    trial.client(put)  # which waits until there is a leader
    return 10 / sum(trial.client(put)[1] for _ in range(10))


# --- web --------------------------------------------------------------------------------------------------------------


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


# --- files and logins -------------------------------------------------------------------------------------------------


@entry("sshd", "scp of 256 MiB", "MB/s")
def scp(trial):
    if os.geteuid() != 0:
        raise Missing("root, for sshd")
    port, folder = free_port(), trial.folder
    for name in ("host", "user"):
        subprocess.run(
            [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    os.chmod(folder, 0o700)
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    configuration = folder / "sshd_config"
    configuration.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\nUsePAM no\n"
        "Subsystem sftp internal-sftp\n"
    )
    trial.serve([program("sshd"), "-D", "-e", "-f", str(configuration)], port)
    content = os.urandom(256 << 20)
    (folder / "big").write_bytes(content)
    options = ["-i", str(folder / "user"), "-P", str(port), "-F", "/dev/null", "-q"]
    for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"):
        options += ["-o", option]
    _, seconds = trial.client([program("scp"), *options, str(folder / "big"), f"root@127.0.0.1:{folder}/copy"])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


@entry("git daemon", "git clone of 20 MB", "MB/s")
def git(trial):
    port, source = free_port(), trial.folder / "source"
    tool = program("git")
    quiet = {"check": True, "capture_output": True}
    subprocess.run([tool, "init", "-q", str(source)], **quiet)
    (source / "big").write_bytes(os.urandom(20 << 20))
    author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run([tool, "-C", str(source), "add", "big"], **quiet)
    subprocess.run([tool, "-C", str(source), *author, "commit", "-q", "-m", "one"], **quiet)
    trial.serve(
        [tool, "daemon", "--export-all", "--listen=127.0.0.1", f"--port={port}", f"--base-path={trial.folder}"], port
    )
    _, seconds = trial.client([tool, "clone", "-q", f"git://127.0.0.1:{port}/source", str(trial.folder / "copy")])
    if (trial.folder / "copy/big").read_bytes() != (source / "big").read_bytes():
        raise Failed("the copy differs")
    return 20 * 1.048576 / seconds


@entry("rsync daemon", "rsync of 512 MiB", "MB/s")
def rsync(trial):
    port, folder = free_port(), trial.folder
    content = os.urandom(512 << 20)
    (folder / "source").mkdir()
    (folder / "source/big").write_bytes(content)
    configuration = folder / "rsyncd.conf"
    configuration.write_text(f"use chroot = no\n[source]\npath = {folder}/source\nuid = {os.getuid()}\n")
    server = [program("rsync"), "--daemon", "--no-detach", "--address=127.0.0.1", f"--port={port}"]
    trial.serve([*server, f"--config={configuration}"], port)
    _, seconds = trial.client([program("rsync"), f"rsync://127.0.0.1:{port}/source/big", str(folder / "copy")])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


# --- TLS, queues and tools --------------------------------------------------------------------------------------------


@entry("OpenSSL s_server", "curl over TLS, 1 connection", "requests/s")
def s_server(trial):
    port, folder = free_port(), trial.folder
    tool = program("openssl")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    subprocess.run([tool, "req", "-x509", *key, *files], check=True, capture_output=True)
    (folder / "page").write_bytes(b"x" * 1000)
    server = [tool, "s_server", "-accept", f"127.0.0.1:{port}", "-WWW", "-quiet"]
    trial.serve([*server, "-key", str(folder / "key"), "-cert", str(folder / "certificate")], port, cwd=folder)
    return curl_many(trial, f"https://127.0.0.1:{port}/page", 1000, "--insecure")


@entry("mosquitto", "mosquitto_pub, 10,000 messages of QoS 1", "messages/s")
def mosquitto(trial):
    port = free_port()
    configuration = trial.folder / "mosquitto.conf"
    user = "user root\n" if os.geteuid() == 0 else ""
    configuration.write_text(f"{user}listener {port} 127.0.0.1\nallow_anonymous true\n")
    trial.serve([program("mosquitto"), "-c", str(configuration)], port)
    lines = trial.folder / "lines"
    lines.write_text(("x" * 64 + "\n") * 10000)
    with open(lines, "rb") as source:
        _, seconds = trial.client(
            [program("mosquitto_pub"), "-h", "127.0.0.1", "-p", str(port), "-t", "a", "-q", "1", "-l"], stdin=source
        )
    return 10000 / seconds


@entry("iperf3", "iperf3, 1 stream", "Gbit/s")
def iperf3(trial):
    port = free_port()
    trial.serve([program("iperf3"), "-s", "-B", "127.0.0.1", "-p", str(port)], port)
    output, _ = trial.client([program("iperf3"), "-c", "127.0.0.1", "-p", str(port), "-t", "3", "-J"])
    return json.loads(output)["end"]["sum_received"]["bits_per_second"] / 1e9


@entry("socat", "socat, 256 MiB", "MB/s")
def socat(trial):
    port, folder = free_port(), trial.folder
    content = os.urandom(256 << 20)
    (folder / "big").write_bytes(content)
    tool = program("socat")
    trial.serve([tool, "-U", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork", f"FILE:{folder}/big"], port)
    _, seconds = trial.client([tool, "-u", f"TCP:127.0.0.1:{port}", f"CREATE:{folder}/copy"])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


@entry("busybox httpd (static)", "curl, 1 connection a request", "requests/s")
def busybox(trial):
    port = free_port()
    (trial.folder / "page.html").write_bytes(b"x" * 1000)
    trial.serve(
        [program("busybox"), "httpd", "-f", "-p", f"127.0.0.1:{port}", "-h", str(trial.folder)], port
    )
    return curl_many(trial, f"http://127.0.0.1:{port}/page.html", 2000)


# --- the page ---------------------------------------------------------------------------------------------------------


def measure(crosslane, function, by_lane):
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        trial = Trial(crosslane, by_lane, folder)
        try:
            rate = function(trial)
            if by_lane:
                trial.note_paths()
            return rate, trial.path()
        finally:
            trial.end()


def row(crosslane, name, client, unit, function, rounds):
    rates = {False: [], True: []}
    paths = []
    try:
        for _ in range(rounds):
            for by_lane in (False, True):
                rate, path = measure(crosslane, function, by_lane)
                rates[by_lane].append(rate)
                if by_lane:
                    paths.append(path)
    except Missing as missing:
        return f"| {name} | {client} | not tried: no {missing} | | | |"
    except Failed as failed:
        path = "lanes" if len(rates[False]) > len(rates[True]) else "kernel TCP"
        return f"| {name} | {client} | **fails over {path}**: {failed} | | | |"
    kernel, lane = (statistics.median(rates[by_lane]) for by_lane in (False, True))
    figures = [f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}" for rate in (kernel, lane)]
    return f"| {name} | {client} | {paths[-1]} | {figures[0]} {unit} | {figures[1]} {unit} | {lane / kernel:.2f} |"


HEAD = """\
# Programs over lanes

Made by `./x exam` (tests/compatibility/compatibility.py): programs that nobody changed, each loaded by its own client
or benchmark on loopback, server and client with `crosslane run --`. An error or a wrong answer is a failure.

{origin}

- **Path**: where the bytes went, as `crosslane stat` tells while the client runs. `kernel TCP`: no byte by a lane, with
  the reason below the table.
- **Kernel TCP**, **Lanes**: medians of {rounds} rounds, the two in turn. **Ratio**: lanes to kernel TCP. With two noisy
  cores, rounds differ by a fifth and more: ratios from 0.8 to 1.25 are not distinguishable from 1.

| Server | Client | Path | Kernel TCP | Lanes | Ratio |
|---|---|---|---:|---:|---:|"""

FOOT = """
Why some are over kernel TCP: busybox is a static program, into which no library can be loaded; etcd is a Go program,
which makes its system calls itself. Both work beside accelerated clients, which fall back.

Notes: a server that is started by root and gives root up before it listens (`memcached -u nobody`) stays on kernel TCP,
because a rack directory belongs to one user; here it runs as the user who runs the script. Over kernel TCP, 8
connections to Java's own HTTP server take about 45 ms a request: most likely Nagle's algorithm and a delayed
acknowledgement, which lanes do not have (not traced). A wrong answer, an
error of a client or a server that ends is a line that begins with **fails**.
"""


def origin():
    """What the figures are of."""
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    here = pathlib.Path(__file__).parent
    commit = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    machine = model[1] if model else os.uname().machine
    return (
        f"Commit {commit.stdout.strip() or 'unknown'}, {time.strftime('%Y-%m-%d')}, "
        f"Linux {os.uname().release.split('-')[0]}, {os.cpu_count()} cores ({machine})."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crosslane", metavar="CROSSLANE")
    parser.add_argument("programs", metavar="PROGRAM", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    chosen = [
        entry
        for entry in ENTRIES
        if not arguments.programs or any(word.lower() in entry[0].lower() for word in arguments.programs)
    ]
    if not chosen:
        parser.error(f"no program is named {' or '.join(arguments.programs)}")
    rows = []
    crosslane = str(pathlib.Path(arguments.crosslane).resolve())
    print(HEAD.format(origin=origin(), rounds=arguments.rounds))
    for entry in chosen:
        rows.append(row(crosslane, *entry, arguments.rounds))
        print(rows[-1], flush=True)
    print(FOOT, end="")
    return 1 if any("**fails over lanes**" in line for line in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
