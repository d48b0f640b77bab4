"""Non-blocking calls, full buffers, and stopped peers."""

import functools
import os
import signal

from phases.scenario import AGES, DONTWAIT, ET, OUT, PEEK, check_both, plain_scenario, process_scenario, scenario


@plain_scenario
def nonblocking_recv(scene, a, b):
    a.blocking(False)
    a.recv()
    a.recv(1000, PEEK)
    b.send(10)
    a.recv(4)
    a.recv()
    a.recv()
    a.do("read", 10)
    a.do("readv", [1, 2])
    a.do("recvmsg", 10)
    a.do("splice_in", 10)
    a.send(5)
    b.recv(1000, DONTWAIT)
    b.recv(1000, DONTWAIT)
    a.flags()
    a.blocking(True)
    a.flags()
    a.set_flags(os.O_NONBLOCK)
    a.recv()
    a.flags()


# Once TCP's buffers have grown, the number of bytes that it accepts varies too much.
UNFILLED_AGES = [age for age in AGES if age != "full"]


def fill_and_drain(size, scene, a, b):
    a.epoll_create()
    a.epoll_add(OUT)
    a.epoll_create("edge")
    a.epoll_add(OUT | ET, "edge")
    a.epoll_wait("edge")
    a.fill(size)
    a.poll()
    a.select("w")
    a.epoll_wait()
    a.epoll_wait("edge")
    polled, selected = a.start("poll", OUT, 8000), a.start("select", "w", 8)
    b.drain(a)
    polled.finish()
    selected.finish()
    a.epoll_wait("e", 5)
    a.epoll_wait("edge", 5)
    b.recv(10, DONTWAIT)
    a.send(5)
    b.recv()


for fill_bytes in (100, 1000, 65536):
    scenario(f"fill_by_{fill_bytes}", UNFILLED_AGES)(functools.partial(fill_and_drain, fill_bytes))


@scenario(ages=UNFILLED_AGES)
def fill_small_buffers(scene, a, b):
    a.set_option("SOL_SOCKET", "SO_SNDBUF", 4096)
    b.set_option("SOL_SOCKET", "SO_RCVBUF", 4096)
    a.fill(100)
    a.poll()
    b.drain(a)
    a.poll()
    a.blocking(True)
    sends = a.start("send_all", 8_000)
    b.recv_all(8_000)
    sends.finish()


@scenario(ages=UNFILLED_AGES)
def fill_both(scene, a, b):
    a.fill(16384)
    b.fill(16384)
    check_both(a, b)
    for receiver, sender in ((b, a), (a, b)):
        receiver.blocking(True)
        receiver.drain(sender)
    check_both(a, b)
    a.recv(10, DONTWAIT)
    b.recv(10, DONTWAIT)


@process_scenario
def peer_is_stopped(scene, a, b):
    b.kill(signal.SIGSTOP)
    for _ in range(5):
        a.send(100)
    check = a.start("recv", 100)
    a.poll()
    a.start("send_all", 200_000).finish()
    a.shutdown("WR")
    b.kill(signal.SIGCONT)
    b.recv_all(300_000)
    b.send(5)
    check.finish()


@process_scenario
def peer_is_stopped_and_endpoint_ends(scene, a, b):
    b.kill(signal.SIGSTOP)
    a.send(100)
    a.send(100)
    a.start("send_all", 200_000).finish()
    a.close()
    b.kill(signal.SIGCONT)
    b.recv_all(300_000)
