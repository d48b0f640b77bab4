"""A server in a memory cgroup whose lanes reach the bound of their memory, because some clients do not read.

Usage: memory_bound.py poll|epoll|threads CGROUP_PROCS

The server joins the cgroup whose file `cgroup.procs` is CGROUP_PROCS. Prints "ok" if clients that read get all that
they ask for, and the server is idle once it only waits for those that do not.
"""

import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time

KIND, CGROUP_PROCS = sys.argv[1:]
SILENT_CLIENTS, READING_CLIENTS = 12, 8
ANSWER_BYTES = 20_000_000
ENDLESS_BYTES = 1 << 40
CHUNK = bytes(20_000)
EXCHANGES, SENDS_PER_EVENT = 4, 3
SETTLE_S, WATCHED_S, WATCHED_CPU_S_MAX = 1, 2, 1
RECEIVE_S_MAX = 20
SEND_TIMEOUT = struct.pack("ll", 3, 0)


def wanted_bytes(request):
    return {b"x": 1, b"S": ENDLESS_BYTES, b"D": ANSWER_BYTES}[request]


def serve_ready(listener):
    selector = {"poll": selectors.PollSelector, "epoll": selectors.EpollSelector}[KIND]()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, events in selector.select():
            if key.fileobj is listener:
                client = listener.accept()[0]
                client.setblocking(False)
                selector.register(client, selectors.EVENT_READ, 0)
                continue
            client, left = key.fileobj, key.data
            try:
                if events & selectors.EVENT_READ:
                    request = client.recv(1)
                    if not request:
                        raise ConnectionResetError
                    left += wanted_bytes(request)
                # A few at a time, so that the lanes of all clients grow until there is no memory.
                for _ in range(SENDS_PER_EVENT):
                    left -= client.send(CHUNK[:left])
            except BlockingIOError:
                pass
            except ConnectionError:
                selector.unregister(client)
                client.close()
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            selector.modify(client, wanted, left)


def serve_one(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
    while request := client.recv(1):
        left = wanted_bytes(request)
        while left > 0:
            try:
                left -= client.send(CHUNK[:left])
            except BlockingIOError:
                if request != b"S":
                    return
            except ConnectionError:
                return
    client.close()


def serve_by_threads(listener):
    while True:
        client = listener.accept()[0]
        threading.Thread(target=serve_one, args=(client,), daemon=True).start()


def connect(address):
    client = socket.create_connection(address)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", RECEIVE_S_MAX, 0))
    for _ in range(EXCHANGES):
        client.sendall(b"x")
        assert client.recv(1)
    return client


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as stat:
        user, system = map(int, stat.read().rsplit(") ", 1)[1].split()[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def main(address, server):
    silent = [connect(address) for _ in range(SILENT_CLIENTS)]
    for client in silent:
        client.sendall(b"S")
    time.sleep(SETTLE_S)
    for _ in range(READING_CLIENTS):
        client, received = connect(address), 0
        client.sendall(b"D")
        while received < ANSWER_BYTES:
            data = client.recv(1 << 18)
            if not data:
                return f"the end after {received} bytes"
            received += len(data)
        client.close()
    time.sleep(SETTLE_S)
    before = cpu_s(server)
    time.sleep(WATCHED_S)
    used = cpu_s(server) - before
    return "ok" if used <= WATCHED_CPU_S_MAX else f"{used} s of processor time in {WATCHED_S} s without work"


listener = socket.create_server(("127.0.0.1", 0), backlog=64)
address = listener.getsockname()
server = os.fork()
if server == 0:
    # Before its first connection, when the library reads the limits of the process.
    with open(CGROUP_PROCS, "w") as procs:
        procs.write(str(os.getpid()))
    (serve_by_threads if KIND == "threads" else serve_ready)(listener)
listener.close()
try:
    print(main(address, server), flush=True)
finally:
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
