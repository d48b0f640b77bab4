"""Serves clients of another process until it has no descriptor left, then serves those that still wait.

Usage: accept_at_limit.py SOFT HARD. As over kernel TCP, every client gets its own byte back; `accept` fails with EMFILE
at the limit and accepts the waiting clients as descriptors are closed; and an epoll instance that was empty until then
reports all connections. Prints "ok" and the number of connections that fitted.
"""

import errno
import os
import resource
import select
import socket
import sys

CLIENTS_WAITING = 20
soft, hard = int(sys.argv[1]), int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0), backlog=soft + CLIENTS_WAITING)
listener.setblocking(False)
epoll = select.epoll()
all_wait, say_all_wait = os.pipe()
client_process = os.fork()
if client_process == 0:
    address = listener.getsockname()
    listener.close()
    clients = []
    for number in range(soft + CLIENTS_WAITING):
        client = socket.create_connection(address, timeout=20)
        client.sendall(bytes([number % 256]))
        clients.append(client)
    os.write(say_all_wait, b"!")
    for number, client in enumerate(clients):
        if client.recv(10) != bytes([number % 256]):
            print(f"client {number} of {len(clients)} is not served", file=sys.stderr)
            os._exit(1)
    os._exit(0)

os.close(say_all_wait)
if os.read(all_wait, 1) != b"!":
    raise SystemExit("the clients could not connect")
os.close(all_wait)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def accept_all():
    """Accepts until there is no descriptor left or no client waits."""
    accepted = []
    while True:
        try:
            accepted.append(listener.accept()[0])
        except BlockingIOError:
            return accepted, None
        except OSError as error:
            return accepted, error.errno


served, fitted = 0, None
while served < soft + CLIENTS_WAITING:
    accepted, error = accept_all()
    if error not in (None, errno.EMFILE):
        raise SystemExit(f"accept: {os.strerror(error)}")
    if error == errno.EMFILE and fitted is None:
        fitted = len(accepted)
    for connection in accepted:
        epoll.register(connection, select.EPOLLIN)
    reported = set()
    while len(reported) < len(accepted):
        reported.update(descriptor for descriptor, _ in epoll.poll())
    for connection in accepted:
        connection.setblocking(True)
        connection.sendall(connection.recv(10))
        connection.close()
    served += len(accepted)
if fitted is None:
    raise SystemExit("the limit was never reached")
_, status = os.waitpid(client_process, 0)
if status != 0:
    raise SystemExit(f"the clients ended with status {status}")
print("ok", fitted)
