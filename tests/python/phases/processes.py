"""Processes that share a connection: by fork, exec, SCM_RIGHTS and duplicated descriptors."""

import os
import signal

from phases.conductor import count_finished
from phases.scenario import DONTWAIT, IN, MIB, check_both, grow, process_scenario, scenario, taker, talk


@process_scenario
def fork_child_uses(scene, a, b):
    child = a.fork()
    talk(scene, child, b, 10)
    child.close()
    b.poll()
    a.send(5)
    b.recv()
    a.close()
    b.recv()


@process_scenario
def fork_parent_closes(scene, a, b):
    child = a.fork()
    a.close()
    b.poll()
    talk(scene, child, b, 50)
    b.poll()
    child.exit()
    b.poll()
    b.recv()


@process_scenario
def fork_parent_uses_after_child_has_exited(scene, a, b):
    child = a.fork()
    child.exit()
    b.poll()
    talk(scene, a, b, 10)
    a.of_worker("reap")
    talk(scene, a, b, 10)
    a.close()
    b.recv()


@process_scenario
def fork_child_uses_and_is_killed(scene, a, b):
    child = a.fork()
    talk(scene, child, b)
    b.send(10)
    child.kill()
    b.poll()
    a.recv()
    talk(scene, a, b)
    a.of_worker("reap")
    talk(scene, a, b, 20)


@process_scenario
def fork_both_use_in_turns(scene, a, b):
    child = a.fork()
    for endpoint in (a, child, a, child, child, a):
        talk(scene, endpoint, b, 2)
    b.send(10)
    a.recv(4)
    child.recv(3)
    a.recv()
    a.close()
    b.poll()
    child.close()
    b.recv()


@process_scenario
def fork_both_wait(scene, a, b):
    child = a.fork()
    waits = [a.start("recv_count", 100), child.start("recv_count", 100)]
    for count in range(1, 3):
        b.send(5)
        a.note("received", count_finished(waits, count))
    a.all_received()
    talk(scene, child, b)
    talk(scene, a, b)


@process_scenario
def fork_both_poll(scene, a, b):
    child = a.fork()
    waits = [a.start("poll", IN, 8000), child.start("poll", IN, 8000)]
    b.send(5)
    for pending in waits:
        pending.finish()
    child.recv()
    check_both(a, child)


@process_scenario
def fork_of_both_endpoints(scene, a, b):
    a2, b2 = a.fork("a2"), b.fork("b2")
    talk(scene, a2, b2)
    talk(scene, a, b2)
    a.close()
    talk(scene, a2, b)
    b.close()
    talk(scene, a2, b2)
    a2.close()
    b2.recv()


@process_scenario
def fork_with_unread_bytes(scene, a, b):
    a.send(10)
    b.send(10)
    a2, b2 = a.fork("a2"), b.fork("b2")
    a2.recv(4)
    a.recv()
    b2.recv()
    b.recv(10, DONTWAIT)
    talk(scene, a2, b)


@process_scenario
def fork_amid_an_exchange(scene, a, b):
    b.send(100)
    a.recv(40)
    a.send(30)
    child = a.fork()
    child.recv()
    child.send(30)
    b.recv(50)
    b.recv()
    a.send(5)
    b.recv()
    child.exit()
    talk(scene, a, b)


@process_scenario
def fork_with_much_unread(scene, a, b):
    b.start("send_all", 300_000).finish()
    child = a.fork()
    child.recv_all(100_000)
    a.recv_all(100_000)
    child.recv_all(100_000)
    child.close()
    talk(scene, a, b)


@process_scenario
def fork_child_shuts_down(scene, a, b):
    child = a.fork()
    child.shutdown("WR")
    b.poll()
    b.recv()
    a.poll()
    a.send(5)
    b.send(5)
    a.recv()


@process_scenario
def fork_last_close_with_unread_bytes(scene, a, b):
    child = a.fork()
    b.send(10)
    child.close()
    b.poll()
    a.close()
    b.poll()
    b.recv()


@process_scenario
def fork_of_a_grandchild(scene, a, b):
    child = a.fork()
    grandchild = child.fork("grandchild")
    child.exit()
    a.close()
    talk(scene, grandchild, b, 10)
    grandchild.exit()
    b.recv()


@process_scenario
def fork_amid_a_blocked_send_of_the_peer(scene, a, b):
    sends = b.start("send_all", 8 * MIB)
    child = a.fork()
    a.close()
    child.start("recv_all", 8 * MIB).finish()
    sends.finish()
    talk(scene, child, b)


@process_scenario
def fork_with_epoll(scene, a, b):
    a.epoll_create()
    a.epoll_add(IN)
    child = a.fork()
    b.send(5)
    a.epoll_wait()
    child.epoll_wait()
    child.recv()
    a.epoll_wait()
    child.epoll_wait()
    pending = child.start_of_worker("epoll_wait", "e", 8, 10)
    b.send(5)
    pending.finish()
    a.recv()


@scenario(ages=["fresh", "middle"], processes=True)
def fork_for_each_connection(scene, a, b):
    """A server, or a client, that leaves each new connection to a child and continues with the next one."""
    children = []
    for count in range(3):
        own, peer = (a, b) if count == 0 else scene.pair()
        children.append((own.fork(f"child{count}"), peer))
        own.close()
    for child, peer in children:
        scene.exchange(peer, child, [(True, 40), (False, 200)] * 50)
    for child, peer in reversed(children):
        child.exit()
        peer.recv()


