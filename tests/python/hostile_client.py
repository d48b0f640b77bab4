"""Stores forged words into the memory of its own connections to an echo server and keeps them open.

Usage: hostile_client.py PORT SEGMENT_BYTES RING SLOTS FORWARD BACK RETURN_FORWARD RETURN_BACK

The offsets are those of the lane to the server, then of the lane back; see `lane::Layout`. At the end prints
"forged N, reset M": the number of connections, and how many of them the server has ended.
"""

import ctypes
import os
import socket
import struct
import sys
import time

PORT, SEGMENT_BYTES, RING, SLOTS, FORWARD, BACK, RETURN_FORWARD, RETURN_BACK = map(int, sys.argv[1:])
LINE = 64
WORD = (1 << 64) - 1
TAG_FACTOR = 0x9E37_79B9_7F4A_7C15
DATA, SWITCH, OPEN = 1 << 16, 2 << 16, 3 << 16
# The server's receive cursor: its position, then its offset in the record together with the number of the ring.
HEAD, PLACE = FORWARD + 2 * LINE, FORWARD + 2 * LINE + 8
# The positions of this sender and of the server's, and the number of the ring that the server writes to.
TAIL, SERVERS_TAIL, SERVERS_RING = BACK + 2 * LINE, RETURN_BACK + 2 * LINE, RETURN_BACK + 2 * LINE + 16
SERVERS_OPEN = RETURN_BACK + 2 * LINE + 64
# The credit that the server has seen, the limit up to which it checks none, the position of its first record in the
# ring, and the ring that it has left.
CREDIT_SEEN, TAIL_LIMIT, ENTRY, LEFT_RING = (SERVERS_TAIL + offset for offset in (8, 24, 56, 88))
RING_LAST, RING_SMALL = 10, 0
PRODUCER_ASLEEP = FORWARD + LINE
FIN = FORWARD
# In the server's endpoint, before the lane: its own state. The words that its peer writes follow.
STATE_BYTES = 384
STATE = FORWARD - STATE_BYTES
HOLDERS, USERS, SEND_LOCK, RECEIVE_LOCK = 0, 8, 64, 128
CREDIT, OPEN_READ, CAPACITY = RETURN_BACK, RETURN_BACK + 8, RETURN_BACK + LINE + 8


def mappings():
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "memfd:crosslane" in line and end - begin == SEGMENT_BYTES:
                yield begin


class Connection:
    """A connection and the words of its memory."""

    def __init__(self):
        self.socket = socket.create_connection(("127.0.0.1", PORT), timeout=20)
        # A connection gets memory once it is busy; the first record there contains the token of its message.
        bases = []
        while not bases:
            token = os.urandom(8)
            self.socket.sendall(token)
            assert self.socket.recv(8, socket.MSG_WAITALL) == token
            bases = [base for base in mappings() if ctypes.string_at(base + RING + 16, 8) == token]
        (self.base,) = bases
        self.socket.setblocking(False)
        self.secret = self[RING] ^ (self[HEAD] - 1) * TAG_FACTOR & WORD

    def __getitem__(self, offset):
        return ctypes.c_uint64.from_address(self.base + offset).value

    def __setitem__(self, offset, value):
        ctypes.c_uint64.from_address(self.base + offset).value = value & WORD

    def slot(self, position):
        return RING + position % SLOTS * LINE

    def send(self, count=1):
        """Sends correctly, as long as that works, which wakes the server."""
        for _ in range(count):
            try:
                self.socket.send(b"x" * 100)
            except OSError:
                return
        time.sleep(0.01)

    def is_ended(self):
        try:
            while self.socket.recv(1 << 20):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def forge_record(self, header):
        """Forges the record that the server reads next, and sends a correct one behind it."""
        position = self[TAIL]
        self[self.slot(position) + 8] = header
        self[self.slot(position)] = self.secret ^ position * TAG_FACTOR & WORD
        self[TAIL] = position + 1
        self.send()
        return self.slot(position)


def forge_words(offset, values):
    def forge(value):
        connection = Connection()
        connection[offset] = value(connection) if callable(value) else value
        connection.send(200)
        return connection

    return [lambda value=value: forge(value) for value in values]


def forge_state(changes):
    """Forges words of the server's own state and of those that its peer writes."""
    connection = Connection()
    connection.send()
    for offset, value in changes.items():
        connection[STATE + offset] = value
    connection.send(20)
    return connection


def forge_switch(ring):
    connection = Connection()
    connection.forge_record(SWITCH | ring)
    return connection


def forge_open_record(first, then):
    connection = Connection()
    slot = connection.forge_record(first)
    for header in then:
        connection[slot + 8] = header
        connection.send()
    return connection


def forge_end_behind_open_record(end):
    connection = forge_open_record(OPEN | 5, [])
    connection[FIN] = end
    connection.send()
    return connection


def forge_no_room():
    """Forges words by which the server has room in its lane, but none in a ring."""
    connection = Connection()
    connection.send()
    tail = connection[SERVERS_TAIL]
    connection[SERVERS_RING], connection[LEFT_RING] = RING_SMALL, RING_LAST
    connection[ENTRY], connection[TAIL_LIMIT] = tail - (SLOTS - 1), 0
    connection[CREDIT] = connection[CREDIT_SEEN] = tail - SLOTS * 3 // 2
    connection.send()
    return connection


def steps():
    far = [1, 2, 1 << 40, 1 << 63, WORD, WORD - 1]
    near = [lambda c, by=by: c[HEAD] + by for by in (-1, 1, 33, 1 << 20)]
    near_servers = [lambda c, by=by: c[SERVERS_TAIL] + by for by in (-64, 1, 128, 1 << 20)]
    yield from forge_words(PLACE, [1, 10, 11, 255, 1 << 8, 40 << 16 | 1 << 8, 40 << 16 | 50 << 40, WORD])
    yield from forge_words(SERVERS_RING, [1, 10, 11, 200, WORD])
    yield from forge_words(SERVERS_OPEN, [1, 1 << 32 | 1, 64 << 32 | 4080, 64 << 32 | 5000, 1 << 63, WORD])
    yield from forge_words(PRODUCER_ASLEEP, far + near)
    yield from forge_words(CREDIT, far + near_servers)
    yield from forge_words(OPEN_READ, far)
    yield from forge_words(CAPACITY, [1, WORD])
    for offset in range(0, STATE_BYTES, 8):
        for value in (1, 2, os.getpid(), WORD):
            yield lambda offset=offset, value=value: forge_state({offset: value})
    for holder in (1, os.getpid(), os.getppid(), WORD):
        locked = {SEND_LOCK: holder, RECEIVE_LOCK: holder, HOLDERS: 2, USERS: 2}
        yield lambda locked=locked: forge_state(locked)
    yield from (lambda ring=ring: forge_switch(ring) for ring in (0, 1, 5, 10, 11, 255, 65535))
    for first in (1, 40, 4080, 16_368, 16_369, 65_535):
        for then in ([], [OPEN | 1], [DATA | 1], [OPEN | 65_535], [SWITCH | 1], [0], [OPEN | 50, DATA | 50]):
            yield lambda first=first, then=then: forge_open_record(OPEN | first, then)
    yield from (lambda end=end: forge_end_behind_open_record(end) for end in (1, 12_345, WORD))
    yield forge_no_room


held = []
for step in steps():
    held.append(step())
print(f"forged {len(held)}, reset {sum(connection.is_ended() for connection in held)}", flush=True)
time.sleep(1000)
