"""Worker processes that hold endpoints of TCP connections and run the operations that they receive over pipes.

The result of an operation is what a program would see: a count, the name of an error, event masks. Received bytes are
compared with those sent, so a count stands for correct bytes.
"""

import array
import errno
import fcntl
import functools
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

# Limit of a wait that should end.
FINISH_S = 8
# Time after which a worker ends by itself, in case its conductor was killed.
WORKER_LIFE_S = 60
STREAM_PERIOD_BYTES = 65521
IN_OR_OUT = select.POLLIN | select.POLLOUT
EVENTS = select.POLLIN | select.POLLPRI | select.POLLOUT | select.POLLRDHUP
EVENT_NAMES = [("IN", 1), ("PRI", 2), ("OUT", 4), ("ERR", 8), ("HUP", 16), ("NVAL", 32), ("RDHUP", 0x2000)]
TCP_STATES = "? ESTABLISHED SYN_SENT SYN_RECV FIN_WAIT1 FIN_WAIT2 TIME_WAIT CLOSE CLOSE_WAIT LAST_ACK LISTEN".split()


def event_names(mask):
    return "|".join(name for name, bit in EVENT_NAMES if mask & bit) or "-"


def write_message(fd, message):
    data = pickle.dumps(message)
    data = struct.pack("=I", len(data)) + data
    while data:
        data = data[os.write(fd, data):]


def read_bytes(fd, size):
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def read_message(fd):
    return pickle.loads(read_bytes(fd, struct.unpack("=I", read_bytes(fd, 4))[0]))


@functools.cache
def stream_period(key):
    return random.Random(key).randbytes(STREAM_PERIOD_BYTES)


