"""Opens connections up to the descriptor limit, uses them, closes them, and repeats.

Usage: descriptor_limit.py LIMIT, where LIMIT assumes that only descriptors 0, 1 and 2 were inherited. Prints "ok" and
the number of connections that fitted in each round.
"""

import errno
import os
import resource
import socket
import sys

numbers = [os.dup(2) for _ in range(int(sys.argv[1]) - 3)]  # free numbers, whatever was inherited
limit = numbers[-1] + 1
for number in numbers:
    os.close(number)
listener = socket.create_server(("127.0.0.1", 0), backlog=128)
address = listener.getsockname()
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
counts = []
for _ in range(5):
    pairs = []
    try:
        while True:
            client = None  # so that it is not the previous one if there is no descriptor for another
            client = socket.socket()
            client.settimeout(20)
            client.connect(address)
            pairs.append((client, listener.accept()[0]))
    except OSError as error:
        # A connect without descriptors for a lane may be refused, but only with one of these errors.
        if error.errno not in (errno.EMFILE, errno.ECONNREFUSED):
            raise
        if client is not None:  # not accepted; None if there was no descriptor for the socket
            client.close()
    if not pairs:
        raise SystemExit("no connection fits below the limit")
    for client, server in pairs:
        client.sendall(b"ping")
        if server.recv(10) != b"ping":
            raise SystemExit("a connection below the limit is broken")
    counts.append(len(pairs))
    for client, server in pairs:
        client.close()
        server.close()
    listener.settimeout(0.2)
    try:
        while True:  # clients that connected while there was no descriptor left
            listener.accept()[0].close()
    except OSError:
        pass
    listener.settimeout(None)
if min(counts) < counts[0] - 2:
    raise SystemExit(f"descriptors leak: {counts}")
print("ok", *counts)
