"""Makes connections of every kind one after the other and checks that neither process grows.

Usage: growth.py COUNT. Prints "ok" and, for each process, the growth in KiB and descriptors since the first tenth of
the connections, during which caches fill.
"""

import os
import socket
import sys

COUNT = int(sys.argv[1])
GROWTH_KIB_MAX = 1024
EXCHANGES_MAX = 6
BYTES = [2, 2, 100, 20_000]


def size():
    """Returns the resident memory in KiB and the number of descriptors."""
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * 4
    return resident, len(os.listdir("/proc/self/fd"))


def grown(first):
    kib, descriptors = size()
    return kib - first[0], descriptors - first[1]


def exchange(connection, sends_first, count, length):
    for _ in range(count):
        for sends in (sends_first, not sends_first):
            if sends:
                connection.sendall(b"x" * length)
            else:
                left = length
                while left > 0:
                    left -= len(connection.recv(left)) or sys.exit("the connection ended early")


def live(number, connection, is_client):
    exchange(connection, is_client, number % (EXCHANGES_MAX + 1), BYTES[number % len(BYTES)])
    match number % 3:
        case 0 if is_client:
            connection.shutdown(socket.SHUT_WR)
        case 1 if not is_client:
            connection.send(b"left unread")
    connection.close()


def run(next_connection, is_client):
    for number in range(COUNT):
        if number == COUNT // 10:
            first = size()
        live(number, next_connection(), is_client)
    kib, descriptors = grown(first)
    print("client" if is_client else "server", kib, descriptors, flush=True)
    return kib <= GROWTH_KIB_MAX and descriptors <= 0


def main():
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    address = listener.getsockname()
    server = os.fork()
    if server == 0:
        os._exit(0 if run(lambda: listener.accept()[0], False) else 1)
    listener.close()
    is_right = run(lambda: socket.create_connection(address), True)
    _, status = os.waitpid(server, 0)
    if status != 0 or not is_right:
        raise SystemExit("a process has grown")
    print("ok")


main()
