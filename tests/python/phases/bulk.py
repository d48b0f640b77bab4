"""Bulk transfers in both directions."""

import functools

from phases.scenario import DONTWAIT, MIB, check_both, plain_scenario, scenario


def both_send(size, scene, a, b):
    sends = [a.start("send_all", size), b.start("send_all", size)]
    receives = [a.start("recv_all", size, 1), b.start("recv_all", size, 2)]
    for pending in sends + receives:
        pending.finish()
    check_both(a, b)


scenario("both_send_300k")(functools.partial(both_send, 300_000))
scenario("both_send_1m")(functools.partial(both_send, MIB))


@plain_scenario
def both_send_300k_before_either_receives(scene, a, b):
    for sender in (a, b):
        sender.start("send_all", 300_000).finish()
    check_both(a, b)
    for receiver in (a, b):
        receiver.start("recv_all", 300_000).finish()


@plain_scenario
def random_sizes(scene, a, b):
    sends = a.start("send_all", 4 * MIB, scene.rng.random())
    receives = b.start("recv_all", 4 * MIB, scene.rng.random())
    sends.finish()
    receives.finish()
    b.recv(1, DONTWAIT)


@plain_scenario
def growing_messages(scene, a, b):
    scene.exchange(a, b, [(bool(i % 2), 1 << i // 2) for i in range(38)])
    scene.exchange(b, a, [(True, 70_000), (False, 1), (True, 1), (False, 70_000)] * 3)
    check_both(a, b)


@plain_scenario
def messages_that_cross(scene, a, b):
    scene.exchange(a, b, [("both", 100)] * 20)
    a.send(10)
    b.send(10)
    a.recv()
    b.recv()
    scene.exchange(a, b, [("both", size) for size in (1, 5000, 1, 20_000, 1)], "edge")
    check_both(a, b)


@plain_scenario
def answers_to_many_requests(scene, a, b):
    for way in ("blocking", "poll", "epoll", "edge"):
        scene.exchange(a, b, [(True, 64)] * 30 + [(False, 64)] * 30, way)
    scene.exchange(b, a, [(True, 5000)] * 10 + [(False, 1)] * 10)
    check_both(a, b)


@plain_scenario
def answers_amid_bulk(scene, a, b):
    """One thread waits for room to send while another one sends and receives small messages."""
    sends = a.start("send_all", 16 * MIB, 1)
    a.wait_until_full()
    sends.check()
    b.send(10)
    a.poll()
    a.recv()
    b.send(10)
    a.recv()
    b.start("recv_all", 16 * MIB, 2).finish()
    sends.finish()
    scene.exchange(a, b, [(True, 10), (False, 10)])


@plain_scenario
def shutdown_amid_bulk(scene, a, b):
    sends = a.start("send_all", 32 * MIB)
    a.shutdown("RDWR")
    sends.finish()
    a.poll()


@plain_scenario
def close_of_peer_amid_bulk(scene, a, b):
    sends = a.start("send_all", 32 * MIB)
    b.recv()
    b.close()
    sends.finish()
    a.poll()
    a.recv()
