"""Exchanges bulk data over some connections, reads everything, and waits until their memory has been released.

The server waits in poll and the client in recv. Prints the bytes of shared memory that a connection keeps, once they
are few; the time that this takes is not judged.
"""

import os
import select
import signal
import socket
import sys
import time

CONNECTIONS = 20
KEPT_BYTES_MAX = int(sys.argv[1])
WAIT_S_MAX = 30


def memory_bytes(pid):
    """Returns the memory of lanes that a process has touched; of a page that both have touched, half."""
    total, inside = 0, False
    with open(f"/proc/{pid}/smaps") as maps:
        for line in maps:
            if "-" in line.split(maxsplit=1)[0]:
                inside = "memfd:crosslane" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def serve(listener):
    poll, connections = select.poll(), {}
    for _ in range(CONNECTIONS):
        connection = listener.accept()[0]
        connections[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            connections[number].sendall(connections[number].recv(1 << 20))


def exchange(address, done):
    connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    for connection in connections:
        for size in [40_000] * 20 + [300_000]:
            connection.sendall(bytes(size))
            left = size
            while left:
                left -= len(connection.recv(left))
    os.write(done, b"!")
    connections[0].recv(1)


listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
done, say_done = os.pipe()


def start(run, *arguments):
    """Starts a child that runs a function and exits."""
    child = os.fork()
    if child == 0:
        try:
            run(*arguments)
        finally:
            os._exit(1)
    return child


server = start(serve, listener)
client = start(exchange, listener.getsockname(), say_done)
os.close(say_done)
try:
    if os.read(done, 1) != b"!":
        raise SystemExit("the client ended")
    began = time.monotonic()
    while True:
        kept = sum(memory_bytes(pid) for pid in (server, client)) // CONNECTIONS
        if 0 < kept <= KEPT_BYTES_MAX:
            break
        if time.monotonic() - began > WAIT_S_MAX:
            raise SystemExit(f"a connection still keeps {kept} bytes of at most {KEPT_BYTES_MAX}")
        time.sleep(0.05)
    print(kept, f"after {time.monotonic() - began:.2f} s", file=sys.stderr)
    print("ok")
finally:
    for pid in (server, client):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
