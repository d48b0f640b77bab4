"""A peer that writes anything into the memory that it owns, while it keeps its connections to an echo server open.

Usage: hostile_peer.py PORT RING_OFFSET SLOTS NAME=OFFSET...

Runs with lanes from the beginning of each connection. The offsets are those in the memory of an end: of its small
ring, and of its words. Prints "forged N, reset M" at the end: the number of connections, and how many of them the
server has ended.
"""

import ctypes
import os
import random
import socket
import stat
import struct
import sys
import time

PORT, RING, SLOTS = map(int, sys.argv[1:4])
WORDS = {name: int(offset) for name, offset in (word.split("=") for word in sys.argv[4:])}
SLOT_BYTES, LAP = 64, 128
WORD = (1 << 64) - 1
TAG_FACTOR = 0x9E37_79B9_7F4A_7C15
DATA, SWITCH, OPEN, UNKNOWN = 1 << 16, 2 << 16, 3 << 16, 4 << 16
SYS_WRITE, SYS_SENDMSG = 1, 46
SCM_MAX_FD = 253

system = ctypes.CDLL(None).syscall
seed = int(os.environ.get("HOSTILE_SEED", str(time.time_ns())))
chance = random.Random(seed)


def own_mappings():
    """The addresses of the memories that this process may write and others read."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "memfd:crosslane" in line and line.split()[1].startswith("rw-s"):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                if end - begin >= RING + SLOTS * SLOT_BYTES:
                    yield begin, end


def sockets():
    """The descriptors of all sockets. Those that a new connection adds, except its own, are its bells."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                found.add(int(name))
        except OSError:
            pass
    return found


class Connection:
    """A connection whose sends go by its lane, and the words of its memory."""

    def __init__(self):
        before = sockets()
        self.socket = socket.create_connection(("127.0.0.1", PORT), timeout=20)
        self.bells = []
        for _ in range(100):
            token = chance.randbytes(8)
            self.socket.sendall(token)
            assert self.socket.recv(8, socket.MSG_WAITALL) == token
            if self.find(token):
                break
        else:
            raise AssertionError("the connection has not moved to its lane")
        self.bells = list(sockets() - before - {self.socket.fileno()})
        assert self.bells, "the connection has no bell"
        self.socket.setblocking(False)

    def find(self, token):
        for base, end in own_mappings():
            for slot in range(SLOTS):
                if ctypes.string_at(base + RING + slot * SLOT_BYTES + 16, 8) == token:
                    self.base, self.end = base, end
                    start = self[WORDS["Start"]]
                    self.position = start + (slot - start) % LAP
                    self.secret = self[self.slot(self.position)] ^ self.position * TAG_FACTOR & WORD
                    return True
        return False

    def __getitem__(self, offset):
        return ctypes.c_uint64.from_address(self.base + offset).value

    def __setitem__(self, offset, value):
        ctypes.c_uint64.from_address(self.base + offset).value = value & WORD

    @staticmethod
    def slot(position):
        return RING + position % LAP * SLOT_BYTES

    def ring(self, count=1):
        """Wakes the server."""
        for _ in range(count):
            for bell in self.bells:
                system(SYS_WRITE, bell, b"\x01", 1)

    def send(self, count=1):
        """Sends as a correct program, as long as that works."""
        for _ in range(count):
            try:
                self.socket.send(b"x" * 40)
            except OSError:
                return
        time.sleep(0.002)

    def receive(self):
        try:
            return self.socket.recv(1 << 16)
        except OSError:
            return b""

    def is_ended(self):
        try:
            while self.socket.recv(1 << 20):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def record(self, header, payload=b""):
        """Stores a record where the server reads next, without the library's knowledge."""
        self.position += 1
        if self.position % LAP >= SLOTS:
            self.position += LAP - SLOTS
        at = self.slot(self.position)
        ctypes.memmove(self.base + at + 16, payload, len(payload))
        self[at + 8] = header
        self[at] = self.secret ^ self.position * TAG_FACTOR & WORD
        self.ring()
        return at


def forge_word(name, value):
    connection = Connection()
    offset = WORDS[name]
    for _ in range(3):
        connection[offset] = value(connection[offset]) if callable(value) else value
        connection.ring()
        connection.send()
    connection.receive()
    return connection


def forge_record(header, then):
    connection = Connection()
    slot = connection.record(header)
    for next_header in then:
        time.sleep(0.001)
        connection[slot + 8] = next_header
        connection.ring()
    return connection


def forge_end(name, value):
    """An end of the stream, or of the lane, behind an open record."""
    connection = Connection()
    connection.record(OPEN | 5, b"bytes")
    connection[WORDS[name]] = value
    connection.ring()
    return connection


def forge_many_records():
    connection = Connection()
    for _ in range(4 * SLOTS):
        connection.record(DATA | 1, b"x")
    return connection


def forge_return_to_tcp(repeated, ends_by):
    """An end of the move that says that bytes follow by TCP, which never come."""
    connection = Connection()
    up = connection[WORDS["Up"]]
    connection[WORDS["Repeated"]] = repeated
    connection[WORDS["EndsAt"]] = connection.position + ends_by
    connection[WORDS["Down"]] = up
    connection[WORDS["Ended"]] = up << 1
    connection.ring()
    return connection


