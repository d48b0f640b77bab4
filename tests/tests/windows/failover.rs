//! Connections that survive the loss of their link over kernel TCP.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;

use control::proxy::PeerReport;
use rustix::process::Signal;
use system_tests::script::{CLIENT, ECHO, client_that};
use system_tests::{Process, WAIT_MAX, port};

use super::nodes::{BY_PROXIES, Nodes, Settings, address};

/// A client with streams in both directions that continue until shortly after a file exists; prints whether all bytes
/// came back.
const STREAMS: &str = r#"
go_on = sys.argv[3]
block = os.urandom(1 << 20)
def talk(number):
    sent, received = hashlib.sha256(), []
    with socket.create_connection(address, timeout=60) as server:
        reader = threading.Thread(target=lambda: received.append(read_all(server)))
        reader.start()
        total, left = 0, 20
        while left:
            piece = block[total % 1000:][:100_000 + number]
            server.sendall(piece)
            sent.update(piece)
            total += len(piece)
            if total < 3_000_000:
                continue
            started.add(number)
            if os.path.exists(go_on):
                left -= 1
            else:
                time.sleep(0.001)
        server.shutdown(socket.SHUT_WR)
        reader.join()
    right.append(received == [(total, sent.hexdigest())])
right, started = [], set()
threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
[thread.start() for thread in threads]
while len(started) < 3:
    time.sleep(0.01)
say("streaming")
[thread.join() for thread in threads]
say(right)
"#;

/// Starts the streams of [`STREAMS`] to an echo server on node b and waits until bytes flow.
fn start_streams(nodes: &Nodes, port: u16, go_on: &Path) -> Process {
    let client = Process::start(nodes.python(0, STREAMS, port).arg(go_on));
    client.wait_until("streaming", WAIT_MAX, |client| client.stdout().contains("streaming"));
    client
}

#[test]
fn connections_survive_their_link_over_kernel_tcp_and_new_ones_use_the_link_again() {
    let mut nodes = Nodes::start_as(Settings { is_failover: true, ..BY_PROXIES });
    let (_server, port) = nodes.serve(ECHO);
    let idle = nodes.start_client(&client_that(EXCHANGE_LATER), port, "connected");
    let folder = tempfile::tempdir().expect("a folder");
    let go_on = folder.path().join("go on");
    let client = start_streams(&nodes, port, &go_on);
    // Bytes that a program has sent may still be in its lane.
    nodes.wait_for_report(0, "bytes through the windows", |report| report.bytes_sent > 3_000_000);
    nodes.link_down();
    let both_ways = |report: &PeerReport| report.failover_bytes_sent.min(report.failover_bytes_received) > 1_000_000;
    let moved = nodes.wait_for_report(0, "bytes over TCP", both_ways);
    assert_eq!((moved.failover_open, moved.failover_total, moved.failover_resets), (4, 4, 0));
    assert!(moved.bytes_sent > 3_000_000, "bytes through windows are counted separately: {moved:?}");
    nodes.link_up_again();
    for _ in 0..3 {
        nodes.connect_once(port);
    }
    let are_over = |report: &PeerReport| report.connections_total >= 7 && report.connections_open == 0;
    let report = nodes.wait_for_report(0, "new connections, and their ends", are_over);
    assert_eq!(report.failover_total, 4, "new ones use the link");
    // Again: connections over TCP stay there, and the others move there too.
    nodes.link_down();
    nodes.link_up_again();
    std::fs::write(&go_on, "").expect("a file");
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "streaming\n[True, True, True]\n");
    assert_eq!(idle.wait(WAIT_MAX).must_succeed().stdout, "connected\nback\n");
    let end = nodes.wait_for_report(0, "all over", |report| report.failover_open == 0);
    assert_eq!((end.failover_total, end.failover_resets), (4, 0));
}

/// An exchange over a connection long after it moved.
const EXCHANGE_LATER: &str = r#"
    time.sleep(2)
    server.sendall(b"again")
    assert read(server, 5) == b"again"
    say("back")"#;

#[test]
fn connections_are_reset_when_the_other_proxy_is_dead_or_tcp_breaks_too() {
    let failover_port = port::free_port();
    let settings = Settings { is_failover: true, failover_port: Some(failover_port), ..BY_PROXIES };
    let mut nodes = Nodes::start_as(settings);
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(CLIENT, port, "connected");
    must_drop_unauthenticated(failover_port);
    nodes.link_down();
    nodes.wait_for_report(0, "a connection over TCP", |report| report.failover_open == 1);
    must_drop_unauthenticated(failover_port);
    nodes.link_up_again();
    let later = nodes.start_client(CLIENT, port, "connected");
    nodes.nodes[1].proxy.signal(Signal::KILL);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.nodes[0].monitor.send(&nodes.nodes[0].link_down_for_good());
    assert_eq!(later.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.wait_for_report(0, "resets", |report| report.failover_resets == 2 && report.failover_open == 0);
    // The other proxy is dead, so this one did not wait for it.
    let output = nodes.nodes[0].proxy.stderr();
    let why = "1 connections of a lost link are reset: no TCP connection to 127.77.0.2:";
    assert!(output.contains(why) && !output.contains("did not come within"), "{output}");
}

/// No proxy can connect to it, so neither waits.
#[test]
fn connections_are_reset_at_once_when_a_proxy_listens_nowhere() {
    // The port belongs to another program.
    let taken = TcpListener::bind((Ipv4Addr::from(address(0)), 0)).expect("a port");
    let failover_port = Some(taken.local_addr().expect("an address").port());
    let mut nodes = Nodes::start_as(Settings { is_failover: true, failover_port, ..BY_PROXIES });
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(CLIENT, port, "connected");
    nodes.link_down();
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    for (node, who) in nodes.nodes.iter().zip(["this node's proxy", "its proxy"]) {
        let why = format!("1 connections of a lost link are reset: {who} listens nowhere");
        node.proxy.wait_until(&why, WAIT_MAX, |proxy| proxy.stderr().contains(&why));
    }
}

/// Panics unless node a's proxy closes connections without the token of a link, and sends them nothing.
fn must_drop_unauthenticated(port: u16) {
    // Valid but for the token.
    let forged = [u64::from_le_bytes(*b"clresum1"), 1, 1, 3, 4].map(u64::to_le_bytes).concat();
    for handshake in [vec![0; 40], forged, b"GET / HTTP/1.1\r\n\r\n and so on, for long".to_vec()] {
        let mut client = TcpStream::connect((Ipv4Addr::from(address(0)), port)).expect("a proxy that listens");
        client.set_read_timeout(Some(WAIT_MAX)).expect("a limit");
        client.write_all(&handshake).expect("a proxy that receives");
        // An end or a reset, and no byte.
        assert!(!matches!(client.read(&mut [0; 1]), Ok(1)));
    }
}
