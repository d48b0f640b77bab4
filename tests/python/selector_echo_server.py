"""Echoes any number of clients on 127.0.0.1 from one thread that blocks only in the selector.

Usage: selector_echo_server.py PORT [--with-child]

With `--with-child`, it forks an idle child repeatedly, so that the child holds most connections too.
"""

import os
import selectors
import socket
import sys
import time

BUFFERED_BYTES_MAX = 1 << 20

selector = selectors.DefaultSelector()
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen(64)
listener.setblocking(False)
selector.register(listener, selectors.EVENT_READ)


def serve(client, buffered, events):
    if events & selectors.EVENT_READ:
        data = client.recv(65536)
        if not data:
            raise ConnectionResetError
        buffered += data
    if buffered:
        try:
            del buffered[: client.send(buffered)]
        except BlockingIOError:
            pass
    wanted = selectors.EVENT_WRITE if buffered else 0
    if len(buffered) < BUFFERED_BYTES_MAX:
        wanted |= selectors.EVENT_READ
    selector.modify(client, wanted, buffered)


CHILD_FROM_S = 0.05
child, forked_at = None, 0


def fork_child():
    """Replaces the last child, if any, by one that also holds the connections accepted since."""
    global child, forked_at
    if child is not None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    forked_at, server = time.monotonic(), os.getpid()
    child = os.fork()
    if child == 0:
        while os.getppid() == server:
            time.sleep(1)
        os._exit(0)


while True:
    if "--with-child" in sys.argv and time.monotonic() - forked_at > CHILD_FROM_S:
        fork_child()
    for key, events in selector.select():
        try:
            if key.fileobj is listener:
                client, _ = listener.accept()
                client.setblocking(False)
                selector.register(client, selectors.EVENT_READ, bytearray())
            else:
                serve(key.fileobj, key.data, events)
        except BlockingIOError:
            pass
        except ConnectionError:
            if key.fileobj is not listener:
                selector.unregister(key.fileobj)
                key.fileobj.close()
