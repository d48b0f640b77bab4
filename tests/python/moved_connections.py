"""Counts what idle connections hold that have carried some requests: descriptors, mappings, memory, processor time.

Run:  crosslane run -- python3 tests/python/moved_connections.py CONNECTIONS

Prints lines of a role, a fact and a number. All descriptors count, also those that the library hides from the program.
A page that both sides have touched counts half at each.
"""

import os
import resource
import select
import signal
import socket
import sys
import time

CONNECTIONS = int(sys.argv[1])
REQUESTS = 12
IDLE_S = 1


def serve(listener):
    epoll, connections = select.epoll(), {}
    epoll.register(listener, select.EPOLLIN)
    while True:
        for number, _ in epoll.poll():
            if number == listener.fileno():
                connection = listener.accept()[0]
                connections[connection.fileno()] = connection
                epoll.register(connection, select.EPOLLIN)
            else:
                connections[number].sendall(connections[number].recv(1000))


def exchange(address, done):
    connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    for _ in range(REQUESTS):
        for connection in connections:
            connection.sendall(b"x" * 100)
            assert connection.recv(1000) == b"x" * 100
    os.write(done, b"!")
    signal.pause()


def start(run, *arguments):
    child = os.fork()
    if child == 0:
        try:
            run(*arguments)
        finally:
            os._exit(1)
    return child


def cpu_ms(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 // os.sysconf("SC_CLK_TCK")


def switches(pid):
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)


def lane_memory(pid):
    """Returns the number of mappings of lanes, and the KiB of them that the process has touched."""
    mappings, kib, inside = 0, 0, False
    with open(f"/proc/{pid}/smaps") as maps:
        for line in maps:
            if "-" in line.split(maxsplit=1)[0]:
                inside = "memfd:crosslane" in line
                mappings += inside
            elif inside and line.startswith("Pss:"):
                kib += int(line.split()[1])
    return mappings, kib


listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
done, say_done = os.pipe()
pids = {"server": start(serve, listener), "client": start(exchange, listener.getsockname(), say_done)}
os.close(say_done)
try:
    if os.read(done, 1) != b"!":
        raise SystemExit("the client ended")
    time.sleep(0.3)
    before = {role: (cpu_ms(pid), switches(pid)) for role, pid in pids.items()}
    time.sleep(IDLE_S)
    for role, pid in pids.items():
        print(role, "idle_cpu_ms", cpu_ms(pid) - before[role][0])
        print(role, "idle_switches", switches(pid) - before[role][1])
        print(role, "descriptors", len(os.listdir(f"/proc/{pid}/fd")))
        mappings, kib = lane_memory(pid)
        print(role, "mappings", mappings)
        print(role, "touched_kib", kib)
finally:
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
