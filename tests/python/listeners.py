"""Which process serves a listening socket whose server has ended. Prints one line a scenario; kernel TCP defines the
expected output.

usage: listeners.py all | SCENARIO..."""

import os
import signal
import socket
import subprocess
import sys
import time

WAIT_S_MAX = 10
CLIENTS = 20
HELPER = ["/bin/sleep", "60"]


def listener(inheritable):
    made = socket.create_server(("127.0.0.1", 0), backlog=64)
    made.settimeout(None)
    os.set_inheritable(made.fileno(), inheritable)
    return made


def spawned(environment, path=HELPER[0], arguments=HELPER):
    return os.posix_spawn(path, arguments, environment)


def forked(environment):
    child = os.fork()
    if child == 0:
        os.execve(HELPER[0], HELPER, environment)
    return child


def as_subprocess(environment):
    return subprocess.Popen(HELPER, env=environment, close_fds=False).pid


# `env -i` removes the library's environment variables.
def by_env(environment):
    return spawned(os.environ, "/usr/bin/env", ["env", "-i", *HELPER])


def connect_to(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX):
            return "connected"
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timed out"


def dead_server_with_a_helper(start):
    """A server is killed; a program that it started, and that has none of its sockets, is still running."""
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        own = listener(inheritable=False)
        os.write(writer, b"%d %d" % (own.getsockname()[1], start({})))
        time.sleep(WAIT_S_MAX)
        os._exit(1)
    port, helper = map(int, os.read(reader, 64).split())
    try:
        time.sleep(0.2)  # The helper is running by then.
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        return connect_to(port)
    finally:
        os.kill(helper, signal.SIGKILL)


def serve(own):
    own.setblocking(True)  # This check does not depend on the mode that the predecessor left.
    while True:
        connection, _ = own.accept()
        connection.sendall(b"served")
        connection.close()


def successor(environment):
    """A server passes its listening socket to its next version by exec."""
    own = listener(inheritable=True)
    port = own.getsockname()[1]
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    server = os.fork()
    if server == 0:
        arguments = [sys.executable, os.path.abspath(sys.argv[0]), "--serve", str(own.fileno()), str(writer)]
        os.execve(sys.executable, arguments, environment)
    own.close()
    os.read(reader, 1)
    served = 0
    try:
        for _ in range(CLIENTS):
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX) as client:
                served += client.recv(16) == b"served"
            time.sleep(0.02)
    except TimeoutError:
        pass
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return f"served {served} of {CLIENTS}"


SCENARIOS = {
    "helper-by-posix_spawn": lambda: dead_server_with_a_helper(spawned),
    "helper-by-fork": lambda: dead_server_with_a_helper(forked),
    "helper-by-subprocess": lambda: dead_server_with_a_helper(as_subprocess),
    "helper-by-env": lambda: dead_server_with_a_helper(by_env),
    "successor": lambda: successor(os.environ),
    "successor-without-environment": lambda: successor({}),
}


def main():
    if sys.argv[1] == "--serve":
        os.write(int(sys.argv[3]), b"1")
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        for name in sys.argv[1:] if sys.argv[1:] != ["all"] else SCENARIOS:
            print(f"{name}: {SCENARIOS[name]()}", flush=True)


main()
