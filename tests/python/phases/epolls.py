"""Epoll: level-triggered, edge-triggered, one-shot, several instances, and the order of events."""

import functools

from phases.scenario import ET, IN, ONESHOT, OUT, RDHUP, grow, plain_scenario, process_scenario, scenario


@plain_scenario
def epoll_level(scene, a, b):
    a.epoll_create()
    a.epoll_add(IN)
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    a.epoll_wait()
    a.recv(3)
    a.epoll_wait()
    a.recv()
    a.epoll_wait()
    a.epoll_modify(IN | OUT | RDHUP)
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    b.shutdown("WR")
    a.epoll_wait()
    a.recv()
    a.epoll_wait()
    a.shutdown("WR")
    a.epoll_wait()
    a.epoll_modify(0)
    a.epoll_wait()
    a.epoll_delete()
    a.epoll_wait()


@plain_scenario
def epoll_edge(scene, a, b):
    a.epoll_create()
    a.epoll_add(IN | OUT | RDHUP | ET)
    a.epoll_wait()
    a.epoll_wait()
    for _ in range(2):
        b.send(5)
        a.epoll_wait()
        a.epoll_wait()
    a.recv(3)
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    a.recv()
    a.epoll_wait()
    a.send(5)
    b.recv()
    a.epoll_wait()
    a.epoll_modify(IN | OUT | RDHUP | ET)
    a.epoll_wait()
    b.shutdown("WR")
    a.epoll_wait()
    a.epoll_wait()
    a.recv()
    a.epoll_wait()
    b.close()
    a.epoll_wait()


@plain_scenario
def epoll_edge_of_input_alone(scene, a, b):
    b.send(5)
    a.epoll_create()
    a.epoll_add(IN | ET)
    a.epoll_wait()
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    a.recv()
    a.epoll_wait()
    pending = a.start_of_worker("epoll_wait", "e", 8, 10)
    pending.check()
    b.send(5)
    pending.finish()
    b.close()
    a.epoll_wait()
    a.epoll_wait()


@plain_scenario
def epoll_one_shot(scene, a, b):
    a.epoll_create()
    a.epoll_add(IN | ONESHOT)
    b.send(5)
    a.epoll_wait()
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    a.epoll_modify(IN | ONESHOT)
    a.epoll_wait()
    a.epoll_wait()
    a.recv()
    a.epoll_modify(IN | ONESHOT | RDHUP)
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    b.close()
    a.epoll_wait()
    a.epoll_modify(IN | ONESHOT | RDHUP | ET)
    a.epoll_wait()
    a.epoll_wait()


@plain_scenario
def epoll_hang_up_alone(scene, a, b):
    for epoll, mask in (("e", RDHUP), ("f", 0), ("g", OUT | RDHUP | ET)):
        a.epoll_create(epoll)
        a.epoll_add(mask, epoll)
        a.epoll_wait(epoll)
    b.send(5)
    for epoll in "efg":
        a.epoll_wait(epoll)
    b.shutdown("WR")
    for epoll in "efg":
        a.epoll_wait(epoll)
    a.recv()
    b.close()
    a.send(5)
    for epoll in "efg":
        a.epoll_wait(epoll)
        a.epoll_wait(epoll)


@plain_scenario
def epoll_two_sets(scene, a, b):
    masks = {"e": IN, "f": IN | OUT | RDHUP | ET}
    for epoll, mask in masks.items():
        a.epoll_create(epoll)
        a.epoll_add(mask, epoll)
    for step in (lambda: None, lambda: b.send(5), lambda: a.recv(), lambda: b.send(5), lambda: b.close()):
        step()
        for epoll in masks:
            a.epoll_wait(epoll)
            a.epoll_wait(epoll)
    a.epoll_delete("e")
    a.recv()
    for epoll in masks:
        a.epoll_wait(epoll)


