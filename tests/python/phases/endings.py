"""Close, reset, exit and SIGKILL of an endpoint, and what its peer sees."""

import functools

from phases.scenario import AGES, FEW_AGES, ET, IN, MIB, OUT, PEEK, RDHUP, plain_scenario, process_scenario, scenario


def see_by_recv(b):
    b.poll()
    b.recv()
    b.recv()
    b.poll()
    b.send(5)
    b.send(5)
    b.recv()


def see_by_send(b):
    b.send(5)
    b.poll()
    b.send(5)
    b.recv()
    b.poll()
    b.so_error()


def see_by_so_error(b):
    b.so_error()
    b.poll()
    b.so_error()
    b.recv()
    b.send(5)
    b.so_error()


def see_by_epoll(b):
    b.epoll_wait()
    b.epoll_wait("edge")
    b.epoll_wait()
    b.epoll_wait("edge")
    b.select()
    b.recv(1000, PEEK)
    b.epoll_wait()
    b.recv()
    b.epoll_wait()
    b.epoll_wait("edge")
    b.unread()
    b.peer_address()
    b.shutdown("WR")
    b.shutdown("RDWR")


OBSERVERS = {"recv": see_by_recv, "send": see_by_send, "so_error": see_by_so_error, "epoll": see_by_epoll}
# Unread bytes when an endpoint ends: those sent to it, and those that it has sent.
UNREAD = {"all_read": (0, 0), "unread": (10, 0), "unread_at_peer": (0, 10), "unread_at_both": (10, 10)}


def ending(how, unread, observe, scene, a, b):
    to_a, to_b = UNREAD[unread]
    b.epoll_create()
    b.epoll_add(IN | OUT | RDHUP)
    b.epoll_create("edge")
    b.epoll_add(IN | OUT | RDHUP | ET, "edge")
    b.epoll_wait("edge")
    b.send(20)
    a.recv()
    if to_b:
        a.send(to_b)
    if to_a:
        b.send(to_a)
    a.end(how)
    observe(b)


def add_endings():
    for how in ("close", "linger0", "exit", "kill"):
        for unread in UNREAD:
            for observer, observe in OBSERVERS.items():
                is_by_a_call = how in ("close", "linger0")
                if observer in ("recv", "epoll") or is_by_a_call:
                    ages = AGES if observer == "recv" else FEW_AGES
                    add = scenario(f"{how}_{unread}_{observer}", ages, processes=not is_by_a_call)
                    add(functools.partial(ending, how, unread, observe))


add_endings()


@plain_scenario
def close_at_once(scene, a, b):
    a.close()
    b.poll()
    b.state()
    b.peer_address()
    b.recv()
    b.send(5)
    b.poll()
    b.so_error()
    b.send(5)
    b.send(5)
    b.recv()
    b.peer_address()
    b.close()


@plain_scenario
def close_partly_read(scene, a, b):
    b.send(100)
    a.recv(40)
    a.close()
    see_by_recv(b)


@plain_scenario
def close_behind_much(scene, a, b):
    a.start("send_all", MIB).finish()
    a.close()
    b.start("recv_all", MIB).finish()
    b.poll()
    b.recv()


@process_scenario
def kill_behind_much(scene, a, b):
    a.start("send_all", MIB).finish()
    a.kill()
    b.start("recv_all", 2 * MIB).finish()
    b.poll()


@process_scenario
def kill_amid_much(scene, a, b):
    """The receiver is killed while the sender waits for room."""
    a_sends = a.start("send_all", 32 * MIB)
    b.recv()
    b.kill()
    a_sends.finish()
    a.poll()
    a.recv()
    a.send(5)


@process_scenario
def kill_of_a_sender_amid_much(scene, a, b):
    """A sender that waits for room is killed: the peer receives all accepted bytes, then the end of stream."""
    a.blocking(False)
    a.do("write", 64 * 1024)
    a.kill()
    b.recv_all(64 * 1024)
    b.recv()
    b.poll()


@plain_scenario
def linger_with_time(scene, a, b):
    a.send(10)
    b.recv()
    a.linger(1, 2)
    a.close()
    b.poll()
    b.recv()
