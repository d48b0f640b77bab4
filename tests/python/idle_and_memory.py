"""Measures fifty connections between two processes: the memory that each side has touched, and its load while idle.

Run:  crosslane run -- python3 tests/python/idle_and_memory.py

Prints lines of a role, a fact and a number. A page that both sides have touched counts half at each, so the figures of
both sides add up to the memory in use.
"""
import os
import selectors
import socket
import time

CONNECTIONS = 50
MESSAGES = 300  # every page that small messages ever touch
MESSAGE_BYTES = 100
IDLE_S = 1


def touched_kib():
    total, inside = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split(maxsplit=1)[0]:
                inside = "memfd:crosslane" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


def voluntary_switches():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))


class Endpoint:
    def __init__(self, role, to_peer, from_peer):
        self.role, self.to_peer, self.from_peer = role, to_peer, from_peer

    def meet(self):
        os.write(self.to_peer, b"m")
        os.read(self.from_peer, 1)

    def say(self, fact, value):
        os.write(1, f"{self.role} {fact} {value}\n".encode())

    def say_touched(self, when):
        self.meet()
        self.say(f"touched_kib_{when}", touched_kib() / CONNECTIONS)
        self.meet()

    def say_idle(self, sockets):
        watched = selectors.EpollSelector()
        for connection in sockets:
            watched.register(connection, selectors.EVENT_READ)
        watched.select(IDLE_S)  # lets the effects of the traffic pass
        cpu_s, switches = time.process_time(), voluntary_switches()
        watched.select(IDLE_S)
        self.say("idle_cpu_ms", 1000 * (time.process_time() - cpu_s))
        self.say("idle_switches", voluntary_switches() - switches)
        self.meet()


def client(endpoint, address):
    sockets = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    endpoint.say_touched("connected")
    for _ in range(MESSAGES):
        for connection in sockets:
            connection.sendall(bytes(MESSAGE_BYTES))
            connection.recv(MESSAGE_BYTES, socket.MSG_WAITALL)
    endpoint.say_touched("used")
    endpoint.say_idle(sockets)


def server(endpoint, listener):
    sockets = [listener.accept()[0] for _ in range(CONNECTIONS)]
    endpoint.say_touched("connected")
    for _ in range(MESSAGES):
        for connection in sockets:
            connection.sendall(connection.recv(MESSAGE_BYTES, socket.MSG_WAITALL))
    endpoint.say_touched("used")
    endpoint.say_idle(sockets)


def main():
    listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
    (up_out, up_in), (down_out, down_in) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        client(Endpoint("client", up_in, down_out), listener.getsockname())
        os._exit(0)
    server(Endpoint("server", down_in, up_out), listener)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


main()
