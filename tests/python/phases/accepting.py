"""Operations of a client before its connection is accepted."""

import functools

from phases.endings import see_by_recv
from phases.scenario import DONTWAIT, ET, IN, MIB, OUT, RDHUP, accept, before_accept, compare_addresses, taker, talk


@before_accept()
def accept_after_questions(scene, a, b):
    a.poll()
    a.state()
    a.so_error()
    a.peer_address()
    a.do("connect_again", scene.port)
    a.recv(10, DONTWAIT)
    accept(b)
    b.poll()
    compare_addresses(a, b)
    talk(scene, a, b, 20)


@before_accept()
def accept_after_send(scene, a, b):
    a.send(10)
    a.send(10)
    a.poll()
    accept(b)
    b.poll()
    b.unread()
    b.recv()
    talk(scene, a, b, 20)


@before_accept()
def accept_after_much(scene, a, b):
    sends = a.start("send_all", 16 * MIB)
    sends.check()
    accept(b)
    b.send(5)
    a.recv()
    b.recv_all(16 * MIB)
    sends.finish()
    talk(scene, a, b)


@before_accept()
def accept_after_fill(scene, a, b):
    a.fill(65536)
    a.poll()
    accept(b)
    b.drain(a)
    a.poll()
    b.recv(10, DONTWAIT)


@before_accept()
def accept_after_shutdown(scene, a, b):
    a.send(10)
    a.shutdown("WR")
    a.poll()
    accept(b)
    b.poll()
    b.recv()
    b.recv()
    b.send(10)
    a.recv()
    b.close()
    a.recv()


def accept_after_end(how, size, scene, a, b):
    if size:
        a.send(size)
    a.end(how)
    accept(b)
    b.poll()
    b.peer_address()
    see_by_recv(b)


for how_it_ends in ("close", "linger0", "exit", "kill"):
    for bytes_sent in (0, 10):
        before_accept(f"accept_after_{how_it_ends}_and_{bytes_sent}_bytes")(
            functools.partial(accept_after_end, how_it_ends, bytes_sent))


def never_accepted(how, size, scene, a, b):
    a.epoll_create()
    a.epoll_add(IN | OUT | RDHUP | ET)
    a.epoll_create("level")
    a.epoll_add(IN | RDHUP, "level")
    a.epoll_wait()
    if size:
        a.send(size)
    if how == "close":
        b.of_worker("close", "listener", note="close_listener")
        scene.settle()
    else:
        b.kill()
    a.epoll_wait("level")
    a.epoll_wait()
    see_by_recv(a)


for how_it_ends in ("close", "kill"):
    for bytes_sent in (0, 10):
        before_accept(f"never_accepted_{how_it_ends}_and_{bytes_sent}_bytes")(
            functools.partial(never_accepted, how_it_ends, bytes_sent))


@before_accept()
def accept_by_a_child(scene, a, b):
    a.send(10)
    child = b.fork()
    accept(child)
    child.recv()
    talk(scene, child, a, 20)
    child.exit()
    a.recv()


@before_accept()
def accept_after_fork_of_the_client(scene, a, b):
    child = a.fork()
    a.close()
    child.send(10)
    accept(b)
    b.recv()
    talk(scene, child, b, 20)
    child.exit()
    b.recv()


@before_accept()
def accept_after_exec_of_the_client(scene, a, b):
    a.send(10)
    a.execute()
    a.send(10)
    accept(b)
    b.recv()
    talk(scene, a, b, 20)


@before_accept()
def accept_after_exec_of_the_server(scene, a, b):
    a.send(10)
    b.execute("listener")
    accept(b)
    b.recv()
    talk(scene, a, b, 20)


@before_accept()
def accept_after_pass_on_by_the_client(scene, a, b):
    t = taker(scene, a)
    a.send(10)
    a.pass_on()
    a.exit()
    t.take()
    t.send(10)
    accept(b)
    b.recv()
    talk(scene, t, b, 20)


@before_accept()
def accept_after_blocked_recv(scene, a, b):
    pending = a.start("recv", 10)
    accept(b)
    pending.check()
    b.send(5)
    pending.finish()


@before_accept()
def connect_without_blocking(scene, a, b):
    accept(b)
    c, d = scene.endpoints()
    c.do("connect_nonblocking", scene.port)
    scene.settle()
    c.poll()
    c.so_error()
    c.do("connect_again", scene.port)
    c.do("connect_again", scene.port)
    accept(d)
    c.send(10)
    d.recv()
    d.send(10)
    c.recv()
    c.recv()
    c.blocking(True)
    talk(scene, c, d, 20)
