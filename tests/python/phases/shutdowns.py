"""Shutdown of one direction and of both, by one endpoint and by both."""

from phases.scenario import check_both, plain_scenario


@plain_scenario
def shutdown_wr(scene, a, b):
    check_both(a, b)
    a.shutdown("WR")
    check_both(a, b)
    b.recv()
    b.recv()
    b.send(5)
    check_both(a, b)
    a.recv()
    a.send(5)
    b.close()
    a.poll()
    a.recv()
    a.so_error()
    a.poll()


@plain_scenario
def shutdown_wr_with_bytes(scene, a, b):
    a.send(100)
    a.shutdown("WR")
    b.poll()
    b.recv(40)
    b.poll()
    b.recv()
    b.poll()
    b.recv()
    b.send(5)
    b.shutdown("WR")
    check_both(a, b)
    a.recv()
    a.recv()
    check_both(a, b)
    a.close()
    b.poll()
    b.recv()
    b.send(5)


@plain_scenario
def shutdown_wr_behind_much(scene, a, b):
    a.start("send_all", 300_000).finish()
    a.shutdown("WR")
    b.start("recv_all", 400_000).finish()
    b.start("send_all", 300_000).finish()
    b.close()
    a.start("recv_all", 400_000).finish()
    a.poll()


@plain_scenario
def shutdown_rd(scene, a, b):
    a.shutdown("RD")
    check_both(a, b)
    a.recv()
    b.send(5)
    check_both(a, b)
    a.recv()
    a.recv()
    a.send(3)
    b.recv()
    check_both(a, b)
    b.close()
    a.poll()
    a.recv()


@plain_scenario
def shutdown_rd_with_unread_bytes(scene, a, b):
    b.send(5)
    a.shutdown("RD")
    a.poll()
    a.recv(3)
    a.recv()
    a.recv()
    b.poll()
    a.close()
    b.poll()
    b.recv()


@plain_scenario
def shutdown_rdwr(scene, a, b):
    a.shutdown("RDWR")
    check_both(a, b)
    a.recv()
    a.send(5)
    b.recv()
    b.send(5)
    check_both(a, b)
    b.so_error()
    b.send(5)
    b.recv()
    a.so_error()
    a.recv()


@plain_scenario
def shutdown_rdwr_with_unread_bytes(scene, a, b):
    b.send(10)
    a.shutdown("RDWR")
    check_both(a, b)
    a.recv(4)
    a.recv()
    a.recv()
    b.recv()
    b.close()
    a.poll()
    a.recv()


@plain_scenario
def shutdown_wr_of_both(scene, a, b):
    a.shutdown("WR")
    b.shutdown("WR")
    check_both(a, b)
    a.recv()
    b.recv()
    check_both(a, b)
    a.so_error()
    a.send(5)
    b.send(5)
    a.close()
    b.poll()
    b.close()


@plain_scenario
def shutdown_again(scene, a, b):
    a.shutdown("WR")
    a.shutdown("WR")
    a.shutdown("RD")
    a.shutdown("RDWR")
    check_both(a, b)
    b.close()
    a.shutdown("WR")
    a.shutdown("RD")
    a.poll()


@plain_scenario
def shutdown_of_a_closed_peer(scene, a, b):
    b.close()
    a.shutdown("WR")
    a.poll()
    a.shutdown("WR")
    a.recv()
    a.send(5)
    a.so_error()
