"""Databases and caches."""

import getpass
import pathlib
import re
import time

from trial import WAIT_S_MAX, Failed, entry, free_port, last_words, make_certificate, number, program


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
    trial.run_as("postgres")
    trial.prepare([program("initdb", *folders), "-D", str(data), "--auth=trust", "--no-sync", "-U", "postgres"])
    server = [program("postgres", *folders), "-D", str(data), "-p", str(port), "-k", "", "-h", "127.0.0.1"]
    trial.serve([*server, "-c", "fsync=off"], port)
    bench = [program("pgbench", *folders), "-h", "127.0.0.1", "-p", str(port), "-U", "postgres"]
    trial.client([*bench, "-i", "-q", "postgres"])
    output, _ = trial.client([*bench, "-S", "-c", "4", "-T", "3", "postgres"])
    return number(r"tps = ([\d.]+)", output)


@entry("etcd", "etcdctl, one put a process", "operations/s")
def etcd(trial):
    client_port, peer_port = free_port(), free_port()
    url, peers = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    names = ["--data-dir", str(trial.folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url]
    trial.serve([program("etcd"), *names, "--listen-peer-urls", peers], client_port)
    put = [program("etcdctl"), "--endpoints", url, "put", "a", "b"]
    trial.client(put)  # waits until there is a leader
    # One start of the command for all: it takes longer than etcdctl's connection.
    loop = "for i in $(seq 20); do \"$@\" >/dev/null || exit 1; done"
    return 20 / trial.client(["sh", "-c", loop, "sh", *put])[1]


# --- Redis with high availability -------------------------------------------------------------------------------------


def serve_redis(trial, port, *options):
    """Starts one of several servers of a trial."""
    folder = trial.folder / f"redis-{port}"
    folder.mkdir(exist_ok=True)
    server = ["--bind", "127.0.0.1", "--save", "", "--port", str(port), "--dir", str(folder), *options]
    return trial.serve([program("redis-server"), *server], port)


def ask_redis(trial, port, *words):
    return trial.client([program("redis-cli"), "-h", "127.0.0.1", "-p", str(port), *words])[0].strip()


def wait_for_redis(trial, port, words, expected):
    """Repeats a command until its answer contains the expected text."""
    until = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < until:
        answer = ask_redis(trial, port, *words)
        if expected in answer:
            return
        time.sleep(0.1)
    raise Failed(f"redis-cli {' '.join(words)}: no {expected} after {WAIT_S_MAX} s: {last_words(answer)}")


def set_many(trial, port, count, *options):
    """Writes values of 1 kB to random keys; returns the number per second."""
    bench = ["-p", str(port), "-c", "8", "-n", str(count), "-r", "20000", "-d", "1000", "-t", "set", "--csv", *options]
    output, _ = trial.client([program("redis-benchmark"), *bench])
    return number(r'"SET","([\d.]+)"', output)


def same_data(trial, ports):
    """Checks by digest that the servers hold the same data once the replicas are up to date."""
    digests = [ask_redis(trial, port, "debug", "digest") for port in ports]
    if len(set(digests)) != 1 or set(digests[0]) == {"0"}:
        raise Failed(f"the servers' data differ: {digests}")


@entry("Redis with two replicas", "redis-benchmark, 8 connections, 1 kB", "SET/s")
def redis_replication(trial):
    master, *replicas = ports = [free_port() for _ in range(3)]
    debug = ["--enable-debug-command", "local"]
    serve_redis(trial, master, *debug)
    set_many(trial, master, 20000)  # so that the replicas need a full synchronization
    for replica in replicas:
        serve_redis(trial, replica, *debug, "--replicaof", f"127.0.0.1 {master}")
        wait_for_redis(trial, replica, ["info", "replication"], "master_link_status:up")
    rate = set_many(trial, master, 60000)
    wait_for_redis(trial, master, ["info", "replication"], "connected_slaves:2")
    offset = re.search(r"master_repl_offset:\d+", ask_redis(trial, master, "info", "replication"))[0]
    for replica in replicas:
        wait_for_redis(trial, replica, ["info", "replication"], offset)
    same_data(trial, ports)
    return rate


@entry("Redis with sentinels, after the master was killed", "redis-benchmark, 8 connections, 1 kB", "SET/s")
def redis_sentinel(trial):
    master, replica, *sentinels = [free_port() for _ in range(5)]
    servers = [serve_redis(trial, master), serve_redis(trial, replica, "--replicaof", f"127.0.0.1 {master}")]
    for sentinel in sentinels:
        configuration = trial.folder / f"sentinel-{sentinel}.conf"
        configuration.write_text(
            f"port {sentinel}\nbind 127.0.0.1\ndir {trial.folder}\nsentinel monitor one 127.0.0.1 {master} 2\n"
            "sentinel down-after-milliseconds one 1000\nsentinel failover-timeout one 5000\n"
        )
        trial.serve([program("redis-sentinel"), str(configuration)], sentinel)
    for sentinel in sentinels:
        wait_for_redis(trial, sentinel, ["sentinel", "master", "one"], "num-other-sentinels\n2")
        wait_for_redis(trial, sentinel, ["sentinel", "replicas", "one"], str(replica))
    set_many(trial, master, 20000)
    servers[0].kill()
    for sentinel in sentinels:
        wait_for_redis(trial, sentinel, ["sentinel", "get-master-addr-by-name", "one"], str(replica))
    wait_for_redis(trial, replica, ["role"], "master")
    return set_many(trial, replica, 60000)


@entry("Redis Cluster of three", "redis-benchmark, 8 connections, 1 kB", "SET/s")
def redis_cluster(trial):
    ports = [free_port() for _ in range(3)]
    for port in ports:
        serve_redis(trial, port, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    nodes = [f"127.0.0.1:{port}" for port in ports]
    trial.client([program("redis-cli"), "--cluster", "create", *nodes, "--cluster-yes"])
    for port in ports:
        wait_for_redis(trial, port, ["cluster", "info"], "cluster_state:ok")
    rate = set_many(trial, ports[0], 60000, "--cluster")
    output, _ = trial.client([program("redis-cli"), "--cluster", "check", nodes[0]])
    if "All 16384 slots covered" not in output or sum(int(ask_redis(trial, port, "dbsize")) for port in ports) == 0:
        raise Failed(f"redis-cli --cluster check: {last_words(output)}")
    return rate


@entry("Redis over TLS", "redis-benchmark --tls, 8 connections, 1 kB", "SET/s")
def redis_tls(trial):
    port = free_port()
    key, certificate = make_certificate(trial)
    names = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    server = ["--bind", "127.0.0.1", "--save", "", "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    trial.serve([program("redis-server"), *server, *names, "--dir", str(trial.folder)], port)
    return set_many(trial, port, 40000, "--tls", "--cacert", certificate)


@entry("tokio: mini-redis", "redis-benchmark, 8 connections, 1 kB", "SET/s")
def tokio(trial):
    port = free_port()
    trial.serve([program("mini-redis-server"), "--port", str(port)], port)
    rate = set_many(trial, port, 60000)
    for count in range(20):
        trial.client([program("mini-redis-cli"), "--port", str(port), "set", "key", f"value {count}"])
        output, _ = trial.client([program("mini-redis-cli"), "--port", str(port), "get", "key"])
        if f"value {count}" not in output:
            raise Failed(f"mini-redis-cli: {last_words(output)}")
    return rate


# --- MariaDB ----------------------------------------------------------------------------------------------------------


def serve_mariadb(trial):
    """Starts MariaDB as its own user, like Debian's unit; returns the options of clients."""
    port, folder = free_port(), trial.folder
    trial.run_as("mysql")
    where = ["--no-defaults", f"--datadir={folder}/data"]
    trial.prepare([program("mariadb-install-db"), *where, "--auth-root-authentication-method=normal"])
    names = [f"--socket={folder}/socket", f"--pid-file={folder}/pid", f"--tmpdir={folder}"]
    server = [program("mariadbd"), *where, *names, "--bind-address=127.0.0.1", f"--port={port}"]
    trial.serve([*server, "--innodb-flush-log-at-trx-commit=0"], port)
    return port


@entry("MariaDB", "mariadb-slap, 4 connections, inserts", "queries/s")
def mariadb(trial):
    port, count = serve_mariadb(trial), 20000
    slap = [program("mariadb-slap"), "--no-defaults", "--protocol=tcp", "--host=127.0.0.1", f"--port={port}"]
    load = ["--user=root", "--auto-generate-sql", "--auto-generate-sql-load-type=write", "--concurrency=4"]
    _, seconds = trial.client([*slap, *load, f"--number-of-queries={count}"])
    return count / seconds


@entry("MariaDB", "sysbench oltp_read_write, 4 connections", "transactions/s")
def mariadb_sysbench(trial):
    port = serve_mariadb(trial)
    client = [program("mariadb"), "--no-defaults", "--protocol=tcp", "--host=127.0.0.1", f"--port={port}"]
    trial.client([*client, "--user=root", "--execute=create database sbtest"])
    bench = [program("sysbench"), "oltp_read_write", "--db-driver=mysql", "--mysql-host=127.0.0.1"]
    bench += [f"--mysql-port={port}", "--mysql-user=root", "--threads=4", "--time=3", "--table-size=10000"]
    trial.client([*bench, "prepare"])
    output, _ = trial.client([*bench, "run"])
    return number(r"transactions: .*\(([\d.]+) per sec", output)
