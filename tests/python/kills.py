"""Kills clients and servers at random moments of their connections.

Usage: kills.py COUNT SEED. The peer of a killed process must see the end of the connection, and nothing may leak: the
server ends with no connections and as many descriptors as before, and still serves. Prints "ok".
"""

import os
import random
import selectors
import signal
import socket
import sys
import time

COUNT, SEED = int(sys.argv[1]), int(sys.argv[2])
WAIT_S_MAX = 20
PAUSE_S_MAX = 0.004
KILLS_PER_CHECK = 50
BYTES_MAX = 200_000
QUESTION = b"how many?"


def serve(listener):
    """Echoes. The answer to `QUESTION` is the number of other connections and of descriptors."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    listener.setblocking(False)
    waiting = {}
    while True:
        for key, events in selector.select():
            connection = key.fileobj
            try:
                if connection is listener:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                    waiting[connection] = b""
                    continue
                if events & selectors.EVENT_READ:
                    data = connection.recv(65536)
                    if not data:
                        raise ConnectionResetError
                    if data == QUESTION:
                        data = b"%d %d" % (len(waiting) - 1, len(os.listdir("/proc/self/fd")))
                    waiting[connection] += data
                if waiting[connection]:
                    sent = connection.send(waiting[connection])
                    waiting[connection] = waiting[connection][sent:]
                wanted = selectors.EVENT_WRITE if waiting[connection] else selectors.EVENT_READ
                selector.modify(connection, wanted)
            except BlockingIOError:
                pass
            except ConnectionError:
                selector.unregister(connection)
                del waiting[connection]
                connection.close()


def talk(address, rng):
    """Acts as a client for ever."""
    while True:
        connections = [socket.create_connection(address) for _ in range(rng.randrange(1, 4))]
        for _ in range(rng.randrange(12)):
            connection = rng.choice(connections)
            sent = rng.randbytes(rng.choice([1, 10, 100, 5000, BYTES_MAX]))
            connection.sendall(sent)
            received = b""
            while len(received) < len(sent):
                received += connection.recv(65536) or sys.exit("the server ended a connection")
            if received != sent:
                sys.exit("wrong bytes")
        if rng.random() < 0.2 and os.fork() == 0:
            # A child that exits at once while it holds the connections.
            os._exit(0)
        for connection in connections:
            if rng.random() < 0.3:
                connection.send(b"unread")
            if rng.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
            if rng.random() < 0.9:
                connection.close()


def start(work, *arguments):
    """Starts a child that runs `work`; it exits with status 1 if the work ends or fails."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            work(*arguments)
        finally:
            os._exit(1)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit(f"a child ended with status {status} before it was killed")


def ask(address):
    """Returns the numbers of connections and descriptors of the server."""
    with socket.create_connection(address, timeout=WAIT_S_MAX) as connection:
        connection.sendall(QUESTION)
        connections, descriptors = connection.recv(100).split()
        return int(connections), int(descriptors)


def await_none(address):
    deadline = time.monotonic() + WAIT_S_MAX
    while True:
        connections, descriptors = ask(address)
        if connections == 0:
            return descriptors
        if time.monotonic() > deadline:
            raise SystemExit(f"the server still has {connections} connections of killed clients")
        time.sleep(0.01)


def kill_a_client(address, rng):
    child = start(talk, address, random.Random(rng.random()))
    time.sleep(rng.random() * PAUSE_S_MAX)
    kill(child)


def kill_a_server(rng):
    """Kills a separate server while clients in this process wait for its answers."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    child = start(serve, listener)
    address = listener.getsockname()
    listener.close()
    clients = [socket.create_connection(address, timeout=WAIT_S_MAX) for _ in range(3)]
    sent = b"x" * rng.choice([1, 100, 5000, BYTES_MAX])
    ends_at = time.monotonic() + rng.random() * PAUSE_S_MAX
    while time.monotonic() < ends_at:
        client = rng.choice(clients)
        client.sendall(sent)
        left = len(sent)
        while left > 0:
            left -= len(client.recv(65536)) or sys.exit("a server ended a connection")
    rng.choice(clients).sendall(sent)
    kill(child)
    for client in clients:
        try:
            while client.recv(65536):
                pass
        except ConnectionResetError:
            pass
        client.close()


def main():
    rng = random.Random(SEED)
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    server = start(serve, listener)
    address = listener.getsockname()
    listener.close()
    before = await_none(address)
    for number in range(COUNT):
        if number % 4 == 3:
            kill_a_server(rng)
        else:
            kill_a_client(address, rng)
        if number % KILLS_PER_CHECK == KILLS_PER_CHECK - 1:
            descriptors = await_none(address)
            # The connection that asks has one more or less at some moments, and the library keeps one for look-ups.
            if descriptors > before + 2:
                raise SystemExit(f"{before} descriptors became {descriptors} after {number + 1} kills")
    kill(server)
    print("ok")


main()
