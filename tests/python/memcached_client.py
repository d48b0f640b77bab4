"""A memcached client over the text protocol: several connections, small and large values, pipelining.

Usage: memcached_client.py HOST PORT. Prints "ok N", where N is the number of bytes of correct values.
"""

import hashlib
import socket
import sys
import threading

CONNECTIONS = 4
KEYS = 200
LARGE_BYTES = 300_000


def value_of(key, size):
    seed = hashlib.sha256(key.encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def size_of(index):
    return LARGE_BYTES if index % 50 == 0 else 1 + index * 17


class Client:
    def __init__(self, host, port):
        self.socket = socket.create_connection((host, port), timeout=30)
        self.file = self.socket.makefile("rb")

    def line(self, want):
        got = self.file.readline()
        if got != want + b"\r\n":
            raise SystemExit(f"got {got!r}, want {want!r}")

    def store(self, keys):
        for key, value in keys:
            self.socket.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key.encode(), len(value), value))
        for _ in keys:
            self.line(b"STORED")

    def fetch(self, key, value):
        self.socket.sendall(b"get %s\r\n" % key.encode())
        self.line(b"VALUE %s 0 %d" % (key.encode(), len(value)))
        got = self.file.read(len(value) + 2)
        if got != value + b"\r\n":
            raise SystemExit(f"the value of {key} is wrong")
        self.line(b"END")
        return len(value)


def exercise(host, port, number, results):
    client = Client(host, port)
    keys = [(f"key-{number}-{i}", value_of(f"{number}-{i}", size_of(i))) for i in range(KEYS)]
    for start in range(0, KEYS, 20):
        client.store(keys[start : start + 20])
    results[number] = sum(client.fetch(key, value) for key, value in keys)
    client.socket.sendall(b"quit\r\n")
    if client.file.read():
        raise SystemExit("bytes after quit")


def main():
    host, port = sys.argv[1], int(sys.argv[2])
    results = [0] * CONNECTIONS
    threads = [
        threading.Thread(target=exercise, args=(host, port, number, results)) for number in range(CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if 0 in results:
        raise SystemExit(f"a connection did not finish: {results}")
    print("ok", sum(results))


main()
