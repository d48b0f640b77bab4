"""Flags of calls, socket options, every call that moves bytes, and queries of a connection."""

from phases.scenario import (
    DONTWAIT,
    IN,
    MIB,
    MORE,
    OUT,
    PEEK,
    TRUNC,
    WAITALL,
    check_both,
    compare_addresses,
    plain_scenario,
    process_scenario,
)


@plain_scenario
def peek(scene, a, b):
    b.send(10)
    a.recv(4, PEEK)
    a.recv(4, PEEK)
    a.recv(100, PEEK)
    b.send(10)
    a.recv(100, PEEK)
    a.recv(5)
    a.recv(100, PEEK)
    a.unread()
    a.recv(100)
    a.recv(100, PEEK | DONTWAIT)
    pending = a.start("recv", 100, PEEK)
    pending.check()
    b.send(7)
    pending.finish()
    a.recv(100)
    b.shutdown("WR")
    a.recv(100, PEEK)
    a.recv(100, PEEK)
    a.recv(100)


@plain_scenario
def peek_of_much(scene, a, b):
    b.start("send_all", 40_000).finish()
    a.recv(200_000, PEEK)
    a.recv(15_000)
    a.recv(200_000, PEEK)
    a.recv(20_000, PEEK | WAITALL)
    a.recv(200_000, PEEK | WAITALL | DONTWAIT)
    a.recv_all(25_000)
    a.recv(10, PEEK | DONTWAIT)


@plain_scenario
def waitall(scene, a, b):
    pending = a.start("recv", 100, WAITALL)
    pending.check()
    b.send(40)
    pending.check()
    b.send(80)
    pending.finish()
    a.recv(100, WAITALL | DONTWAIT)
    pending = a.start("recv", 100, WAITALL)
    b.send(40)
    pending.check()
    b.shutdown("WR")
    pending.finish()
    a.recv(100, WAITALL)


@plain_scenario
def waitall_of_much(scene, a, b):
    pending = a.start("recv", 500_000, WAITALL)
    b.start("send_all", 499_999).finish()
    pending.check()
    b.send(2)
    pending.finish()
    a.recv()


@plain_scenario
def waitall_of_a_reset_connection(scene, a, b):
    a.send(5)
    pending = a.start("recv", 100, WAITALL)
    b.send(40)
    b.close()
    pending.finish()
    a.recv()


@plain_scenario
def truncate(scene, a, b):
    b.send(20)
    a.do("recv_count", 5, TRUNC, note="recv(TRUNC)")
    a.recv(5)
    a.do("recv_count", 100, TRUNC, note="recv(TRUNC)")
    a.do("recv_count", 100, TRUNC | DONTWAIT, note="recv(TRUNC|DONTWAIT)")
    b.start("send_all", 100_000).finish()
    a.do("recv_count", 60_000, TRUNC | WAITALL, note="recv(TRUNC|WAITALL)")
    a.recv_all(40_000)


@plain_scenario
def empty_calls(scene, a, b):
    a.start("recv", 0).check()
    a.recv(0, DONTWAIT)
    a.recv(0, PEEK)
    a.do("read", 0)
    a.send(0)
    a.do("write", 0)
    a.do("writev", [0, 0])
    a.do("sendmsg", [])
    a.do("readv", [0])
    b.poll()
    b.recv(10, DONTWAIT)
    b.send(5)
    a.recv(0)
    a.do("readv", [0, 3, 0, 9])
    b.shutdown("WR")
    a.recv(0)
    a.recv()


@plain_scenario
def more(scene, a, b):
    a.send(10, MORE)
    a.send(10)
    b.recv()
    a.send(10, MORE)
    a.shutdown("WR")
    b.recv()
    b.recv()


@plain_scenario
def low_watermark(scene, a, b):
    a.set_option("SOL_SOCKET", "SO_RCVLOWAT", 10)
    a.get_option("SOL_SOCKET", "SO_RCVLOWAT")
    a.epoll_create()
    a.epoll_add(IN)
    pending = a.start("recv", 100)
    b.send(5)
    a.poll()
    a.select("r")
    a.epoll_wait()
    pending.check()
    b.send(5)
    pending.finish()
    b.send(9)
    a.poll()
    a.epoll_wait()
    b.send(1)
    a.poll()
    a.epoll_wait()
    a.recv()
    b.send(3)
    a.recv(2)
    a.recv(100, DONTWAIT)
    b.send(3)
    b.shutdown("WR")
    a.poll()
    a.recv()


@plain_scenario
def receive_timeout(scene, a, b):
    a.set_timeout("SO_RCVTIMEO", 60)
    a.start("recv", 10).finish()
    b.send(5)
    a.recv()
    a.start("recv", 10, WAITALL).finish()
    b.send(5)
    a.start("recv", 10, WAITALL).finish()
    a.set_timeout("SO_RCVTIMEO", 0)
    pending = a.start("recv", 10)
    scene.settle(4)
    pending.check()
    b.send(5)
    pending.finish()


