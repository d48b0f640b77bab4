"""What the kernel offers for its connections, of connections that are busy. Prints a line "CHECK: RESULT" for each
check; with and without lanes the lines are the same.

Usage: kernel_services.py
"""

import errno
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

HOST = "127.0.0.1"
ROUNDS = 50
# Time after which packets have arrived at loopback.
SETTLES_S = 0.1
IS_ROOT = os.geteuid() == 0
TCP_DEFER_ACCEPT, TCP_FASTOPEN, TCP_MD5SIG, MSG_FASTOPEN, IP_MINTTL = 9, 23, 14, 0x20000000, 21
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def listener(*options, address=(HOST, 0)):
    made = socket.socket()
    for level, name, value in options:
        made.setsockopt(level, name, value)
    made.bind(address)
    made.listen(100)
    return made


def exchange(one, other, rounds=ROUNDS):
    for number in range(rounds):
        for sender, receiver in ((one, other), (other, one)):
            sender.sendall(b"%04d" % number)
            got = b""
            while len(got) < 4:
                got += receiver.recv(4 - len(got))


def pair(made=None):
    """Both ends of a connection that has carried enough to be busy."""
    made = made or listener()
    client = socket.create_connection(made.getsockname())
    server = made.accept()[0]
    exchange(client, server)
    return client, server


def states(*ports):
    """The states in /proc/net/tcp of the sockets that have these ports, in order."""
    wanted = [("%04X" % ports[index], "%04X" % ports[1 - index]) for index in (0, 1)]
    found = {}
    with open("/proc/net/tcp") as lines:
        for line in list(lines)[1:]:
            fields = line.split()
            key = (fields[1].split(":")[1], fields[2].split(":")[1])
            found[key] = fields[3]
    return " ".join(found.get(key, "none") for key in wanted)


def ports(client):
    return client.getsockname()[1], client.getpeername()[1]


