"""Connections around a fork. Each step is reported in a line, and the next one waits for a line of the input.

Usage: forks.py WAY, where the child ends in a way: exit, close, exec, or killed; with other threads (threads); by a
           program that has the connections, and ends (bequeathed); or the fork has failed.
       forks.py server EXCHANGES, which forks for one connection after it has served some exchanges, and prints the
           port and then the child's PID.
       forks.py client PORT ROUNDS EXCHANGES, which forks after some exchanges too, if it has any, and goes on in the
           child.
"""

import ctypes
import os
import signal
import socket
import sys
import threading


SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_SIGHAND = 0x800


def step(*words):
    print(*words, flush=True)
    sys.stdin.readline()


def read(connection, size):
    got = b""
    while len(got) < size:
        got += connection.recv(size - len(got)) or sys.exit("the connection ended early")
    return got


def exchange(one, other, rounds):
    """Sends and receives a different text each time."""
    for number in range(rounds):
        text = b"%07d" % number
        for sender, receiver in [(one, other), (other, one)]:
            sender.sendall(text)
            if read(receiver, len(text)) != text:
                sys.exit("wrong bytes")


def end(way, connections, report):
    if way == "exec":
        os.execvp("true", ["true"])
    if way == "bequeathed":
        for connection in connections:
            connection.set_inheritable(True)
        os.execvp("true", ["true"])
    if way == "threads":
        threading.Thread(target=signal.pause, daemon=True).start()
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "close":
        for connection in connections:
            connection.close()
        os.write(report, b"x")
        signal.pause()
    os._exit(0)


def fork_in_vain():
    """Asks for a child that shares handlers and not memory, which the kernel refuses."""
    result = ctypes.CDLL(None).syscall(SYS_CLONE, CLONE_SIGHAND | signal.SIGCHLD, 0, 0, 0, 0)
    return result if result < 0 else sys.exit("the fork did not fail")


def parent(way):
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
    exchange(one, other, 40)
    from_child, report = os.pipe()
    child = fork_in_vain() if way == "failed" else os.fork()
    if child == 0:
        exchange(one, other, 3)
        end(way, [one, other], report)
    if way == "close":
        os.read(from_child, 1)
    elif way != "failed":
        os.waitpid(child, 0)
    exchange(one, other, 40)
    step("alone")
    exchange(one, other, 400)
    step("done")
    if way == "close":
        os.kill(child, signal.SIGKILL)


def server(exchanges):
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    connection = listener.accept()[0]
    for _ in range(exchanges):
        connection.sendall(read(connection, 7))
    child = os.fork()
    if child == 0:
        listener.close()
        while data := connection.recv(4096):
            connection.sendall(data)
        os._exit(0)
    connection.close()
    print(child, flush=True)
    os.waitpid(child, 0)


def ask(connection, rounds):
    for number in range(rounds):
        text = b"%07d" % number
        connection.sendall(text)
        if read(connection, len(text)) != text:
            sys.exit("wrong bytes")


def client(port, rounds, exchanges):
    connection = socket.create_connection(("127.0.0.1", port))
    ask(connection, exchanges)
    child = os.fork() if exchanges > 0 else 0
    if child > 0:
        connection.close()
        os.waitpid(child, 0)
        sys.exit(0)
    print(os.getpid(), flush=True)
    ask(connection, rounds)
    step("done")


if sys.argv[1] == "server":
    server(int(sys.argv[2]))
elif sys.argv[1] == "client":
    client(*map(int, sys.argv[2:5]))
else:
    parent(sys.argv[1])