@plain_scenario
def send_timeout(scene, a, b):
    a.set_timeout("SO_SNDTIMEO", 60)
    a.send(100)
    a.start("send_all", 64 * MIB).finish()
    a.poll_for(OUT)
    b.send(5)
    a.recv()


@plain_scenario
def counts(scene, a, b):
    scene.settle(15)
    a.unread()
    a.unsent()
    for size in (5, 100, 1000, 30_000):
        b.send(size)
        a.unread()
    scene.settle(15)
    b.unsent()
    a.recv(50)
    a.unread()
    a.recv_all(1055)
    a.unread()
    a.recv_all(30_000)
    a.unread()
    b.unsent()
    b.send(7)
    b.shutdown("WR")
    a.unread()
    a.recv()
    a.unread()


@plain_scenario
def every_call(scene, a, b):
    sends = [("send", 50), ("write", 50), ("writev", [10, 0, 30, 10]), ("sendmsg", [20, 30]), ("sendto", 50),
             ("sendfile", 50), ("splice_out", 50)]
    receives = [("recv", 100), ("read", 100), ("readv", [7, 0, 200]), ("recvmsg", 100), ("recvfrom", 100),
                ("splice_in", 100), ("recv", 100)]
    for shift in range(3):
        for i, (operation, argument) in enumerate(sends):
            sender, receiver = (a, b) if (i + shift) % 2 else (b, a)
            sender.do(operation, argument)
            operation, argument = receives[(i + 2 * shift) % len(receives)]
            receiver.do(operation, argument)


@plain_scenario
def many_spans(scene, a, b):
    spans = [1 + i * 7 % 300 for i in range(900)]
    pending = a.start("writev", spans)
    b.start("recv_all", sum(spans)).finish()
    pending.finish()
    a.start("sendmsg", [30] * 1000).finish()
    b.do("readv", [30_000 // 500] * 500)
    b.recv(1, DONTWAIT)


@plain_scenario
def files_and_pipes(scene, a, b):
    sends = a.start("sendfile", 2 * MIB)
    b.start("recv_all", 2 * MIB).finish()
    sends.finish()
    b.start("send_all", 40_000).finish()
    a.do("splice_in", 1000)
    a.recv_all(39_000)
    pending = a.start("splice_in", 1000)
    pending.check()
    b.do("splice_out", 50)
    pending.finish()
    b.shutdown("WR")
    a.do("splice_in", 1000)


@plain_scenario
def questions(scene, a, b):
    compare_addresses(a, b)
    for endpoint in (a, b):
        endpoint.state()
        endpoint.so_error()
        endpoint.kind()
        endpoint.flags()
        for option in ("SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ACCEPTCONN", "SO_KEEPALIVE", "SO_REUSEADDR"):
            endpoint.do("get_option", "SOL_SOCKET", option, note=option)
        endpoint.do("get_option", "IPPROTO_TCP", "TCP_NODELAY", note="TCP_NODELAY")
        endpoint.set_option("IPPROTO_TCP", "TCP_NODELAY", 1)
        endpoint.set_option("SOL_SOCKET", "SO_KEEPALIVE", 1)
        endpoint.set_option("SOL_SOCKET", "SO_SNDBUF", 50_000)
        endpoint.set_option("SOL_SOCKET", "SO_RCVBUF", 50_000)
        for option in ("SO_SNDBUF", "SO_RCVBUF", "SO_KEEPALIVE"):
            endpoint.do("get_option", "SOL_SOCKET", option, note=option)
        endpoint.do("get_option", "IPPROTO_TCP", "TCP_NODELAY", note="TCP_NODELAY")
    a.do("connect_again", scene.port)
    scene.exchange(a, b, [(True, 10), (False, 10)])


@plain_scenario
def states(scene, a, b):
    a.state()
    b.state()
    a.shutdown("WR")
    scene.settle(4)
    a.state()
    b.state()
    b.send(5)
    a.recv()
    b.close()
    scene.settle(4)
    a.state()
    a.peer_address()


@plain_scenario
def listener_is_closed(scene, a, b):
    scene.server.call("close", "listener")
    scene.settle()
    scene.exchange(a, b, [(True, 10), (False, 10)] * 10)
    check_both(a, b)
    a.send(5)
    a.close()
    b.recv()
    b.recv()


@process_scenario
def no_descriptor_is_left(scene, a, b):
    a.of_worker("limit_descriptors", True)
    scene.exchange(a, b, [(True, 100), (False, 100)] * 20)
    a.start("send_all", 300_000).finish()
    b.start("recv_all", 300_000).finish()
    b.start("send_all", 300_000).finish()
    a.start("recv_all", 300_000).finish()
    a.poll()
    a.of_worker("limit_descriptors", False)
    scene.exchange(a, b, [(True, 100), (False, 100)] * 20)
    a.close()
    b.recv()


@process_scenario
def no_file_may_grow(scene, a, b):
    a.of_worker("limit_files", 0)
    scene.exchange(a, b, [(True, 100), (False, 100)] * 20)
    a.start("send_all", 300_000).finish()
    b.start("recv_all", 300_000).finish()
    a.close()
    b.recv()
