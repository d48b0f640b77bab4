"""The conductor: it forks workers before any socket exists and sends them one operation at a time.

The processes of a connection therefore act in lockstep. Each operation adds `LABEL.OPERATION=RESULT` to the trace of
its scene.
"""

import itertools
import os
import select
import signal
import socket
import threading
import time

from phases.worker import FINISH_S, Operations, become_worker, read_message, write_message

# Time in which TCP delivers the effects of a step.
SETTLE_S = 0.02
# Time after which an operation counts as hung.
HANG_S = 10
# Time without room after which a connection counts as full: TCP probes the receiver's window once more within it.
FULL_FOR_S = 0.5
CHANNELS = 7
FLAG_NAMES = ["PEEK", "WAITALL", "TRUNC", "DONTWAIT", "MORE", "NOSIGNAL"]


def flag_names(flags):
    return "|".join(name for name in FLAG_NAMES if flags & getattr(socket, f"MSG_{name}"))


class Hang(Exception):
    """An operation did not return, or its process ended."""


class Worker:
    """The conductor's handle of a worker."""

    def __init__(self, channel, pid):
        self.channel = channel
        self.pid = pid

    def post(self, operation, *arguments):
        write_message(self.channel[1], (operation, arguments))

    def answer(self):
        deadline = time.monotonic() + HANG_S
        while not select.select([self.channel[2]], [], [], 0.2)[0]:
            if not is_running(self.pid):
                raise Hang("DIED")
            if time.monotonic() > deadline:
                raise Hang("HANG")
        return read_message(self.channel[2])

    def call(self, operation, *arguments):
        self.post(operation, *arguments)
        return self.answer()

    def wait_for_end(self):
        """Waits until the process is a zombie: then its descriptors are closed."""
        deadline = time.monotonic() + HANG_S
        while is_running(self.pid):
            if time.monotonic() > deadline:
                raise Hang("HANG")
            time.sleep(0.001)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Pending:
    """An operation in progress in another thread of a worker."""

    def __init__(self, endpoint, operation, arguments, flags=0):
        self.endpoint = endpoint
        self.operation = operation
        self.flags = flags
        self.token = endpoint.scene.next_token()
        endpoint.worker.call("begin", self.token, operation, arguments)
        endpoint.scene.settle()

    def outcome(self, timeout_s):
        result = self.endpoint.worker.call("outcome", self.token, timeout_s)
        self.endpoint.count(self.operation, result, self.flags)
        return result

    def check(self, timeout_s=2.5 * SETTLE_S):
        """Notes the outcome, which usually is that the operation is still blocked."""
        self.endpoint.note(self.operation + "..", self.outcome(timeout_s))

    def finish(self):
        """Waits for the operation and notes its result."""
        self.check(FINISH_S)


def count_finished(waits, least):
    """Returns the results of the operations that have ended, once at least `least` have."""
    deadline = time.monotonic() + FINISH_S
    while True:
        results = [pending.outcome(SETTLE_S) for pending in waits]
        if len(waits) - results.count("blocked") >= least or time.monotonic() > deadline:
            return ",".join(sorted(map(str, results)))


SENDS = {"send", "write", "writev", "sendmsg", "sendto", "sendfile", "splice_out", "send_all", "fill"}
RECEIVES = {"recv", "recv_count", "read", "readv", "recvmsg", "recvfrom", "splice_in", "recv_all"}
# Operations whose effects the other endpoint can see.
SETTLING = SENDS - {"send_all", "fill"} | {"shutdown", "close", "dup2"}