@process_scenario
def helper_runs(scene, a, b):
    for how in ("subprocess", "posix_spawn"):
        b.send(10)
        a.of_worker("run_helper", how)
        a.recv()
        talk(scene, a, b)


@process_scenario
def helper_does_not_hold_the_connection(scene, a, b):
    scene.pids.add(a.worker.call("start_sleeper"))
    talk(scene, a, b)
    a.close()
    b.poll()
    b.recv()


@process_scenario
def helper_holds_the_connection(scene, a, b):
    sleeper = a.worker.call("start_sleeper", a.name)
    scene.pids.add(sleeper)
    talk(scene, a, b, 10)
    a.close()
    b.poll()
    b.send(5)
    b.poll()
    os.kill(sleeper, signal.SIGKILL)
    scene.settle(2)
    b.recv()
    b.poll()


@process_scenario
def pass_on(scene, a, b):
    t = taker(scene, a)
    b.send(10)
    a.pass_on()
    a.close()
    b.poll()
    t.take()
    t.recv()
    talk(scene, t, b, 10)
    t.state()
    t.close()
    b.recv()


@process_scenario
def pass_on_and_keep(scene, a, b):
    t = taker(scene, a)
    a.pass_on()
    t.take()
    talk(scene, a, b)
    talk(scene, t, b)
    talk(scene, a, b)
    t.kill()
    b.poll()
    talk(scene, a, b)
    a.close()
    b.recv()


@process_scenario
def pass_on_under_way_while_bytes_come(scene, a, b):
    t = taker(scene, a)
    a.send(10)
    a.pass_on()
    a.kill()
    b.recv()
    b.send(10)
    b.start("send_all", 100_000).finish()
    b.poll()
    t.take()
    t.recv_all(100_010)
    talk(scene, t, b)
    t.close()
    b.recv()


@process_scenario
def pass_on_to_nobody(scene, a, b):
    t = taker(scene, a)
    a.pass_on()
    a.close()
    b.poll()
    t.of_worker("discard_passed")
    scene.settle()
    b.poll()
    b.recv()


@process_scenario
def pass_on_twice(scene, a, b):
    t, u = taker(scene, a), taker(scene, a, "second_taker")
    a.pass_on()
    a.close()
    t.take()
    t.send(10)
    t.pass_on()
    t.exit()
    u.take()
    b.recv()
    talk(scene, u, b, 10)


@process_scenario
def pass_on_of_both_endpoints(scene, a, b):
    t, u = taker(scene, a), taker(scene, b, "second_taker")
    a.pass_on()
    t.take()
    b.pass_on()
    u.take()
    a.close()
    b.close()
    talk(scene, t, u, 10)
    t.close()
    u.recv()


@process_scenario
def execute(scene, a, b):
    a.execute()
    a.poll()
    talk(scene, a, b, 10)
    a.state()
    a.close()
    b.recv()


@process_scenario
def execute_with_unread_bytes(scene, a, b):
    b.send(10)
    a.send(10)
    a.execute()
    a.unread()
    a.recv()
    b.recv()
    b.start("send_all", 200_000).finish()
    a.recv_all(100_000)
    a.execute()
    a.recv_all(100_000)
    talk(scene, a, b)


@process_scenario
def execute_in_a_child(scene, a, b):
    child = a.fork()
    a.close()
    child.execute()
    talk(scene, child, b, 10)
    child.kill()
    b.poll()
    b.recv()


@process_scenario
def execute_in_a_child_while_the_parent_goes_on(scene, a, b):
    child = a.fork()
    child.execute()
    talk(scene, a, b)
    talk(scene, child, b)
    talk(scene, a, b)
    child.exit()
    a.of_worker("reap")
    talk(scene, a, b)


@process_scenario
def execute_of_both_endpoints(scene, a, b):
    a.execute()
    b.execute()
    talk(scene, a, b, 10)


@process_scenario
def execute_cat(scene, a, b):
    """A program without socket calls echoes its input."""
    b.send(10)
    child = a.fork()
    a.close()
    child.post("execute_cat", a.name)
    echo = b.at(b.worker, "b")
    echo.peer_key = b.own_key
    echo.recv_all(10)
    for size in (1, 5000, 200_000):
        sends = b.start("send_all", size)
        echo.recv_all(size)
        sends.finish()
    b.shutdown("WR")
    b.recv()
    child.worker.wait_for_end()


@process_scenario
def duplicate(scene, a, b):
    d = a.at(a.worker, "a_dup", "dup")
    a.dup("dup")
    talk(scene, d, b)
    talk(scene, a, b)
    b.send(10)
    a.recv(4)
    d.recv()
    a.close()
    b.poll()
    talk(scene, d, b)
    d.shutdown("WR")
    b.recv()
    d.close()
    b.poll()


@process_scenario
def duplicate_over_another_connection(scene, a, b):
    other, peer = scene.pair()
    grow(scene, other, peer, scene.age)
    a.dup2(other.name)
    peer.recv()
    moved = a.at(a.worker, "a_dup", other.name)
    a.close()
    talk(scene, moved, b, 10)
    moved.close()
    b.recv()
