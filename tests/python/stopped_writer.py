"""Two processes write to one connection, of which one is stopped inside a lane: the other must wait, and not be reset.

Usage: stopped_writer.py STOPPED_S

Stops one process for a moment again and again until the other makes no progress meanwhile, and then for STOPPED_S
seconds. Prints "ok" if both go on afterwards, and "missed" if no stop was inside a lane.
"""

import mmap
import os
import signal
import socket
import struct
import sys
import time

STOPPED_S = float(sys.argv[1])
STOPS_MAX = 400
MOMENT_S = 0.02
GO_ON_S_MAX = 20
BYTES = bytes(16384)


def drain(listener):
    reader = listener.accept()[0]
    while reader.recv(1 << 20):
        pass
    os._exit(0)


def write(writer, counts, own):
    written = 0
    while True:
        writer.sendall(BYTES)
        written += 1
        struct.pack_into("q", counts, own * 8, written)


def start(run, *arguments):
    child = os.fork()
    if child == 0:
        try:
            run(*arguments)
        finally:
            os._exit(1)
    return child


listener = socket.create_server(("127.0.0.1", 0))
start(drain, listener)
writer = socket.create_connection(listener.getsockname())
writer.sendall(BYTES * 20)  # lanes
counts = mmap.mmap(-1, mmap.PAGESIZE)
children = [start(write, writer, counts, own) for own in range(2)]


def written(own):
    return struct.unpack_from("q", counts, own * 8)[0]


def stop(own, seconds):
    """Stops a process. Returns whether the other made progress meanwhile."""
    os.kill(children[own], signal.SIGSTOP)
    os.waitpid(children[own], os.WUNTRACED)
    time.sleep(MOMENT_S)
    before = written(1 - own)
    time.sleep(MOMENT_S)
    has_progress = written(1 - own) != before
    if not has_progress:
        time.sleep(seconds)
    os.kill(children[own], signal.SIGCONT)
    return has_progress


outcome = "missed"
for _ in range(STOPS_MAX):
    time.sleep(MOMENT_S)
    if not stop(0, STOPPED_S):
        outcome = "ok"
        break
for own in range(2):
    before, deadline = written(own), time.monotonic() + GO_ON_S_MAX
    while written(own) == before and time.monotonic() < deadline:
        time.sleep(MOMENT_S)
    if written(own) == before:
        outcome = f"process {own} has not gone on"
for child in children:
    os.kill(child, signal.SIGKILL)
print(outcome, flush=True)