class Endpoint:
    """One endpoint of one connection in one worker."""

    def __init__(self, scene, label, worker, side, name, key):
        self.scene = scene
        self.label = label
        self.worker = worker
        self.side = side
        self.name = name
        self.key = key
        self.own_key, self.peer_key = key + side, key + ("b" if side == "a" else "a")

    def at(self, worker, label, name=None):
        """Returns the same endpoint in another worker or under another name."""
        return Endpoint(self.scene, label, worker, self.side, name or self.name, self.key)

    def note(self, what, result):
        self.scene.note(f"{self.label}.{what}", result)

    def arguments_of(self, operation, arguments):
        arguments = [int(value) if isinstance(value, int) else value for value in arguments]
        positions = self.scene.positions
        if operation in SENDS:
            return self.name, self.own_key, positions.get((self.own_key, "sent"), 0), *arguments
        if operation in RECEIVES:
            return self.name, self.peer_key, positions.get((self.peer_key, "received"), 0), *arguments
        return self.name, *arguments

    def count(self, operation, result, flags=0):
        """Advances the positions of the streams by the bytes that were sent or received."""
        if not isinstance(result, int) or flags & socket.MSG_PEEK:
            return
        if operation in SENDS:
            self.advance(self.own_key, "sent", result)
        elif operation in RECEIVES:
            self.advance(self.peer_key, "received", result)

    def advance(self, key, direction, count):
        positions = self.scene.positions
        positions[key, direction] = positions.get((key, direction), 0) + count

    def quietly(self, operation, *arguments):
        """Runs an operation without adding it to the trace."""
        result = self.worker.call(operation, *self.arguments_of(operation, arguments))
        self.count(operation, result)
        return result

    def do(self, operation, *arguments, note=None):
        result = self.quietly(operation, *arguments)
        self.note(note or operation, result)
        if operation in SETTLING:
            self.scene.settle()
        return result

    def __getattr__(self, operation):
        return lambda *arguments: self.do(operation, *arguments)

    def send(self, size, flags=0):
        named = f"({flag_names(flags)})" if flags else ""
        return self.do("send", size, flags, note=f"send{named}")

    def recv(self, size=1000, flags=0):
        result = self.worker.call("recv", *self.arguments_of("recv", (size, flags)))
        self.count("recv", result, flags)
        self.note("recv" + (f"({flag_names(flags)})" if flags else ""), result)

    def fill(self, size):
        """Fills the buffers by sends of this size. The number of bytes is compared with kernel TCP."""
        self.note("fill", f"{self.quietly('fill', size, FULL_FOR_S)}/{size}")

    def wait_until_full(self):
        return self.do("wait_until_full", FULL_FOR_S)

    def unread_bytes_of(self, peer):
        """Returns the number of bytes that the peer has sent and that have not been received."""
        positions = self.scene.positions
        return positions.get((peer.own_key, "sent"), 0) - positions.get((peer.own_key, "received"), 0)

    def all_received(self):
        """Advances past bytes that several receivers have divided among them in an unknown way."""
        positions = self.scene.positions
        positions[self.peer_key, "received"] = positions.get((self.peer_key, "sent"), 0)

    def drain(self, peer):
        """Receives all bytes that the peer has sent."""
        unread_bytes = self.unread_bytes_of(peer)
        received = self.quietly("recv_all", unread_bytes)
        self.note("drain", "ok" if received == unread_bytes else f"{received}_of_{unread_bytes}")

    def poll(self):
        return self.do("readiness", note="poll")

    def poll_for(self, mask, timeout_ms=0):
        return self.do("poll", mask, timeout_ms)

    def select(self, which="rwx", timeout_s=0):
        return self.do("select", which, timeout_s)

    def of_worker(self, operation, *arguments, note=None):
        """Runs an operation that does not concern one connection."""
        result = self.worker.call(operation, *arguments)
        self.note(note or operation, result)
        return result

    def epoll_create(self, epoll="e"):
        return self.of_worker("epoll_create", epoll)

    def epoll_add(self, mask, epoll="e"):
        return self.of_worker("epoll_add", epoll, self.name, mask)

    def epoll_modify(self, mask, epoll="e"):
        return self.of_worker("epoll_modify", epoll, self.name, mask)

    def epoll_delete(self, epoll="e"):
        return self.of_worker("epoll_delete", epoll, self.name)

    def epoll_wait(self, epoll="e", timeout_s=0, events_max=20):
        note = "epoll_wait" if epoll == "e" else f"epoll_wait({epoll})"
        return self.of_worker("epoll_wait", epoll, timeout_s, events_max, note=note)

    def start(self, operation, *arguments):
        flags = arguments[1] if operation == "recv" and len(arguments) > 1 else 0
        return Pending(self, operation, self.arguments_of(operation, arguments), flags)

    def start_of_worker(self, operation, *arguments):
        return Pending(self, operation, arguments)

    def post(self, operation, *arguments):
        self.worker.post(operation, *arguments)

    # --- processes ---

    def fork(self, label="child"):
        """Forks the worker and returns the endpoint in the child."""
        channel = self.scene.next_channel()
        pid = self.worker.call("fork", channel)
        child = self.scene.add(Worker(self.scene.channels[channel], pid))
        return self.at(child, label)

    def exit(self):
        self.worker.post("exit")
        self.worker.wait_for_end()
        self.scene.settle()

    def kill(self, number=signal.SIGKILL):
        os.kill(self.worker.pid, number)
        if number == signal.SIGKILL:
            self.worker.wait_for_end()
        self.scene.settle()

    def end(self, how):
        """Ends this endpoint: by close, by a reset, or because its process exits or is killed."""
        if how == "linger0":
            self.linger(1, 0)
        if how in ("close", "linger0"):
            self.close()
        else:
            getattr(self, how)()

    def execute(self, *names):
        """Replaces the process by exec; the connection survives."""
        channel = self.scene.channels.index(self.worker.channel)
        self.worker.post("execute", channel, *(names or (self.name,)))
        self.note("execute", self.worker.answer())


