//! Two nodes on this machine whose programs reach each other only through emulated windows, by way of two proxies. The
//! test acts as both monitors: it trains the link and answers programs that request another node's listener.

use std::io::Write as _;
use std::net::SocketAddr;

use control::proxy::FromProxy;
use system_tests::script::{ECHO, client_that};
use system_tests::{Process, WAIT_MAX, port, wait_until};

use nodes::{
    ALL_SETTINGS, BY_PROXIES, DIRECT, DIRECT_SETTINGS, HALF_COMBINED, MODELLED, NON_COHERENT, Nodes, Settings,
    WRITE_COMBINED, address,
};

#[path = "windows/connects.rs"]
mod connects;
#[path = "windows/conversations.rs"]
mod conversations;
#[path = "windows/endings.rs"]
mod endings;
#[path = "windows/failover.rs"]
mod failover;
#[path = "windows/hostile.rs"]
mod hostile;
#[path = "windows/losses.rs"]
mod losses;
#[path = "windows/nodes.rs"]
mod nodes;
#[path = "windows/passed_on.rs"]
mod passed_on;

/// The round-trip time of the modelled link: 500 ns in each direction.
const MODELLED_RTT_NS: u64 = 1_000;

#[test]
fn programs_of_two_nodes_communicate_through_windows() {
    talk(&Nodes::start());
}

#[test]
fn programs_communicate_through_windows_of_a_modelled_link() {
    talk(&Nodes::start_as(Settings { timing: Some("ntb"), ..BY_PROXIES }));
}

#[test]
fn programs_store_into_windows_themselves_and_the_proxies_see_no_byte() {
    [DIRECT, WRITE_COMBINED, NON_COHERENT].map(Nodes::start_as).iter().for_each(talk_directly);
}

/// As the proxies count what they copy.
#[test]
fn the_proxies_copy_nothing_once_the_streams_have_moved() {
    let nodes = Nodes::start_as(DIRECT);
    let (_server, port) = nodes.serve(ECHO);
    let (client, mut input) = Process::start_with_input(&mut nodes.python(
        0,
        r#"
with socket.create_connection(address, timeout=20) as server:
    for size in [8] * 100 + [0] + [8] * 1000 + [100_000] * 50:
        if size == 0:
            say("moved")
            sys.stdin.readline()
        data = os.urandom(size)
        server.sendall(data)
        assert read(server, size) == data
    say("echoed")
    sys.stdin.readline()
"#,
        port,
    ));
    let copied = |output: &str| {
        client.wait_until(output, WAIT_MAX, |client| client.stdout().contains(output));
        [0, 1].map(|own| {
            let report = nodes.report(own);
            assert_eq!((report.direct_open, report.direct_total, report.direct_missed), (1, 1, 0), "{report:?}");
            report.bytes_copied
        })
    };
    let before = copied("moved");
    writeln!(input, "go on").expect("a program that reads");
    assert_eq!(copied("echoed"), before);
}

/// Checks only a lower bound; benchmarks measure the time.
#[test]
fn direct_connections_are_never_faster_than_their_modelled_link() {
    let nodes = Nodes::start_as(MODELLED);
    talk_directly(&nodes);
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
with socket.create_connection(address, timeout=20) as server:
    server.settimeout(None)
    least = 1 << 62
    for turn in range(2000):
        begun = time.monotonic_ns()
        server.sendall(b"8 bytes.")
        got = server.recv(8)
        least = min(least, time.monotonic_ns() - begun)
        assert got == b"8 bytes.", got
say(least)
"#,
        port,
    );
    let least_ns: u64 = output.trim().parse().expect("nanoseconds");
    assert!(least_ns >= MODELLED_RTT_NS, "{least_ns} ns");
}

fn talk_directly(nodes: &Nodes) {
    talk(nodes);
    for own in 0..2 {
        let report = nodes.wait_for_free_spans(own, 1);
        assert_eq!(report.connections_total, 1);
        nodes.assert_direct(&report);
    }
}

#[track_caller]
fn talk(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
with socket.create_connection(address, timeout=20) as server:
    say(server.getpeername()[0], server.getsockname()[0])
    for size in [1, 8, 48, 49, 1000, 16384, 16385, 100_000]:
        data = os.urandom(size)
        server.sendall(data)
        assert read(server, size) == data, size
say("echoed")
"#,
        port,
    );
    assert_eq!(output, "127.77.0.2 127.77.0.1\nechoed\n");
}

#[test]
fn streams_arrive_intact_in_both_directions_and_a_half_close_ends_one() {
    ALL_SETTINGS.map(Nodes::start_as).iter().for_each(stream_both_ways);
}

