"""A client repeatedly sends over a new connection and then over a busy one. Prints how often epoll_wait of the server
reported the busy one first: 0 over kernel TCP."""

import os
import select
import socket
import sys
import time

ROUNDS = 100
BUSY_EXCHANGES = 6
MESSAGE_BYTES = 8
ECHO = b"an echo!"


def serve(listener, count):
    """Returns the first bytes of the messages in the order in which they were reported."""
    epoll = select.epoll()
    connections, reported = {}, []
    while len(connections) < count + 1:
        connection = listener.accept()[0]
        connections[connection.fileno()] = connection
        epoll.register(connection, select.EPOLLIN)
    busy = next(iter(connections.values()))
    while len(reported) < 2 * count:
        for descriptor, _ in epoll.poll():
            message = connections[descriptor].recv(MESSAGE_BYTES)
            if message != ECHO:
                reported.append(message)
            if message == ECHO or len(reported) % 2 == 0:
                busy.send(ECHO)
    return reported


def main():
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * ROUNDS)
    server = os.fork()
    if server == 0:
        reported = serve(listener, ROUNDS)
        pairs = [(b"new %04d" % number, b"bus %04d" % number) for number in range(ROUNDS)]
        wrong = sum(tuple(reported[2 * number:2 * number + 2]) != pair for number, pair in enumerate(pairs))
        print(wrong, flush=True)
        os._exit(0)
    connections = [socket.create_connection(listener.getsockname()) for _ in range(ROUNDS + 1)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    busy, *young = connections
    for _ in range(BUSY_EXCHANGES):
        busy.send(ECHO)
        busy.recv(MESSAGE_BYTES)
    for number, connection in enumerate(young):
        connection.send(b"new %04d" % number)
        busy.send(b"bus %04d" % number)
        busy.recv(MESSAGE_BYTES)
        # The next message finds the server spinning or blocked.
        time.sleep(0.0002 if number % 2 else 0.003)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))


main()