class Scene:
    """One run of a scenario: its workers, the trace, and the positions of the streams."""

    def __init__(self, rng, is_server_acting):
        self.rng = rng
        self.is_server_acting = is_server_acting
        self.trace = []
        self.positions = {}
        self.tokens = 0
        self.pids = set()
        self.connections = 0
        self.channels = [(*os.pipe(), *os.pipe()) for _ in range(CHANNELS)]
        self.channels_used = 0
        self.link = socket.socketpair()

    def note(self, what, result):
        self.trace.append(f"{what}={result}")

    def settle(self, times=1):
        time.sleep(times * SETTLE_S)

    def next_token(self):
        self.tokens += 1
        return self.tokens

    def next_channel(self):
        self.channels_used += 1
        return self.channels_used - 1

    def add(self, worker):
        self.pids.add(worker.pid)
        return worker

    def start(self, workers):
        """Forks a process with this number of workers, each in its own thread."""
        channels = [self.channels[self.next_channel()] for _ in range(workers)]
        pid = os.fork()
        if pid == 0:
            operations = Operations(self.channels, self.link)
            for channel in channels[1:]:
                threading.Thread(target=operations.serve, args=(channel,), daemon=True).start()
            become_worker(lambda: operations.serve(channels[0]))
        return [self.add(Worker(channel, pid)) for channel in channels]

    def start_both(self, are_together):
        self.server, self.client = self.start(2) if are_together else self.start(1) + self.start(1)
        self.port = self.server.call("listen", "listener")

    def endpoints(self):
        """Returns the acting endpoint and its peer of the next connection."""
        key = str(self.connections or "")
        self.connections += 1
        workers = (self.server, self.client) if self.is_server_acting else (self.client, self.server)
        return tuple(Endpoint(self, side + key, worker, side, side + key, key) for side, worker in zip("ab", workers))

    def connect(self):
        """Makes a connection that is not accepted yet."""
        pair = self.endpoints()
        client = pair[1 if self.is_server_acting else 0]
        self.must(self.client.call("connect", client.name, self.port))
        return pair

    def pair(self):
        """Makes a connection and returns its acting endpoint and its peer."""
        pair = self.connect()
        server = pair[0 if self.is_server_acting else 1]
        self.must(self.server.call("accept", "listener", server.name))
        return pair

    def must(self, result):
        if result not in ("ok", True):
            self.note("setup", result)

    def exchange(self, first, second, script, way="blocking"):
        """Exchanges messages in lockstep by one operation of each endpoint."""
        endpoints = [(first, True), (second, False)]
        for endpoint, is_first in endpoints:
            positions = (self.positions.get((endpoint.own_key, "sent"), 0),
                         self.positions.get((endpoint.peer_key, "received"), 0))
            endpoint.post(
                "exchange", endpoint.name, endpoint.own_key, endpoint.peer_key, positions, is_first, script, way)
        for endpoint, _ in endpoints:
            self.must(endpoint.worker.answer())
        for by_first, size in script:
            for sender, receiver, is_sent in ((first, second, by_first), (second, first, by_first in (False, "both"))):
                if is_sent:
                    sender.advance(sender.own_key, "sent", size)
                    receiver.advance(receiver.peer_key, "received", size)

    def clean_up(self):
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while True:
                os.wait()
        except ChildProcessError:
            pass
        for fd in itertools.chain(*self.channels):
            os.close(fd)
        for endpoint in self.link:
            endpoint.close()
