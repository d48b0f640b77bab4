"""Checks that connections over lanes add next to nothing to a core dump.

Prints "ok", or "ok, without a core file" where the machine passes core dumps to a program or allows none. A child of
each process aborts before there are connections and with them: both core files are about as long, the connections'
memory does not grow, and the kernel's flags of each mapping of shared memory say that a core dump leaves it out.
"""

import os
import resource
import signal
import socket

CONNECTIONS = 12
ROUNDS = 60
MESSAGE_BYTES = 1000
ADDED_BYTES_MAX = 8 << 20


def say_and_fail(why):
    raise SystemExit(f"{os.getpid()}: {why}")


def mappings():
    """Returns the header line and the flags of each mapping of memory that the library shares."""
    found = []
    header = ""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(maxsplit=1)[0]:
                header = line.strip()
            elif line.startswith("VmFlags:") and ("/memfd:crosslane" in header or "/stat/" in header):
                found.append((header, line.split()[1:]))
    return found


def lane_bytes():
    """Returns the allocated memory of the process's lanes."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:crosslane"):
                status = os.stat(path)
                files[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            pass  # the descriptor of the listing itself
    return sum(files.values())


def core_bytes():
    """Returns the length of the core file of a child that aborts, or None if it leaves none."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    os.waitpid(child, 0)
    for name in (f"core.{child}", "core"):
        if os.path.exists(name):
            size = os.stat(name).st_size
            os.unlink(name)
            return size
    return None


def check(before):
    unmarked = [header for header, flags in mappings() if "dd" not in flags]
    if unmarked:
        say_and_fail(f"mappings that a core dump would have: {unmarked}")
    if sum("/memfd:crosslane" in header for header, _ in mappings()) < CONNECTIONS:
        say_and_fail(f"lanes are missing in {mappings()}")
    held = lane_bytes()
    after = core_bytes()
    if lane_bytes() != held:
        say_and_fail(f"a core dump changed the memory of lanes from {held} to {lane_bytes()} bytes")
    if before is not None and after - before > ADDED_BYTES_MAX:
        say_and_fail(f"a core file of {after} bytes, {before} bytes without connections")


def send(connection):
    connection.sendall(bytes(MESSAGE_BYTES))


def receive(connection):
    if len(connection.recv(MESSAGE_BYTES, socket.MSG_WAITALL)) != MESSAGE_BYTES:
        say_and_fail("the connection ended early")


def client(address, before):
    connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    for _ in range(ROUNDS):
        for connection in connections:
            send(connection)
            receive(connection)
    check(before)
    send(connections[0])
    receive(connections[0])


def server(listener, before):
    connections = [listener.accept()[0] for _ in range(CONNECTIONS)]
    for _ in range(ROUNDS):
        for connection in connections:
            receive(connection)
            send(connection)
    # After the client's check: core files of both processes may have the same name.
    receive(connections[0])
    check(before)
    send(connections[0])


def allow_core_files():
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError:  # only root may raise the hard limit
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def main():
    allow_core_files()
    listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
    address = listener.getsockname()
    before = core_bytes()
    child = os.fork()
    if child == 0:
        listener.close()
        client(address, before)
        os._exit(0)
    server(listener, before)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise SystemExit("the client failed")
    print("ok" if before is not None else "ok, without a core file")


main()