def stream(key, offset, size):
    """Returns bytes of the endless stream that one endpoint of one connection sends."""
    period, start = stream_period(key), offset % STREAM_PERIOD_BYTES
    if start + size > STREAM_PERIOD_BYTES:
        period = period * (size // STREAM_PERIOD_BYTES + 2)
    return period[start:start + size]


def counted(data, key, offset):
    return len(data) if data == stream(key, offset, len(data)) else f"{len(data)}!wrong"


def transfer(step, size, wait):
    """Repeats a step, which gets the number of bytes done, until all bytes are done."""
    done = 0
    while done < size:
        try:
            count = step(done)
        except BlockingIOError:
            if not wait():
                raise RuntimeError("the wait timed out")
            continue
        if not count:
            raise EOFError("the stream has ended")
        done += count


def receive_more(connection, data, size):
    more = connection.recv(size - len(data))
    data += more
    return len(more)


def sizes_of(rng, total, size_max):
    """Yields sizes, uniform in their logarithm, which add up to the total."""
    while total:
        size = min(total, int(2 ** rng.uniform(0, size_max.bit_length() - 1)))
        total -= size
        yield size


class Operations:
    """The operations of a worker on sockets, epoll instances and threads, which have names."""

    def __init__(self, channels, link):
        self.channels = channels
        self.link = link
        self.sockets = {}
        self.epolls = {}
        self.names_by_fd = {}
        self.pending = {}
        self.children = []

    def run(self, operation, arguments):
        try:
            return getattr(self, operation)(*arguments)
        except OSError as error:
            return errno.errorcode.get(error.errno, str(error).replace(" ", "_"))
        except Exception as error:  # a mistake in the scenario is reported in its line
            return f"{type(error).__name__}({error})".replace(" ", "_")

    def serve(self, channel):
        command_out, answer_in = channel[0], channel[3]
        while True:
            operation, arguments = read_message(command_out)
            write_message(answer_in, self.run(operation, arguments))

    def hold(self, name, held):
        self.sockets[name] = held
        self.names_by_fd[held.fileno()] = name

    def fd(self, name):
        return self.sockets[name].fileno()

    # --- threads ---

    def begin(self, token, operation, arguments):
        results = []
        thread = threading.Thread(target=lambda: results.append(self.run(operation, arguments)), daemon=True)
        self.pending[token] = thread, results
        thread.start()
        return "begun"

    def outcome(self, token, timeout_s):
        thread, results = self.pending[token]
        thread.join(timeout_s)
        return results[0] if results else "blocked"

    # --- life of a connection ---

    def listen(self, name):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        self.hold(name, listener)
        return listener.getsockname()[1]

    def connect(self, name, port):
        connection = socket.socket()
        self.hold(name, connection)
        self.send_at_once(name)
        connection.connect(("127.0.0.1", port))
        return "ok"

    def send_at_once(self, name):
        """Disables Nagle's algorithm, by which small messages would wait for delayed acknowledgements."""
        self.sockets[name].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect_nonblocking(self, name, port):
        connection = socket.socket()
        connection.setblocking(False)
        self.hold(name, connection)
        self.send_at_once(name)
        return self.connect_again(name, port)

    def connect_again(self, name, port):
        return errno.errorcode.get(self.sockets[name].connect_ex(("127.0.0.1", port)), "ok")

    def accept(self, listener, name):
        self.hold(name, self.sockets[listener].accept()[0])
        self.send_at_once(name)
        return "ok"

    def shutdown(self, name, how):
        self.sockets[name].shutdown(getattr(socket, f"SHUT_{how}"))
        return "ok"

    def close(self, name):
        self.sockets.pop(name).close()
        return "ok"

    def linger(self, name, is_on, seconds):
        self.sockets[name].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_on, seconds))
        return "ok"

    def dup(self, name, new_name):
        self.hold(new_name, self.sockets[name].dup())
        return "ok"

    def dup2(self, name, over_name):
        os.dup2(self.fd(name), self.fd(over_name))
        return "ok"

    # --- bytes ---

    def send(self, name, key, offset, size, flags=0):
        return self.sockets[name].send(stream(key, offset, size), flags)

    def recv(self, name, key, offset, size, flags=0):
        return counted(self.sockets[name].recv(size, flags), key, offset)

    def recv_count(self, name, key, offset, size, flags=0):
        return len(self.sockets[name].recv(size, flags))

    def write(self, name, key, offset, size):
        return os.write(self.fd(name), stream(key, offset, size))

    def read(self, name, key, offset, size):
        return counted(os.read(self.fd(name), size), key, offset)

    def spans(self, key, offset, sizes):
        data, spans = stream(key, offset, sum(sizes)), []
        for size in sizes:
            spans.append(data[:size])
            data = data[size:]
        return spans

    def writev(self, name, key, offset, sizes):
        return os.writev(self.fd(name), self.spans(key, offset, sizes))

    def readv(self, name, key, offset, sizes):
        spans = [bytearray(size) for size in sizes]
        count = os.readv(self.fd(name), spans)
        return counted(b"".join(spans)[:count], key, offset)

    def sendmsg(self, name, key, offset, sizes, flags=0):
        return self.sockets[name].sendmsg(self.spans(key, offset, sizes), [], flags)

    def recvmsg(self, name, key, offset, size, flags=0):
        """Returns the count, followed by control messages, flags and address if there are any."""
        data, ancillary, message_flags, address = self.sockets[name].recvmsg(size, 1000, flags)
        count = counted(data, key, offset)
        if ancillary or message_flags or address:
            return f"{count},{len(ancillary)},{message_flags:x},{address}"
        return count

    def recvfrom(self, name, key, offset, size):
        data, address = self.sockets[name].recvfrom(size)
        count = counted(data, key, offset)
        return f"{count},{address}" if address else count

    def sendto(self, name, key, offset, size):
        """Passes an address, which a stream ignores."""
        return self.sockets[name].sendto(stream(key, offset, size), ("127.0.0.1", 9))

    def sendfile(self, name, key, offset, size):
        with open(os.memfd_create("file"), "wb+", buffering=0) as file:
            file.write(stream(key, offset, size))
            sent = 0
            while sent < size and (count := os.sendfile(self.fd(name), file.fileno(), sent, size - sent)):
                sent += count
            return sent

    def splice_out(self, name, key, offset, size):
        """Moves bytes from a pipe to the connection."""
        reader, writer = os.pipe()
        try:
            os.write(writer, stream(key, offset, size))
            return os.splice(reader, self.fd(name), size)
        finally:
            os.close(reader)
            os.close(writer)

    def splice_in(self, name, key, offset, size, flags=0):
        """Moves bytes from the connection to a pipe."""
        reader, writer = os.pipe()
        try:
            count = os.splice(self.fd(name), writer, size, flags=flags)
            return counted(os.read(reader, count), key, offset) if count else 0
        finally:
            os.close(reader)
            os.close(writer)

    def send_all(self, name, key, offset, size, seed=0, size_max=65536):
        connection, sent = self.sockets[name], 0
        for step in sizes_of(random.Random(seed), size, size_max):
            connection.sendall(stream(key, offset + sent, step))
            sent += step
        return sent

    def recv_all(self, name, key, offset, size, seed=0, size_max=65536):
        connection, received, rng = self.sockets[name], 0, random.Random(seed)
        while received < size:
            step = next(sizes_of(rng, size - received, size_max))
            try:
                data = connection.recv(step)
            except OSError as error:
                return f"{received}:{errno.errorcode[error.errno]}"
            if not data:
                return f"{received}:end"
            if data != stream(key, offset + received, len(data)):
                return f"{received}!wrong"
            received += len(data)
        return received

    def count_to(self, name, total):
        """Counts the bytes of two senders, in any order."""
        connection, received = self.sockets[name], 0
        while received < total and (data := connection.recv(65536)):
            received += len(data)
        return str(received)

    def count_to_end(self, name):
        connection, received = self.sockets[name], 0
        while data := connection.recv(65536):
            received += len(data)
        return received

    def fill(self, name, key, offset, size, full_for_s=0.1):
        """Sends until there has been no room for a while, because TCP makes some room late."""
        connection, sent = self.sockets[name], 0
        connection.setblocking(False)
        while select.select([], [connection], [], full_for_s)[1]:
            try:
                sent += connection.send(stream(key, offset + sent, size))
            except BlockingIOError:
                continue
        return sent

    def exchange(self, name, own_key, peer_key, positions, is_first, script, way):
        """Exchanges messages in lockstep: the script says who sends each one, and its size."""
        sent, received = positions
        connection, wait = self.sockets[name], self.wait_by(name, way)
        connection.setblocking(wait is None)
        for by_first, size in script:
            if by_first in (is_first, "both"):
                transfer(lambda done: connection.send(stream(own_key, sent + done, size - done)), size, wait)
                sent += size
            if by_first != is_first:
                data = bytearray()
                transfer(lambda done: receive_more(connection, data, size), size, wait)
                if data != stream(peer_key, received, size):
                    return f"{len(data)}!wrong"
                received += size
        connection.setblocking(True)
        return "ok"

    def wait_by(self, name, way):
        """Returns a function that waits until the connection may be ready, or None if its calls block."""
        if way == "blocking":
            return None
        poller = select.poll() if way == "poll" else select.epoll()
        poller.register(self.fd(name), IN_OR_OUT | (select.EPOLLET if way == "edge" else 0))
        timeout = FINISH_S if way != "poll" else 1000 * FINISH_S
        return lambda: poller.poll(timeout)

    # --- readiness ---

    def poll(self, name, mask, timeout_ms):
        poller = select.poll()
        poller.register(self.fd(name), mask)
        found = poller.poll(timeout_ms)
        return event_names(found[0][1]) if found else "-"

    def wait_until_full(self, name, full_for_s):
        """Waits until there has been no room for a while, because another thread sends."""
        deadline = time.monotonic() + FINISH_S
        while self.poll(name, select.POLLOUT, 1000 * full_for_s) != "-":
            if time.monotonic() > deadline:
                return "never"
            time.sleep(0.01)
        return "ok"

    def readiness(self, name):
        """Returns what poll, a new epoll instance and select report at this moment."""
        epoll = select.epoll()
        epoll.register(self.fd(name), EVENTS)
        by_epoll = [event_names(events) for _, events in epoll.poll(0)]
        epoll.close()
        by_poll = self.poll(name, EVENTS, 0)
        return ",".join([by_poll, *(events for events in by_epoll if events != by_poll), self.select(name, "rwx", 0)])

    def select(self, name, which, timeout_s):
        fd = self.fd(name)
        found = select.select(*([fd] if letter in which else [] for letter in "rwx"), timeout_s)
        return "".join(letter for letter, ready in zip("rwx", found) if ready) or "-"

    def epoll_create(self, epoll):
        self.epolls[epoll] = select.epoll()
        return "ok"

    def epoll_add(self, epoll, name, mask):
        self.names_by_fd[self.fd(name)] = name
        self.epolls[epoll].register(self.fd(name), mask)
        return "ok"

    def epoll_modify(self, epoll, name, mask):
        self.epolls[epoll].modify(self.fd(name), mask)
        return "ok"

    def epoll_delete(self, epoll, name):
        self.epolls[epoll].unregister(self.fd(name))
        return "ok"

    def epoll_wait(self, epoll, timeout_s, events_max):
        found = self.epolls[epoll].poll(timeout_s, events_max)
        return ",".join(f"{self.names_by_fd[fd]}:{event_names(events)}" for fd, events in found) or "-"

    def epoll_order(self, epoll, events_max):
        return [self.names_by_fd[fd] for fd, _ in self.epolls[epoll].poll(0, events_max)]

    # --- options and queries ---

    def blocking(self, name, is_blocking):
        self.sockets[name].setblocking(is_blocking)
        return "ok"

    def flags(self, name):
        return f"{fcntl.fcntl(self.fd(name), fcntl.F_GETFL):o}"

    def set_flags(self, name, flags):
        return str(fcntl.fcntl(self.fd(name), fcntl.F_SETFL, flags))

    def set_option(self, name, level, option, value):
        self.sockets[name].setsockopt(getattr(socket, level), getattr(socket, option), value)
        return "ok"

    def get_option(self, name, level, option):
        return str(self.sockets[name].getsockopt(getattr(socket, level), getattr(socket, option)))

    def set_timeout(self, name, option, milliseconds):
        value = struct.pack("ll", milliseconds // 1000, milliseconds % 1000 * 1000)
        self.sockets[name].setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
        return "ok"

    def so_error(self, name):
        number = self.sockets[name].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return errno.errorcode.get(number, "ok")

    def unread(self, name):
        return self.ask(name, termios.FIONREAD)

    def unsent(self, name):
        return self.ask(name, termios.TIOCOUTQ)

    def ask(self, name, request):
        answer = array.array("i", [-1])
        fcntl.ioctl(self.fd(name), request, answer)
        return str(answer[0])

    def state(self, name):
        return TCP_STATES[self.sockets[name].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]]

    def addresses(self, name):
        return self.sockets[name].getsockname(), self.sockets[name].getpeername()

    def peer_address(self, name):
        self.sockets[name].getpeername()
        return "ok"

    def kind(self, name):
        status = os.fstat(self.fd(name))
        return f"{status.st_mode:o},{status.st_size}"

    # --- processes ---

    def fork(self, channel):
        child = os.fork()
        if child:
            self.children.append(child)
            return child
        become_worker(lambda: self.serve(self.channels[channel]))

    def exit(self):
        os._exit(0)

    def pid(self):
        return os.getpid()

    def reap(self):
        for child in self.children:
            os.waitpid(child, 0)
        self.children.clear()
        return "ok"

    def run_helper(self, how):
        if how == "subprocess":
            return str(subprocess.run(["true"]).returncode)
        child = os.posix_spawn("/bin/true", ["true"], os.environ)
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def start_sleeper(self, *inherited):
        command = ["sleep", str(WORKER_LIFE_S)]
        return subprocess.Popen(command, pass_fds=[self.fd(name) for name in inherited]).pid

    def execute_cat(self, name):
        """Replaces the process by a `cat` that echoes the connection."""
        os.dup2(self.fd(name), 0)
        os.dup2(self.fd(name), 1)
        os.execvp("cat", ["cat"])

    def execute(self, channel, *names):
        """Replaces the process by a worker with the same names."""
        kept = {name: self.fd(name) for name in names}
        for fd in [*self.channels[channel], *kept.values()]:
            os.set_inheritable(fd, True)
        state = json.dumps((channel, self.channels[channel], kept))
        os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), state])

    def pass_on(self, name):
        socket.send_fds(self.link[0], [b"x"], [self.fd(name)])
        return "ok"

    def take(self, name):
        _, fds, _, _ = socket.recv_fds(self.link[1], 1, 1)
        self.hold(name, socket.socket(fileno=fds[0]))
        return "ok"

    def discard_passed(self):
        return len(self.link[1].recv(1))

    def limit_descriptors(self, is_limited):
        """Lowers the limit such that no descriptor is free, or restores it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if is_limited:
            self.descriptors_max = soft
            soft = os.open("/dev/null", os.O_RDONLY)
            os.close(soft)
        else:
            soft = self.descriptors_max
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return "ok"

    def limit_files(self, bytes_max):
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return "ok"


def become_worker(serve):
    """Runs a worker until the conductor kills it."""
    signal.alarm(WORKER_LIFE_S)
    try:
        serve()
    finally:
        os._exit(1)


def restart(state):
    """Continues as the worker that the process was before exec."""
    index, channel, kept = json.loads(state)
    operations = Operations({index: channel}, None)
    for name, fd in kept.items():
        operations.hold(name, socket.socket(fileno=fd))
    write_message(channel[3], "ok")
    become_worker(lambda: operations.serve(channel))


if __name__ == "__main__":
    restart(sys.argv[1])
