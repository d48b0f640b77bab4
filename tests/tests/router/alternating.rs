//! Large packets while filters appear and disappear, so that the kernel and the router forward in turns: streams go on,
//! their bytes are unchanged, and datagrams that the sender leaves to be segmented arrive as they were sent.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use system_tests::{WAIT_MAX, wait_until};

use crate::cluster::Lab;
use crate::filters::{nft, run, wait_for_path};
use crate::large::within;

/// The first port of `a` has a host that leaves segmentation and checksums to it, the second one takes no large
/// packets, and the interface of `b` has no offloads.
const FILE: &str = "version = 1\nname = \"alternating\"\n[interconnect]\nkind = \"lane\"\n\
    [[nodes]]\nname = \"a\"\nnamespace = \"NAMESPACE-a\"\n[[nodes.ports]]\ndevice = \"eth0\"\n\
    [[nodes.ports]]\ndevice = \"eth1\"\nkind = \"af-xdp\"\n\
    [[nodes]]\nname = \"b\"\nnamespace = \"NAMESPACE-b\"\n[[nodes.ports]]\ndevice = \"eth0\"\n";
/// A prime, so that its multiples are at different places of each packet.
const PATTERN_BYTES: usize = 65_537;
/// Bytes that must arrive after each change before the next one.
const PROGRESS_BYTES: u64 = 500_000;
const DATAGRAM_BYTES: usize = 1000;
const DATAGRAMS: usize = 20;
/// Sends one large packet of datagrams (`UDP_SEGMENT`), each of which consists of its number.
const SENDER: &str = "import socket, sys\n\
    to, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n\
    s = socket.socket(socket.AF_INET6 if ':' in to else socket.AF_INET, socket.SOCK_DGRAM)\n\
    s.setsockopt(17, 103, size)\n\
    s.sendto(b''.join(bytes([i]) * size for i in range(count)), (to, 7002))\n";

fn pattern() -> Vec<u8> {
    (0..PATTERN_BYTES as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn set_timeouts(stream: &TcpStream) {
    stream.set_read_timeout(Some(WAIT_MAX)).expect("a timeout");
    stream.set_write_timeout(Some(WAIT_MAX)).expect("a timeout");
}

/// Sends the pattern again and again until `is_over`.
fn send(mut stream: TcpStream, is_over: &AtomicBool) {
    set_timeouts(&stream);
    let pattern = pattern();
    while !is_over.load(Ordering::Relaxed) {
        stream.write_all(&pattern).expect("room");
    }
    stream.shutdown(std::net::Shutdown::Write).expect("a connection");
}

/// Compares what arrives with the pattern, and counts it.
fn receive(mut stream: TcpStream, arrived: &AtomicU64) {
    set_timeouts(&stream);
    let pattern = pattern().repeat(2);
    let mut buffer = vec![0; PATTERN_BYTES];
    let mut at = 0;
    loop {
        let bytes = stream.read(&mut buffer).expect("bytes in time");
        if bytes == 0 {
            return;
        }
        assert!(buffer[..bytes] == pattern[at..at + bytes], "bytes were changed");
        at = (at + bytes) % PATTERN_BYTES;
        arrived.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Connects two hosts.
fn connect(lab: &Lab, from: &str, to: &str, address: &str) -> (TcpStream, TcpStream) {
    let address = SocketAddr::new(address.parse().expect("an address"), 7001);
    let listener = within(lab, to, || TcpListener::bind(address).expect("a listener"));
    let client = within(lab, from, || TcpStream::connect_timeout(&address, WAIT_MAX).expect("a connection"));
    (client, listener.accept().expect("a connection").0)
}

/// Sends one large packet to a socket, and returns whether all of its datagrams have arrived, as they were sent.
#[track_caller]
fn datagrams_arrive(lab: &Lab, from: &str, socket: &UdpSocket, to: IpAddr) -> bool {
    let (size, count) = (DATAGRAM_BYTES.to_string(), DATAGRAMS.to_string());
    let mut sender = lab.at(from, "/usr/bin/python3");
    assert!(sender.args(["-c", SENDER, &to.to_string(), &size, &count]).status().expect("it runs").success());
    socket.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    let mut numbers = Vec::new();
    let mut buffer = [0; 2 * DATAGRAM_BYTES];
    while numbers.len() < DATAGRAMS {
        match socket.recv(&mut buffer) {
            Ok(bytes) => {
                assert!(bytes == DATAGRAM_BYTES && buffer[..bytes].iter().all(|byte| *byte == buffer[0]), "{bytes} B");
                numbers.push(buffer[0]);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return false,
            Err(error) => panic!("{error}"),
        }
    }
    numbers.into_iter().map(usize::from).eq(0..DATAGRAMS)
}

#[test]
fn streams_go_on_while_kernel_and_router_forward_in_turns() {
    let test = "streams_go_on_while_kernel_and_router_forward_in_turns";
    let Some(lab) = Lab::new(test, &["a", "b", "h1", "h2", "h3"]) else { return };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("a", "eth1"), ("h2", "eth0"), 2);
    lab.join(("b", "eth0"), ("h3", "eth0"), 3);
    within(&lab, "b", || router_ports::disable_offloads("eth0").expect("offloads"));
    lab.write(FILE);
    lab.up();
    lab.wait_for_route("a", "10.77.3.2", Some("b"));
    lab.wait_for_route("b", "10.77.1.2", Some("a"));
    let pairs =
        [("h1", "h3", "10.77.3.2"), ("h3", "h1", "fd77:1::2"), ("h1", "h2", "10.77.2.2"), ("h2", "h3", "10.77.3.2")];
    let connections = pairs.map(|(from, to, address)| connect(&lab, from, to, address));
    let (is_over, arrived) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 4]);
    let sockets = ["10.77.3.2", "fd77:3::2"].map(|address| {
        let address: IpAddr = address.parse().expect("an address");
        (within(&lab, "h3", || UdpSocket::bind((address, 7002)).expect("a socket")), address)
    });
    thread::scope(|scope| {
        for ((client, server), arrived) in connections.into_iter().zip(&arrived) {
            scope.spawn(|| send(client, &is_over));
            scope.spawn(move || receive(server, arrived));
        }
        // Ends the streams also if a check fails.
        let _over = crate::large::Over(&is_over);
        let check = |what: &str| {
            for (arrived, pair) in arrived.iter().zip(pairs) {
                let before = arrived.load(Ordering::Relaxed);
                wait_until(&format!("bytes of {pair:?} after {what}"), || {
                    arrived.load(Ordering::Relaxed) > before + PROGRESS_BYTES
                });
            }
            for (socket, address) in &sockets {
                wait_until(&format!("datagrams after {what}"), || datagrams_arrive(&lab, "h1", socket, *address));
            }
        };
        check("the start");
        for round in 0..2 {
            for (index, node) in ["a", "b"].into_iter().enumerate() {
                nft(&lab, node, "forward", "tcp dport 9 drop");
                wait_for_path(&lab, index, "kernel");
                check(&format!("a filter at {node} in round {round}"));
            }
            for (index, node) in ["a", "b"].into_iter().enumerate() {
                run(&lab, node, "nft delete table inet t");
                wait_for_path(&lab, index, "router");
                check(&format!("its removal at {node} in round {round}"));
            }
        }
    });
    lab.finish("down", &[]).must_succeed();
}
