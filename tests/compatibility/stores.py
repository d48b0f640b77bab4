"""Databases and caches."""

import getpass
import os
import pathlib
import shutil
import subprocess

from trial import Failed, entry, free_port, last_words, number, program


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