fn stream_both_ways(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
block = os.urandom(1 << 20)
with socket.create_connection(address, timeout=20) as server:
    sent = hashlib.sha256()
    def send():
        for turn in range(40):
            piece = block[turn:] + block[:turn]
            sent.update(piece)
            server.sendall(piece)
        server.shutdown(socket.SHUT_WR)
    sender = threading.Thread(target=send)
    sender.start()
    size, digest = read_all(server)
    sender.join()
say(size, digest == sent.hexdigest())
"#,
        port,
    );
    assert_eq!(output, format!("{} True\n", 40 << 20));
}

#[test]
fn many_connections_at_once_get_their_own_bytes() {
    many_connections(&Nodes::start());
}

#[test]
fn connections_without_a_free_span_use_the_proxies() {
    const SPANS: u64 = 3;
    const OTHERS: u64 = 47;
    let nodes = Nodes::start_as(Settings { spans: SPANS, ..DIRECT });
    let (_server, port) = nodes.serve(ECHO);
    let script = format!(
        r#"
def exchange(server, data):
    server.sendall(data)
    assert read(server, len(data)) == data
holders = [socket.create_connection(address, timeout=20) for _ in range({SPANS})]
is_held = True
def hold(server):
    while is_held:
        exchange(server, b"held")
threads = [threading.Thread(target=hold, args=(server,)) for server in holders]
[thread.start() for thread in threads]
sys.stdin.readline()
for number in range({OTHERS}):
    with socket.create_connection(address, timeout=20) as server:
        for turn in range(20):
            exchange(server, struct.pack("!II", number, turn) * (1 + number * turn))
is_held = False
[thread.join() for thread in threads]
say("done")
"#
    );
    let (client, mut input) = Process::start_with_input(&mut nodes.python(0, &script, port));
    for own in 0..2 {
        nodes.wait_for_report(own, "use of all spans", |report| report.direct_open == SPANS);
    }
    writeln!(input, "go on").expect("a client");
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "done\n");
    for own in 0..2 {
        let report = nodes.wait_for_free_spans(own, SPANS);
        assert_eq!(report.connections_total, SPANS + OTHERS);
        assert!(report.bytes_sent > 1_000_000, "{report:?}");
    }
    assert_eq!(nodes.report(0).direct_missed, OTHERS);
}

fn many_connections(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
def talk(number):
    with socket.create_connection(address, timeout=20) as server:
        for turn in range(20):
            data = struct.pack("!II", number, turn) * (1 + number * turn)
            server.sendall(data)
            assert read(server, len(data)) == data
        right.append(number)
right = []
def watched(number):
    try:
        talk(number)
    except Exception as error:
        say(number, repr(error))
threads = [threading.Thread(target=watched, args=(number,)) for number in range(50)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say(len(right))
"#,
        port,
    );
    assert_eq!(output, "50\n");
    assert_eq!(nodes.report(0).connections_total, 50);
}

#[test]
fn a_span_is_used_again_by_the_next_connection() {
    DIRECT_SETTINGS.map(|way| Nodes::start_as(Settings { spans: 1, ..way })).iter().for_each(use_again);
}

fn use_again(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    for turn in 1..=4 {
        nodes.connect_once(port);
        nodes.wait_for_free_spans(0, turn);
    }
}

/// Threads that block in every kind of wait are woken across the windows.
#[test]
fn waiters_on_another_node_are_woken_for_bytes_for_room_and_for_the_end() {
    DIRECT_SETTINGS.map(Nodes::start_as).iter().for_each(wake_sleepers);
}

fn wake_sleepers(nodes: &Nodes) {
    let (_server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
for turn in range(4):
    assert connection.recv(1) == b"?"
    time.sleep(0.05)
    connection.sendall(b"!")
time.sleep(0.3)
got = 0
while got < 4_000_000:
    got += len(connection.recv(1 << 20))
connection.sendall(b"all")
time.sleep(0.2)
connection.close()
time.sleep(60)
"#,
    );
    let output = nodes.client(
        r#"
import select
server = socket.create_connection(address, timeout=20)
def ask(wait):
    server.sendall(b"?")
    wait()
    assert server.recv(1) == b"!"
poll, epoll = select.poll(), select.epoll()
poll.register(server, select.POLLIN)
epoll.register(server, select.EPOLLIN | select.EPOLLET)
server.settimeout(None)
ask(lambda: None)
ask(lambda: poll.poll(20_000))
ask(lambda: epoll.poll(20))
ask(lambda: select.select([server], [], [], 20))
server.sendall(b"x" * 4_000_000)
assert server.recv(3) == b"all"
say(epoll.poll(20) != [], server.recv(1))
"#,
        port,
    );
    assert_eq!(output, "True b''\n");
    nodes.assert_direct(&nodes.report(0));
}

#[test]
fn a_connection_in_the_windows_is_shared_by_fork_and_ends_with_its_last_holder() {
    DIRECT_SETTINGS.map(Nodes::start_as).iter().for_each(share_by_fork);
}

