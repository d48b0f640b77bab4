"""Sends to a peer that does not read until it is full, for twelve combinations of buffer sizes and write sizes. Round
trips before that make the connection busy.

Prints a line for each: SO_SNDBUF, SO_RCVBUF (0 is the default), bytes of a write, and bytes accepted.
"""

import select
import socket

CASES = [
    (0, 0, 1),
    (0, 0, 1000),
    (0, 0, 65536),
    (0, 0, 1 << 20),
    (4096, 0, 4096),
    (65536, 0, 100),
    (262144, 0, 16384),
    (1 << 20, 0, 65536),
    (0, 4096, 1000),
    (0, 1 << 20, 1 << 20),
    (65536, 65536, 1000),
    (2 << 20, 2 << 20, 1 << 20),
]
FULL_FOR_S = 0.1
ROUND_TRIPS = 50


def accepted_bytes(sender, size):
    """Counts accepted bytes until there has been no room for a while, because TCP makes some room late."""
    sender.setblocking(False)
    data, total = bytes(size), 0
    while select.select([], [sender], [], FULL_FOR_S)[1]:
        try:
            total += sender.send(data)
        except BlockingIOError:
            return total
    return total


def received_bytes(receiver, total):
    received = 0
    while received < total:
        data = receiver.recv(1 << 20)
        if not data or any(data):
            raise SystemExit(f"after {received} of {total} bytes: the received bytes differ from those sent")
        received += len(data)


for send_buffer, receive_buffer, size in CASES:
    with socket.socket() as listener, socket.socket() as sender:
        listener.bind(("127.0.0.1", 0))
        if receive_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        listener.listen(1)
        if send_buffer:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        sender.connect(listener.getsockname())
        receiver = listener.accept()[0]
        receiver.settimeout(20)
        for _ in range(ROUND_TRIPS):
            for one, other in ((sender, receiver), (receiver, sender)):
                one.sendall(b"x")
                other.recv(1)
        total = accepted_bytes(sender, size)
        received_bytes(receiver, total)
        receiver.close()
        print(send_buffer, receive_buffer, size, total, flush=True)
