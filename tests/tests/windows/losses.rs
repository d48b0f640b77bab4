//! Servers, proxies and links that are lost while programs are connected, without failover.

use control::proxy::{FromProxy, ToProxy};
use fabric::{Link, train_both};
use rustix::process::Signal;
use system_tests::script::{CLIENT, ECHO, client_that};
use system_tests::{Process, WAIT_MAX};

use super::nodes::{ALL_SETTINGS, BY_PROXIES, Nodes, Settings};

#[test]
fn a_server_that_is_killed_ends_its_connections_as_the_kernel_would() {
    ALL_SETTINGS.map(Nodes::start_as).iter().for_each(kill_server);
}

fn kill_server(nodes: &Nodes) {
    let (server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(CLIENT, port, "connected");
    drop(server);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nend\n");
    // With unread bytes, TCP resets. The server answers once they have arrived: bytes in flight are not unread.
    let (server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
connection.sendall(connection.recv(5))
connection.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL)
connection.sendall(b"!")
time.sleep(60)
"#,
    );
    let unread = r#"server.sendall(b"unread"); assert server.recv(1) == b"!"; say("connected")"#;
    let script = CLIENT.replace(r#"say("connected")"#, unread);
    let client = nodes.start_client(&script, port, "connected");
    drop(server);
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
}

#[test]
fn a_proxy_that_is_killed_resets_connections_at_both_nodes() {
    ALL_SETTINGS.map(Nodes::start_as).iter().for_each(kill_proxy);
}

fn kill_proxy(nodes: &Nodes) {
    let (server, port) = nodes.serve(
        r#"
listener = listen()
connection, peer = listener.accept()
connection.sendall(connection.recv(5))
say(outcome(connection))
"#,
    );
    let client = nodes.start_client(CLIENT, port, "connected");
    nodes.nodes[1].proxy.signal(Signal::KILL);
    assert_eq!(server.wait(WAIT_MAX).must_succeed().stdout, "listening\nreset\n");
    // The monitor notices and takes the link down.
    nodes.nodes[0].monitor.send(&nodes.nodes[0].link_down_for_good());
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.nodes[0].monitor.wait_for("stop", |message| matches!(message, FromProxy::Stopped { peer: 1, .. }));
}

#[test]
fn a_link_that_goes_down_resets_and_carries_new_connections_once_it_is_up_again() {
    let trained = Settings { trains_partitions: true, ..BY_PROXIES };
    ALL_SETTINGS.into_iter().chain([trained]).map(Nodes::start_as).for_each(|mut nodes| lose_link(&mut nodes));
}

fn lose_link(nodes: &mut Nodes) {
    let (_server, port) = nodes.serve(ECHO);
    let client = nodes.start_client(CLIENT, port, "connected");
    nodes.link_down();
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "connected\nreset\n");
    nodes.link_up_again();
    (0..3).for_each(|_| nodes.connect_once(port));
}

/// The other proxy is informed of the link only when a program already waits.
#[test]
fn programs_that_connect_before_the_other_proxy_has_started_wait_for_it() {
    let mut nodes = Nodes::start();
    let (_server, port) = nodes.serve(ECHO);
    // From here on the proxy has a remote listener for the server.
    nodes.connect_once(port);
    let connects_early = |nodes: &mut Nodes| {
        nodes.link_down();
        let [a, b] = &mut nodes.nodes[..] else { unreachable!() };
        assert!(train_both(&mut a.link, &mut b.link));
        a.monitor.send(&ToProxy::LinkUp { peer: 1, epoch: a.link.epoch().0 });
        let proxy = a.proxy.pid();
        let descriptors = || std::fs::read_dir(format!("/proc/{proxy}/fd")).expect("it runs").count();
        let before = descriptors();
        let client = Process::start(&mut nodes.python(0, &client_that("pass"), port));
        client.wait_until("a program at the proxy", WAIT_MAX, |_| descriptors() > before);
        let b = &nodes.nodes[1];
        b.monitor.send(&ToProxy::LinkUp { peer: 0, epoch: b.link.epoch().0 });
        client.wait(WAIT_MAX).stdout == "connected\n"
    };
    // A program's wait is bounded, and on a busy machine the test may be delayed for longer.
    assert!((0..5).any(|_| connects_early(&mut nodes)), "refused each time");
}

#[test]
fn a_broken_link_is_reported_to_the_monitor() {
    for trains_partitions in [true, false] {
        let mut nodes = Nodes::start_as(Settings { trains_partitions, ..BY_PROXIES });
        // After a connection, both proxies have started.
        let (_server, port) = nodes.serve(ECHO);
        nodes.connect_once(port);
        let epoch = nodes.nodes[1].link.epoch().0;
        nodes.nodes[1].link.take_down();
        let is_reported = |message: &FromProxy| match message {
            FromProxy::Broken { peer: 1, epoch: of, .. } => trains_partitions && *of == epoch,
            FromProxy::PeerLeft { peer: 1, epoch: of } => !trains_partitions && *of == epoch,
            _ => false,
        };
        nodes.nodes[0].monitor.wait_for("loss", is_reported);
    }
}

/// Measures the time from the message that the link is lost until a program sees the reset, without failover. Asserts
/// nothing about the time.
#[test]
#[ignore = "reports times: run it on an idle machine"]
fn resets_after_a_lost_link_are_measured() {
    let mut times_us = Vec::new();
    for _ in 0..20 {
        let nodes = Nodes::start();
        let (_server, port) = nodes.serve(ECHO);
        let script = client_that("say(outcome(server), time.monotonic_ns())");
        let client = nodes.start_client(&script, port, "connected");
        // Long enough for all threads to block.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let lost = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        nodes.nodes[0].monitor.send(&nodes.nodes[0].link_down_for_good());
        let output = client.wait(WAIT_MAX).must_succeed().stdout;
        let seen_ns: i64 = output.trim().rsplit_once("reset ").expect("a reset").1.parse().expect("a time");
        times_us.push((seen_ns - lost.tv_sec * 1_000_000_000 - lost.tv_nsec) / 1000);
    }
    times_us.sort_unstable();
    let (half, most) = (times_us[times_us.len() / 2], times_us[times_us.len() - 1]);
    println!("from LinkDown to ECONNRESET: p50 {half} us, max {most} us, of {} losses", times_us.len());
}
