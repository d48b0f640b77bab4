"""Sends bytes to an echo server and checks the echo. Usage: echo_client.py PORT [BYTES]"""

import hashlib
import socket
import sys

size = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
data = (hashlib.sha256(b"echo").digest() * (size // 32 + 1))[:size]
got = b""
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as server:
    for start in range(0, size, 10_000):
        piece = data[start : start + 10_000]
        server.sendall(piece)
        while len(got) < start + len(piece):
            more = server.recv(65536)
            if not more:
                raise SystemExit(f"end of stream after {len(got)} of {size} bytes")
            got += more
if got != data:
    raise SystemExit("the echoed bytes differ")
print("echoed", size)
