//! Random conversations between two nodes: each end sends and receives a stream that it knows, in pieces of random
//! sizes and in random ways, and forks meanwhile.

use system_tests::{Process, WAIT_MAX};

use super::nodes::{BY_PROXIES, DIRECT, Nodes, Settings};

/// Connections of each run of a seed.
const CONVERSATIONS: u64 = 48;

/// One end of a conversation with a seed; `own` is 0 at the end that connects.
const CONVERSE: &str = r#"
import random, select, traceback
def stream(seed, sender):
    chance = random.Random(f"{seed} {sender}")
    return chance.randbytes(chance.choice([0, 1, 300, 20_000, 300_000, 2_000_000]))
class Talk:
    def __init__(self, connection, seed, own):
        self.connection, self.chance = connection, random.Random(f"{seed} by {own}")
        self.to_send, self.expected = stream(seed, own), stream(seed, 1 - own)
        self.sent = self.received = 0
        self.has_shut = False
        self.largest = max(self.chance.choice([16, 1000, 70_000]), len(self.to_send) // 300, len(self.expected) // 300)
        connection.setblocking(self.chance.random() < 0.5)
        if self.chance.random() < 0.2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.chance.choice([4096, 150_000, 1_000_000]))
    def is_over(self):
        return self.has_shut and self.received > len(self.expected)
    def send(self):
        piece = self.to_send[self.sent:][:self.chance.randrange(1, self.largest)]
        if not piece:
            if not self.has_shut:
                self.connection.shutdown(socket.SHUT_WR)
            self.has_shut = True
            return
        self.sent += self.connection.send(piece, socket.MSG_DONTWAIT)
    def receive(self):
        size = self.chance.randrange(1, self.largest)
        if self.chance.random() < 0.05:
            self.connection.recv(size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        got = self.connection.recv(size, socket.MSG_DONTWAIT)
        want = self.expected[self.received:][:len(got)]
        if got != want:
            first = next(at for at in range(len(got)) if got[at:at + 1] != want[at:at + 1])
            place = self.expected.find(got[first:][:16])
            assert False, f"other bytes from {self.received + first} on: those at {place}"
        if not got:
            assert self.received == len(self.expected), f"the end after {self.received} of {len(self.expected)}"
            self.received += 1
        self.received += len(got)
    def wait(self):
        wanted = (0 if self.has_shut else select.POLLOUT) | (0 if self.received > len(self.expected) else select.POLLIN)
        waiter = select.epoll() if self.chance.random() < 0.3 else select.poll()
        waiter.register(self.connection, wanted)
        limit = 20 if isinstance(waiter, select.epoll) else 20_000
        events = waiter.poll(limit)
        assert events, f"nothing for 20 s: {self.sent} of {len(self.to_send)}, {self.received} of {len(self.expected)}"
        return events[0][1]
    def step(self):
        events = self.wait()
        try:
            if events & (select.POLLIN | select.POLLHUP) and self.received <= len(self.expected):
                self.receive()
            if events & select.POLLOUT and not self.has_shut:
                self.send()
        except BlockingIOError:
            pass
        if self.chance.random() < 0.003:
            time.sleep(self.chance.random() * 0.003)
    def steps(self, count):
        while count > 0 and not self.is_over():
            self.step()
            count -= 1
    def fork(self):
        # The child does nothing, or goes on for a while and tells the parent how far it came; but not once the peer may
        # have closed, because parent and child receive both what a peer that has left has in a lane.
        takes_over = self.chance.random() < 0.5 and not self.has_shut
        count = self.chance.randrange(60) if takes_over else 0
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.steps(count)
                os.write(writer, struct.pack("!QQ?", self.sent, self.received, self.has_shut))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        state = os.read(reader, 17)
        os.close(reader)
        assert os.waitpid(child, 0)[1] == 0, "a child failed"
        self.sent, self.received, self.has_shut = struct.unpack("!QQ?", state)
    def run(self):
        forks = self.chance.choice([0, 0, 1, 3])
        while not self.is_over():
            self.steps(self.chance.randrange(1, 200))
            if forks > 0:
                forks -= 1
                self.fork()
        self.connection.close()
def converse(connection, seed, own):
    try:
        Talk(connection, seed, own).run()
        return True
    except BaseException:
        print(f"seed {seed} at end {own}", file=sys.stderr)
        traceback.print_exc()
        return False
"#;

const SERVER: &str = r#"
listener = listen()
for _ in range(3):
    if os.fork() == 0:
        break
while True:
    connection = listener.accept()[0]
    converse(connection, struct.unpack("!Q", read(connection, 8))[0], 1)
"#;

const CLIENT: &str = r#"
workers = []
for worker in range(4):
    child = os.fork()
    if child == 0:
        is_right = True
        for seed in range(FIRST + worker, FIRST + COUNT, 4):
            server = socket.create_connection(address)
            server.sendall(struct.pack("!Q", seed))
            is_right &= converse(server, seed, 0)
        os._exit(0 if is_right else 1)
    workers.append(child)
say([os.waitpid(worker, 0)[1] for worker in workers])
"#;

#[test]
fn random_conversations_between_nodes_keep_every_byte() {
    let first: u64 = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for settings in [DIRECT, Settings { spans: 2, ..DIRECT }, BY_PROXIES] {
        let nodes = Nodes::start_as(settings);
        let (server, port) = nodes.serve(&format!("{CONVERSE}\n{SERVER}"));
        let script = format!("{CONVERSE}\nFIRST, COUNT = {first}, {CONVERSATIONS}\n{CLIENT}");
        let client = Process::start(&mut nodes.python(0, &script, port)).wait(WAIT_MAX * 4);
        assert!(client.stdout == "[0, 0, 0, 0]\n", "{client}\nserver: {}", server.stderr());
        assert_eq!(server.stderr(), "");
    }
}
