"""Holds many connections to itself: prints a line when all are open, and exits when its standard input ends.

Run:  python3 tests/python/many_connections.py CONNECTIONS
"""
import resource
import socket
import sys

# Both endpoints of a connection and the library's descriptors for each; then room for all others.
DESCRIPTORS_EACH = 4
DESCRIPTORS_BESIDE = 1000

ROUND_TRIPS = 40  # after which a connection uses lanes

connections = int(sys.argv[1])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = connections * DESCRIPTORS_EACH + DESCRIPTORS_BESIDE
resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
listener = socket.create_server(("127.0.0.1", 0), backlog=128)
pairs = []
for _ in range(connections):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for _ in range(ROUND_TRIPS):
        for sender, receiver in ((client, server), (server, client)):
            sender.sendall(b"x")
            receiver.recv(1)
    pairs.append((client, server))
print("connected", len(pairs), flush=True)
sys.stdin.read()