def code(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


@check
def states_are_listed():
    client, server = pair()
    both = ports(client)
    before = states(*both)
    client.shutdown(socket.SHUT_WR)
    time.sleep(SETTLES_S)
    half = states(*both)
    server.recv(1)
    server.close()
    time.sleep(SETTLES_S)
    return f"{before}, {half}, {states(*both)}"


@check
def a_port_in_time_wait_is_taken():
    client, server = pair()
    address = client.getsockname()
    client.close()
    server.close()
    time.sleep(SETTLES_S)
    return code(socket.socket().bind, address)


@check
def listeners_with_reuseport_share_clients():
    options = [(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)]
    first = listener(*options)
    both = [first, listener(*options, address=first.getsockname())]
    counts, kept = [0, 0], []
    for _ in range(100):
        kept.append(socket.create_connection(first.getsockname()))
        ready = select.select(both, [], [])[0][0]
        server = ready.accept()[0]
        exchange(kept[-1], server, 5)
        kept.append(server)
        counts[both.index(ready)] += 1
    return min(counts) >= 20


@check
def a_listener_of_the_device_has_precedence():
    if not IS_ROOT:
        return "not root"
    option = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reuseport = (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    plain = listener(option, reuseport)
    bound = (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    of_device = listener(option, reuseport, bound, address=plain.getsockname())
    client = socket.create_connection(plain.getsockname())
    ready = select.select([plain, of_device], [], [], 5)[0]
    server = ready[0].accept()[0]
    exchange(client, server)
    return ready == [of_device]


@check
def a_deferred_client_is_accepted_with_its_bytes():
    made = listener((socket.IPPROTO_TCP, TCP_DEFER_ACCEPT, 5))
    client = socket.create_connection(made.getsockname())
    early = select.select([made], [], [], 0.2)[0]
    client.sendall(b"now")
    late = select.select([made], [], [], 5)[0]
    server = made.accept()[0]
    first = server.recv(3)
    exchange(client, server)
    return early == [], late == [made], first


@check
def bytes_by_fast_open_arrive():
    made = listener((socket.IPPROTO_TCP, TCP_FASTOPEN, 5))
    client = socket.socket()
    sent = code(client.sendto, b"fast", MSG_FASTOPEN, made.getsockname())
    server = made.accept()[0]
    first = server.recv(4)
    exchange(client, server)
    return sent, first


@check
def signatures_are_required():
    def key_for(port, key):
        address = struct.pack("!HH4s120x", 0, 0, socket.inet_aton(HOST))
        address = struct.pack("H", socket.AF_INET) + struct.pack("!H", port) + address[4:]
        return address + struct.pack("BBHI80s", 0, 0, len(key), 0, key)

    made = listener()
    if isinstance(code(made.setsockopt, socket.IPPROTO_TCP, TCP_MD5SIG, key_for(0, b"secret")), str):
        return "not in this kernel"
    client, stranger = socket.socket(), socket.socket()
    client.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG, key_for(made.getsockname()[1], b"secret"))
    client.connect(made.getsockname())
    server = made.accept()[0]
    exchange(client, server)
    stranger.settimeout(0.3)
    try:
        stranger.connect(made.getsockname())
    except TimeoutError:
        return "talks, refuses others"
    return "talks, accepts others"


@check
def a_hop_limit_on_a_connection_is_enforced():
    client, server = pair()
    server.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 255)
    server.settimeout(0.3)
    client.sendall(b"from far away")
    try:
        return server.recv(100)
    except TimeoutError:
        return "nothing"


@check
def a_program_with_a_clean_environment_serves_an_inherited_listener():
    made = listener()
    script = "\n".join((
        "import socket, sys",
        "made = socket.socket(fileno=int(sys.argv[1]))",
        "connection = made.accept()[0]",
        "while data := connection.recv(100):",
        "    connection.sendall(data)",
    ))
    child = subprocess.Popen([sys.executable, "-c", script, str(made.fileno())], env={}, pass_fds=[made.fileno()])
    client = socket.create_connection(made.getsockname())
    for number in range(ROUNDS):
        client.sendall(b"%04d" % number)
        assert client.recv(4) == b"%04d" % number
    client.close()
    return child.wait()


@check
def a_socket_from_before_a_fork_is_connected_in_both_processes():
    made = listener()
    client = socket.socket()
    if os.fork() == 0:
        client.connect(made.getsockname())
        os._exit(0)
    os.wait()
    server = made.accept()[0]
    exchange(client, server)
    return client.getpeername() == made.getsockname()


@check
def the_end_alone_is_an_event():
    results = []
    for size in (10, 60_000):
        made = listener()
        client = socket.create_connection(made.getsockname())
        server = made.accept()[0]
        epoll = select.epoll()
        epoll.register(server, select.EPOLLRDHUP)
        for start in range(0, size, 1000):
            client.sendall(b"x" * min(1000, size - start))
        client.shutdown(socket.SHUT_WR)
        results.append([events for _, events in epoll.poll(5)])
    return results


@check
def bytes_raise_a_signal():
    client, server = pair()
    came = threading.Event()
    signal.signal(signal.SIGIO, lambda *_: came.set())
    fcntl.fcntl(server, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(server, fcntl.F_SETFL, fcntl.fcntl(server, fcntl.F_GETFL) | os.O_ASYNC)
    came.clear()
    client.sendall(b"\x03")
    deadline = time.monotonic() + 5
    while not came.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    return came.is_set(), server.recv(1)


@check
def handshake_and_end_are_packets():
    if not IS_ROOT:
        return "not root"
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    sniffer.bind(("lo", 0))
    sniffer.setblocking(False)
    made = listener()
    client, server = pair(made)
    both = set(ports(client))
    client.close()
    server.recv(1)
    server.close()
    time.sleep(SETTLES_S)
    seen = {"SYN": 0, "FIN": 0, "RST": 0}
    while True:
        try:
            packet, (_, _, kind, *_) = sniffer.recvfrom(65536)
        except BlockingIOError:
            break
        ip = packet[14:]
        if kind == socket.PACKET_OUTGOING or ip[9] != socket.IPPROTO_TCP:
            continue
        tcp = ip[(ip[0] & 15) * 4 :]
        if set(struct.unpack("!HH", tcp[:4])) == both:
            for name, bit in (("SYN", 2), ("FIN", 1), ("RST", 4)):
                seen[name] += bool(tcp[13] & bit)
    return seen


for function in CHECKS:
    print(f"{function.__name__}: {function()}", flush=True)
