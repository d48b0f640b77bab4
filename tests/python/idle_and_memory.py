"""Fifty connections between two processes: processor time while idle, and memory touched by each.

Run:  crosslane run -- python3 tests/python/idle_and_memory.py
"""
import os
import selectors
import socket
import time

CONNECTIONS = 50
ROUND_TRIPS = 2000
MESSAGE_BYTES = 100
IDLE_S = 5


def touched_kib():
    total, inside = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "memfd:crosslane" in line:
                inside = True
            elif inside and line.startswith("Rss"):
                total, inside = total + int(line.split()[1]), False
    return total // CONNECTIONS


def idle(name, sockets):
    watched = selectors.EpollSelector()
    for connection in sockets:
        watched.register(connection, selectors.EVENT_READ)
    cpu, wall = time.process_time(), time.monotonic()
    watched.select(IDLE_S)
    share = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
    print(f"{name}: idle {share:.4f}% of a core, {touched_kib()} KiB touched a connection")


def main():
    listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
    address = listener.getsockname()
    child = os.fork()
    if child == 0:
        sockets = [socket.create_connection(address) for _ in range(CONNECTIONS)]
        for _ in range(ROUND_TRIPS):
            for connection in sockets:
                connection.send(bytes(MESSAGE_BYTES))
                connection.recv(MESSAGE_BYTES)
        idle("client", sockets)
        os._exit(0)
    sockets = [listener.accept()[0] for _ in range(CONNECTIONS)]
    for _ in range(ROUND_TRIPS):
        for connection in sockets:
            connection.send(connection.recv(MESSAGE_BYTES))
    idle("server", sockets)
    os.waitpid(child, 0)


main()
