"""Scenarios by name, the ages of connections that they start from, and steps that many of them share."""

import select
import socket

PEEK, WAITALL, TRUNC = socket.MSG_PEEK, socket.MSG_WAITALL, socket.MSG_TRUNC
DONTWAIT, MORE = socket.MSG_DONTWAIT, socket.MSG_MORE
IN, OUT, RDHUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
ET, ONESHOT = select.EPOLLET, select.EPOLLONESHOT
MIB = 1 << 20

AGES = ["fresh", "one", "twenty", "middle", "oneway", "full"]
FEW_AGES = ["fresh", "twenty", "middle"]
# For these ages and directions the endpoints also run as threads of one process.
TOGETHER = [("fresh", "server"), ("middle", "client")]
WAYS = ["blocking", "poll", "epoll", "edge"]
MESSAGE_BYTES_MAX = 1 << 13

SCENARIOS = {}


class Scenario:
    """A function of a scene and two endpoints, with the circumstances in which it runs."""

    def __init__(self, play, ages, directions, is_about_processes, is_accepted):
        self.play = play
        self.ages = ages
        self.directions = directions
        self.is_about_processes = is_about_processes
        self.is_accepted = is_accepted

    def runs(self, name):
        for age in self.ages:
            for direction in self.directions:
                yield name, age, direction, "apart"
                if (age, direction) in TOGETHER and not self.is_about_processes:
                    yield name, age, direction, "together"


def scenario(name=None, ages=AGES, directions=("server", "client"), processes=False, accepted=True):
    def register(play):
        SCENARIOS[name or play.__name__] = Scenario(play, ages, directions, processes, accepted)
        return play

    return register


def before_accept(name=None):
    """Registers a scenario in which `a` is the client's endpoint, and `b` is not accepted yet."""
    return scenario(name, ["unaccepted"], ["client"], True, False)


plain_scenario = scenario()
process_scenario = scenario(processes=True)


def grow(scene, a, b, age):
    """Brings a connection to an age."""
    if age == "one":
        scene.exchange(a, b, [(True, 32), (False, 32)])
    elif age == "twenty":
        scene.exchange(a, b, [(True, 32), (False, 32)] * 20)
    elif age == "middle":
        scene.exchange(a, b, random_exchanges(scene.rng), scene.rng.choice(WAYS))
    elif age == "oneway":
        scene.exchange(a, b, [(scene.rng.random() < 0.5, 64)] * 20)
    elif age == "full":
        sender, receiver = (a, b) if scene.rng.random() < 0.5 else (b, a)
        sender.quietly("fill", 65536)
        unread_bytes = receiver.unread_bytes_of(sender)
        scene.must(receiver.quietly("recv_all", unread_bytes) == unread_bytes)
        sender.quietly("blocking", True)


def random_exchanges(rng):
    """Returns two to eight exchanges. Either endpoint sends first, or both send at once."""
    script = []
    for _ in range(rng.randint(2, 8)):
        first = rng.random() < 0.5
        sizes = [int(2 ** rng.uniform(0, MESSAGE_BYTES_MAX.bit_length() - 1)) for _ in range(2)]
        script += [("both", sizes[0])] if rng.random() < 0.2 else [(first, sizes[0]), (not first, sizes[1])]
    return script


def check_both(a, b):
    a.poll()
    b.poll()


def talk(scene, own, peer, exchanges=3):
    """Sends in both directions, in lockstep and step by step."""
    scene.exchange(own, peer, [(True, 100), (False, 60)] * exchanges)
    own.send(10)
    peer.recv()
    peer.send(10)
    own.recv()


def compare_addresses(a, b):
    """Compares the addresses: the local address of each endpoint is the peer address of the other."""
    own, peer = a.worker.call("addresses", a.name), b.worker.call("addresses", b.name)
    a.note("addresses", "ok" if own == peer[::-1] else f"{own}{peer}".replace(" ", ""))


def accept(b):
    return b.of_worker("accept", "listener", b.name, note="accept")


def taker(scene, a, label="taker"):
    """Returns the same endpoint in a process that has not received it yet."""
    return a.at(scene.start(1)[0], label)
