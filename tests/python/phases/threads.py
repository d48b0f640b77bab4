"""Threads that share a connection."""

import functools

from phases.conductor import count_finished
from phases.scenario import DONTWAIT, MIB, plain_scenario, process_scenario, scenario
from phases.worker import FINISH_S


def shutdown_of_a_blocked_recv(how, scene, a, b):
    pending = a.start("recv", 100)
    pending.check()
    a.shutdown(how)
    b.poll()
    if how == "WR":
        pending.check()
        b.send(5)
    pending.finish()
    a.recv(100, DONTWAIT)


for how_to_shut in ("RD", "WR", "RDWR"):
    scenario(f"shutdown_{how_to_shut.lower()}_of_a_blocked_recv")(
        functools.partial(shutdown_of_a_blocked_recv, how_to_shut))


@plain_scenario
def blocked_recv_ends_by_shutdown_of_the_peer(scene, a, b):
    pending = a.start("recv", 100)
    b.shutdown("WR")
    pending.finish()


@plain_scenario
def blocked_recv_ends_by_reset(scene, a, b):
    a.send(5)
    pending = a.start("recv", 100)
    b.close()
    pending.finish()
    a.recv()


@process_scenario
def blocked_recv_ends_by_death(scene, a, b):
    pending = a.start("recv", 100)
    b.kill()
    pending.finish()
    a.recv()


@plain_scenario
def blocked_recv_of_a_closed_descriptor(scene, a, b):
    pending = a.start("recv", 100)
    a.close()
    pending.check()
    b.poll()
    b.send(5)
    pending.check(1)


@plain_scenario
def two_threads_receive(scene, a, b):
    waits = [a.start("recv_count", 100), a.start("recv_count", 100)]

    for count in range(3):
        a.note("received", count_finished(waits, count))
        b.send(5)
    a.recv_count(100)
    a.all_received()
    b.send(5)
    a.recv()


@plain_scenario
def two_threads_receive_much(scene, a, b):
    """Each byte is received by one of the threads."""
    waits = [a.start("count_to_end"), a.start("count_to_end")]
    b.start("send_all", MIB, 3).finish()
    b.shutdown("WR")
    results = [pending.outcome(FINISH_S) for pending in waits]
    a.note("received", sum(results) if all(isinstance(result, int) for result in results) else results)


@plain_scenario
def two_threads_send(scene, a, b):
    sends = [a.start("send_all", 2 * MIB, 1), a.start("send_all", 2 * MIB, 2)]
    b.do("count_to", 4 * MIB)
    for pending in sends:
        pending.finish()
    b.recv(1, DONTWAIT)
