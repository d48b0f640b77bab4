//! Programs that end at any moment.

use std::io::Write;

use system_tests::{Process, WAIT_MAX, port};

use super::nodes::{ALL_SETTINGS, BY_PROXIES, DIRECT, Nodes, Settings};

/// A server whose connections wait in different ways until the client has ended, and which prints those that still
/// wait.
const WATCHED: &str = r#"
import select
listener = listen()
outcomes, lock = {}, threading.Lock()
def wait_blocking(connection):
    return connection.recv(65536)
def wait_by_poll(connection):
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    return connection.recv(65536)
def wait_by_epoll(connection):
    with select.epoll() as epoll:
        epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        epoll.poll()
        return connection.recv(65536)
def serve(number, connection, wait):
    end = "end"
    try:
        with connection:
            while data := wait(connection):
                connection.sendall(data)
    except (ConnectionResetError, BrokenPipeError):
        end = "reset"
    with lock:
        outcomes[number] = end
def accept():
    for number in range(1 << 30):
        connection = listener.accept()[0]
        with lock:
            outcomes[number] = "waits by " + ["recv", "poll", "epoll"][number % 3]
        way = [wait_blocking, wait_by_poll, wait_by_epoll][number % 3]
        threading.Thread(target=serve, args=(number, connection, way), daemon=True).start()
        time.sleep([0, 0, 0.001, 0.005][number % 4])
threading.Thread(target=accept, daemon=True).start()
for line in sys.stdin:
    deadline = time.monotonic() + 20
    while True:
        with lock:
            waiting = {number: outcome for number, outcome in outcomes.items() if outcome.startswith("waits")}
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    say("waiting", waiting)
"#;

/// Concurrent clients, each of which ends somewhere between its socket() and its last byte.
const ENDING: &str = r#"
import random, select, signal
# Each has its own seed, so that a failing one can be run alone.
CLIENTS, AT_ONCE = 120, 8
def leave(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
def leave_soon(chance, how):
    delay = chance.random() * chance.choice([0.0005, 0.003, 0.02])
    def wait():
        time.sleep(delay)
        leave(how)
    threading.Thread(target=wait, daemon=True).start()
def client(seed):
    chance = random.Random(seed)
    how = chance.choice(["exit", "kill"])
    stage = chance.choice(["connect", "connected", "request", "unread", "half", "stream", "talk", "close"])
    if stage in ("connect", "stream"):
        leave_soon(chance, how)
    try:
        server = socket.create_connection(address)
        if stage == "request":
            server.sendall(b"x" * chance.choice([1, 48, 5000]))
        elif stage == "unread":
            server.sendall(b"x" * chance.choice([1, 48, 5000]))
            select.select([server], [], [])
        elif stage == "half":
            server.sendall(b"x" * chance.choice([1, 5000]))
            server.shutdown(socket.SHUT_WR)
        elif stage == "stream":
            block = b"x" * 65536
            threading.Thread(target=lambda: [None for _ in iter(lambda: server.recv(65536), b"")], daemon=True).start()
            while True:
                server.sendall(block)
        elif stage in ("talk", "close"):
            for _ in range(chance.randrange(20)):
                server.sendall(b"12345678")
                read(server, 8)
            if stage == "close":
                server.close()
    except OSError as error:
        print(seed, stage, how, error, file=sys.stderr)
        os._exit(1)
    leave(how)
running, failed = set(), 0
for number in range(CLIENTS):
    pid = os.fork()
    if pid == 0:
        client(SEED * 1_000_003 + number)
    running.add(pid)
    while len(running) >= AT_ONCE or (number == CLIENTS - 1 and running):
        pid, status = os.wait()
        running.discard(pid)
        failed += status == 256
say("failed", failed)
"#;

/// The server closes no connection, and the clients close theirs: some clients choose a port that is still in use by a
/// connection of the server, and must then choose another one.
#[test]
fn a_port_still_used_by_a_connection_of_the_server_is_not_chosen_again() {
    let nodes = Nodes::start_as(DIRECT);
    let (_server, port) = nodes.serve("listener, held = listen(), []\nwhile True: held.append(listener.accept())");
    // With about 14,000 ports, the probability that no port is chosen twice is below one in a billion.
    let output = nodes.client("for _ in range(800): socket.create_connection(address).close()\nsay('done')", port);
    assert_eq!(output, "done\n");
}

/// In every configuration, and with proxies that share a core, where each handover waits for the other thread.
#[test]
fn no_server_waits_for_a_client_that_has_ended() {
    let few_spans = |settings: Settings| Settings { spans: settings.spans.min(4), ..settings };
    let failover = Settings { is_failover: true, ..BY_PROXIES };
    let on_one_core = Settings { core: Some(0), ..BY_PROXIES };
    for (settings, seed) in ALL_SETTINGS.map(few_spans).into_iter().chain([failover, on_one_core]).zip(1..) {
        end_clients_anywhere(&Nodes::start_as(settings), seed);
    }
}

#[track_caller]
fn end_clients_anywhere(nodes: &Nodes, seed: u32) {
    let port = port::free_port();
    let (server, mut input) = Process::start_with_input(&mut nodes.python(1, WATCHED, port));
    server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
    let script = format!("SEED = {seed}\n{ENDING}");
    let clients = Process::start(&mut nodes.python(0, &script, port)).wait(WAIT_MAX).must_succeed();
    assert_eq!(clients.stdout, "failed 0\n", "seed {seed}: {}", clients.stderr);
    writeln!(input, "print the outcomes").expect("a server that reads");
    server.wait_until("outcomes", WAIT_MAX, |server| server.stdout().contains("waiting"));
    assert!(server.stdout().contains("waiting {}"), "seed {seed}: {}", server.stdout());
    for own in 0..2 {
        nodes.wait_for_report(own, "no connection", |report| report.connections_open == 0);
    }
}