fn share_by_fork(nodes: &Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
server = socket.create_connection(address, timeout=20)
server.sendall(b"parent")
assert server.recv(100) == b"parent"
child = os.fork()
if child == 0:
    time.sleep(0.1)
    server.sendall(b"child")
    os._exit(0 if server.recv(100) == b"child" else 1)
server.close()
say(os.waitpid(child, 0)[1])
"#,
        port,
    );
    assert_eq!(output, "0\n");
    nodes.assert_direct(&nodes.wait_for_free_spans(0, 1));
}

/// A program that has not noticed the loss of its link may still store into the other node's window.
#[test]
fn a_span_that_an_old_program_can_write_is_used_again_only_after_its_end() {
    for way in [DIRECT, WRITE_COMBINED, HALF_COMBINED] {
        let nodes = Nodes::start_as(Settings { spans: 1, ..way });
        if !nodes.is_forwarded {
            leave_span_to_old_program(nodes);
        }
    }
}

fn leave_span_to_old_program(mut nodes: Nodes) {
    let (server, port) = nodes.serve(ECHO);
    let sleeper = client_that("time.sleep(60)");
    let old = nodes.start_client(&sleeper, port, "connected");
    nodes.link_down();
    nodes.link_up_again();
    nodes.connect_once(port);
    let report = nodes.report(0);
    assert_eq!((report.direct_total, report.direct_missed), (1, 1));
    drop(old);
    // The server's endpoint of the old connection was reset; the span is free once the server has closed it.
    wait_until("use of the free span", || {
        nodes.connect_once(port);
        nodes.report(0).direct_total == 2
    });
    drop(server);
}

#[test]
fn connect_to_a_port_without_a_listener_is_refused() {
    let nodes = Nodes::start();
    let output = nodes.client(
        r#"
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    say("refused")
"#,
        port::free_port(),
    );
    assert_eq!(output, "refused\n");
    nodes.nodes[0].monitor.wait_for("refusal", |message| matches!(message, FromProxy::Refused { .. }));
}

/// The monitors of this test do not request permission, like those of a hostile node.
#[test]
fn access_rules_apply_to_connections_opened_without_a_request() {
    let nodes = Nodes::start_as(Settings { denies: true, ..BY_PROXIES });
    let (server, port) = nodes.serve(ECHO);
    let output = nodes.client(
        r#"
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    say("refused")
"#,
        port,
    );
    assert_eq!((output.as_str(), server.stdout().as_str()), ("refused\n", "listening\n"));
    let proxy = &nodes.nodes[1].proxy;
    proxy.wait_until("the offence", WAIT_MAX, |proxy| proxy.stderr().contains("node 0: opened without asking"));
}

#[test]
fn programs_with_ipv6_sockets_reach_another_node_by_its_mapped_address() {
    let nodes = Nodes::start();
    let (_server, port) = nodes.serve(
        r#"
listener = socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True)
say("listening")
connection, peer = listener.accept()
connection.sendall(peer[0].encode())
"#,
    );
    let output = nodes.client(
        r#"
with socket.socket(socket.AF_INET6) as server:
    server.connect(("::ffff:" + address[0], address[1]))
    say(server.getpeername()[0], server.getsockname()[0], server.recv(64).decode())
"#,
        port,
    );
    assert_eq!(output, "::ffff:127.77.0.2 ::ffff:127.77.0.1 ::ffff:127.77.0.1\n");
}

#[test]
fn redis_serves_another_node_through_windows_without_proxies() {
    const REQUESTS: u64 = 10_000;
    let nodes = Nodes::start_as(Settings { spans: 24, ..DIRECT });
    let folder = tempfile::tempdir().expect("a folder");
    let (host, port) = (SocketAddr::from((address(1), 0)).ip().to_string(), port::free_port().to_string());
    let mut server = nodes.run(1, "redis-server");
    server
        .args(["--bind", &host, "--port", &port, "--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir"])
        .arg(folder.path());
    let server = Process::start(&mut server);
    server.wait_until("redis", WAIT_MAX, |server| server.stdout().contains("Ready to accept"));
    let mut client = nodes.run(0, "redis-benchmark");
    client.args(["-h", &host, "-p", &port, "-t", "set,get", "-d", "64", "-c", "10"]);
    client.args(["-n", &REQUESTS.to_string(), "--csv"]);
    let finished = Process::start(&mut client).wait(WAIT_MAX).must_succeed();
    assert!(finished.stdout.contains("\"GET\"") && !finished.stderr.contains("rror"), "{finished}");
    let report = nodes.report(0);
    assert!(report.direct_total >= 10, "{report:?}");
    nodes.assert_direct(&report);
    let stat = nodes.nodes[1].rack.stat();
    let sent =
        stat.named("redis-server").filter_map(|process| process["totals"]["window_bytes_sent"].as_u64()).sum::<u64>();
    assert!(sent > REQUESTS * 64, "{sent} bytes through windows: {stat:?}");
}