@plain_scenario
def epoll_added_again(scene, a, b):
    a.epoll_create()
    a.epoll_add(IN)
    a.epoll_add(IN)
    a.epoll_delete()
    a.epoll_delete()
    a.epoll_modify(IN)
    b.send(5)
    a.epoll_add(IN)
    a.epoll_wait()
    duplicate = a.at(a.worker, "a_dup", "dup")
    a.dup("dup")
    duplicate.epoll_add(OUT)
    a.epoll_wait()
    a.close()
    a.epoll_wait()
    duplicate.recv()
    duplicate.close()
    a.epoll_wait()


@plain_scenario
def epoll_created_before_traffic_and_used_after(scene, a, b):
    a.epoll_create()
    a.epoll_add(IN | OUT | ET)
    a.epoll_wait()
    scene.exchange(a, b, [(True, 100), (False, 100)] * 20)
    a.epoll_wait()
    a.epoll_wait()
    b.send(5)
    a.epoll_wait()
    pending = a.start_of_worker("epoll_wait", "e", 8, 10)
    b.send(5)
    pending.finish()
    a.recv()


def waits_of_threads(scene, a, b, act):
    a.epoll_create()
    a.epoll_add(IN)
    waits = [a.start("poll", IN, 8000), a.start("select", "r", 8), a.start_of_worker("epoll_wait", "e", 8, 10)]
    for pending in waits:
        pending.check()
    act()
    for pending in waits:
        pending.finish()
    a.recv()


@plain_scenario
def waits_end_by_bytes(scene, a, b):
    waits_of_threads(scene, a, b, lambda: b.send(5))


@plain_scenario
def waits_end_by_close(scene, a, b):
    waits_of_threads(scene, a, b, b.close)


@plain_scenario
def waits_end_by_reset(scene, a, b):
    a.send(5)
    waits_of_threads(scene, a, b, b.close)


@process_scenario
def waits_end_by_death(scene, a, b):
    waits_of_threads(scene, a, b, b.kill)


def ranks(scene, a, order, events_max=20):
    """Returns the order in which a wait reports connections, as their ranks in the order of the sends."""
    names = a.worker.call("epoll_order", "e", events_max)
    a.note("order", ",".join(str(order.index(name)) for name in names) or "-")
    return names


def play_order(scene, a, b, pairs, mask):
    pairs = [(a, b), *pairs]
    a.epoll_create()
    scene.trace.pop()
    for own, _ in pairs:
        own.epoll_add(mask)
        scene.trace.pop()
    senders = {own.name: peer for own, peer in pairs}
    order = list(senders)
    scene.rng.shuffle(order)

    def send(names):
        for name in names:
            peer = senders[name]
            peer.worker.call("send", *peer.arguments_of("send", (10,)))
            peer.count("send", 10)

    send(order)
    scene.settle()
    ranks(scene, a, order, 3)
    ranks(scene, a, order, 3)
    ranks(scene, a, order)
    for own, _ in pairs:
        if own.name != order[4]:
            own.worker.call("recv_count", *own.arguments_of("recv_count", (100,)))
            own.count("recv_count", 10)
    ranks(scene, a, order)
    send(order[7:] + order[:7])
    scene.settle()
    ranks(scene, a, order)
    ranks(scene, a, order)


def epoll_order(mask, scene, a, b):
    pairs = [scene.pair() for _ in range(9)]
    for own, peer in pairs:
        grow(scene, own, peer, scene.age)
    play_order(scene, a, b, pairs, mask)


def epoll_order_of_mixed_ages(mask, scene, a, b):
    pairs = [scene.pair() for _ in range(9)]
    for own, peer in pairs:
        grow(scene, own, peer, scene.rng.choice(["fresh", "one", "twenty", "middle", "oneway"]))
    play_order(scene, a, b, pairs, mask)


scenario("epoll_order_level", ages=["fresh", "one", "twenty", "middle"])(functools.partial(epoll_order, IN))
scenario("epoll_order_edge", ages=["fresh", "one", "twenty", "middle"])(functools.partial(epoll_order, IN | ET))
scenario("epoll_order_of_mixed_ages_level", ages=["fresh", "twenty", "middle"])(
    functools.partial(epoll_order_of_mixed_ages, IN))
scenario("epoll_order_of_mixed_ages_edge", ages=["fresh", "twenty", "middle"])(
    functools.partial(epoll_order_of_mixed_ages, IN | ET))