def forge_new_moves():
    """Moves that begin and end again and again, without a byte."""
    connection = Connection()
    up = connection[WORDS["Up"]]
    for number in range(up, up + 200):
        connection[WORDS["Down"]] = number
        connection[WORDS["Ended"]] = number << 1
        connection[WORDS["Ask"]] = number + 1
        connection[WORDS["UpAt"]] = chance.getrandbits(20)
        connection[WORDS["Start"]] = chance.getrandbits(40)
        connection[WORDS["Up"]] = number + 1
        connection.ring()
    return connection


def forge_frozen(head, place):
    """A receiver that says that it reads no more, from a position that it makes up."""
    connection = Connection()
    connection.send(20)
    connection[WORDS["FrozenHead"]], connection[WORDS["FrozenPlace"]] = head, place
    connection[WORDS["Frozen"]] = 1
    connection.ring()
    connection.send(3)
    return connection


def forge_everything():
    """Random words everywhere, for a while."""
    connection = Connection()
    for _ in range(300):
        name = chance.choice(list(WORDS))
        connection[WORDS[name]] = chance.choice([0, 1, 2, WORD, chance.getrandbits(64), connection[WORDS[name]] + 1])
        if chance.random() < 0.3:
            connection.record(chance.choice([DATA, SWITCH, OPEN, UNKNOWN, 0]) | chance.getrandbits(16))
        if chance.random() < 0.1:
            connection.send()
            connection.receive()
    return connection


def forge_noise():
    """Random bytes in all of the memory."""
    connection = Connection()
    noise = chance.randbytes(connection.end - connection.base)
    ctypes.memmove(connection.base + RING, noise, len(noise) - RING)
    connection.ring()
    connection.send(5)
    ctypes.memmove(connection.base, noise, len(noise))
    connection.ring()
    connection.send(5)
    return connection


def ring_without_pause():
    connection = Connection()
    connection.ring(20_000)
    return connection


class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_char_p), ("len", ctypes.c_size_t)]


class Message(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_len", ctypes.c_uint),
        ("spans", ctypes.POINTER(Span)),
        ("span_count", ctypes.c_size_t),
        ("control", ctypes.c_char_p),
        ("control_len", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


def lingering():
    """A TCP socket whose last close would wait for a minute: its peer reads nothing of what it has sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    return one, other, listener


kept_open = []


def pass_descriptors(make, count, messages):
    """Descriptors of some kind on the bells, which the server has not asked for."""
    connection = Connection()
    made = make()
    kept_open.append(made)
    number = made[0].fileno() if isinstance(made, tuple) else made
    control = struct.pack("Nii", 16 + 4 * count, socket.SOL_SOCKET, socket.SCM_RIGHTS)
    control += struct.pack("i", number) * count
    control += bytes(-len(control) % 8)
    span = Span(b"\x01", 1)
    message = Message(None, 0, ctypes.pointer(span), 1, control, len(control), 0)
    for bell in connection.bells:
        for _ in range(messages):
            system(SYS_SENDMSG, bell, ctypes.byref(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    connection.send()
    return connection


def leave_nothing_but_silence():
    connection = Connection()
    connection.record(OPEN | 30, b"the beginning of a record")
    return connection


def steps():
    values = [0, 1, 2, 1 << 40, 1 << 63, WORD - 1, WORD]
    near = [lambda old, by=by: old + by for by in (-128, -1, 1, 2, 127, 1 << 20)]
    for name in WORDS:
        for value in values + near + [lambda _: chance.getrandbits(64)]:
            yield lambda name=name, value=value: forge_word(name, value)
    for first in (1, 48, 49, 4080, 16_368, 16_369, 65_535):
        for then in ([], [OPEN | 1], [DATA | 1], [OPEN | 65_535], [SWITCH | 1], [0], [OPEN | 50, DATA | 50]):
            yield lambda first=first, then=then: forge_record(OPEN | first, then)
        yield lambda first=first: forge_record(DATA | first, [])
    for ring in (0, 1, 2, 5, 10, 11, 255, 65_535):
        yield lambda ring=ring: forge_record(SWITCH | ring, [])
    above_kind = [kind | 1 | bit for kind in (DATA, SWITCH, OPEN) for bit in (1 << 20, 1 << 63)]
    for header in (0, UNKNOWN | 1, UNKNOWN | 2, 5 << 16 | 1, 15 << 16, WORD, *above_kind):
        yield lambda header=header: forge_record(header, [])
    for name in ("Fin", "Down", "Ended", "Withdrawn", "Closed"):
        for value in (1, 2, 3, 12_345, WORD):
            yield lambda name=name, value=value: forge_end(name, value)
    for repeated in (0, 1, 1000, 1 << 40, WORD):
        for ends_by in (-1, 0, 1, 100, 1 << 50):
            yield lambda repeated=repeated, ends_by=ends_by: forge_return_to_tcp(repeated, ends_by)
    for head in (0, 1, 1 << 20, WORD):
        for place in (0, 1, 8, 11, 40 << 8, WORD):
            yield lambda head=head, place=place: forge_frozen(head, place)
    yield from [forge_many_records, forge_new_moves, forge_noise, ring_without_pause, leave_nothing_but_silence]
    for make in (lambda: os.open("/dev/null", os.O_RDONLY), lambda: os.open("/", os.O_RDONLY), lingering):
        for count, messages in ((1, 1), (SCM_MAX_FD, 3)):
            yield lambda make=make, count=count, messages=messages: pass_descriptors(make, count, messages)
    yield from [forge_everything] * 30


held = []
for step in steps():
    held.append(step())
print(f"forged {len(held)}, reset {sum(connection.is_ended() for connection in held)} (seed {seed})", flush=True)
time.sleep(1000)
