//! Streams whose segments stay together through a cluster: between ports that take large packets and ports that do not,
//! with several MTUs. What arrives is what was sent, and no frame is longer than the link allows.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use router::{Pool, Port};
use router_ports::{Interface, Namespace, PacketSocket};
use serde_json::Value;
use system_tests::{WAIT_MAX, wait_until};

use crate::cluster::Lab;

/// Port 0 of each node takes large packets. The link of `b` has a shorter MTU, and its interface has no offloads.
const MIXED: &str = r#"version = 1
name = "mixed"

[interconnect]
kind = "INTERCONNECT"

[[nodes]]
name = "a"
namespace = "NAMESPACE-a"

[[nodes.ports]]
device = "eth0"

[[nodes.ports]]
device = "eth1"
kind = "af-xdp"

[[nodes]]
name = "b"
namespace = "NAMESPACE-b"

[[nodes.ports]]
device = "eth0"

[[nodes.ports]]
device = "tap0"
kind = "tap"
addresses = ["10.77.9.1/24", "fd77:9::1/64"]
"#;
const STREAM_BYTES: usize = 2_000_000;
const SHORT_MTU_BYTES: usize = 1400;
const FRAME_HEADER_BYTES: usize = 14;

pub fn within<T: Send>(lab: &Lab, at: &str, run: impl FnOnce() -> T + Send) -> T {
    let path = PathBuf::from("/run/netns").join(lab.namespace(at));
    Namespace::at(&path).and_then(|namespace| namespace.within(run)).expect("a namespace")
}

/// Sends a stream and receives the same bytes back; both are compared.
fn stream(lab: &Lab, from: &str, (to, address): (&str, IpAddr), seed: u32) {
    let mut state = seed;
    let mut random = || {
        // Numerical Recipes' generator; its upper bits are random enough.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let sent: Vec<u8> = (0..STREAM_BYTES).map(|_| random()).collect();
    let address = SocketAddr::new(address, 7000);
    let listener = within(lab, to, || TcpListener::bind(address).expect("a listener"));
    let mut client = within(lab, from, || TcpStream::connect_timeout(&address, WAIT_MAX).expect("a connection"));
    let (mut server, _) = listener.accept().expect("a connection");
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(WAIT_MAX)).expect("a timeout");
        stream.set_write_timeout(Some(WAIT_MAX)).expect("a timeout");
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut received = vec![0; STREAM_BYTES];
            server.read_exact(&mut received).expect("the stream");
            assert!(received == sent, "{from} to {to}: bytes were changed");
            server.write_all(&received).expect("room");
        });
        client.write_all(&sent).expect("room");
        let mut received = vec![0; STREAM_BYTES];
        client.read_exact(&mut received).expect("the stream");
        assert!(received == sent, "{to} to {from}: bytes were changed");
    });
}

/// Ends the capture when it is dropped, also if the test fails.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Receives the frames that arrive at an interface until `is_over`, and returns their lengths.
fn capture(device: &str, is_over: &AtomicBool) -> HashSet<usize> {
    let mut port = PacketSocket::open(&Interface::by_name(device).expect("an interface")).expect("a socket");
    let mut pool = Pool::with_large(64, 2048, 64, 4);
    let (mut into, mut lengths) = (Vec::new(), HashSet::new());
    while !is_over.load(Ordering::Relaxed) {
        if port.receive(&mut pool, &mut into, 64).expect("frames") == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        lengths.extend(into.drain(..).map(|packet| {
            let bytes = packet.len();
            pool.free(packet);
            bytes
        }));
    }
    assert_eq!(port.losses().receive_unusable, 0);
    lengths
}

#[test]
fn streams_cross_ports_of_all_kinds_unchanged_and_in_frames_that_fit() {
    let Some(lab) = Lab::new(
        "streams_cross_ports_of_all_kinds_unchanged_and_in_frames_that_fit",
        &["a", "b", "h1", "h2", "h3", "h9"],
    ) else {
        return;
    };
    lab.join(("a", "eth0"), ("h1", "eth0"), 1);
    lab.join(("a", "eth1"), ("h2", "eth0"), 2);
    lab.join(("b", "eth0"), ("h3", "eth0"), 3);
    for at in ["b", "h3"] {
        lab.ip(at, &["link", "set", "eth0", "mtu", &SHORT_MTU_BYTES.to_string()]);
    }
    // As behind another router, senders do not know this MTU: they learn it by ICMP.
    lab.ip("h3", &["route", "change", "default", "via", "10.77.3.1", "metric", "3", "advmss", "1460"]);
    for at in ["b", "h3"] {
        within(&lab, at, || router_ports::disable_offloads("eth0").expect("offloads"));
    }
    for interconnect in ["lane", "rnic-lane"] {
        lab.write(&MIXED.replace("INTERCONNECT", interconnect));
        lab.up();
        lab.ip("b", &["link", "set", "tap0", "netns", &lab.namespace("h9")]);
        for words in [
            &["link", "set", "tap0", "up"][..],
            &["address", "add", "10.77.9.2/24", "dev", "tap0"],
            &["route", "add", "default", "via", "10.77.9.1"],
        ] {
            lab.ip("h9", words);
        }
        let tentative = || lab.node(1)["ports"][1]["addresses_tentative"].clone();
        wait_until("addresses in use", || tentative() == Value::Array(Vec::new()));
        lab.wait_for_route("a", "10.77.3.2", Some("b"));
        lab.wait_for_route("a", "10.77.9.2", Some("b"));
        lab.wait_for_route("b", "10.77.1.2", Some("a"));
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let over = Over(&is_over);
            let captured = scope.spawn(|| within(&lab, "h3", || capture("eth0", &is_over)));
            let [h1, h2, h3, h9] = [1, 2, 3, 9].map(|network| IpAddr::from([10, 77, network, 2]));
            stream(&lab, "h1", ("h2", h2), 1);
            stream(&lab, "h1", ("h3", h3), 2);
            stream(&lab, "h3", ("h2", h2), 3);
            stream(&lab, "h9", ("h1", h1), 4);
            stream(&lab, "h2", ("h9", h9), 5);
            stream(&lab, "h1", ("h3", "fd77:3::2".parse().expect("an address")), 6);
            drop(over);
            let longest = captured.join().expect("frames").into_iter().max();
            // The longest leaves no room for another 8 bytes, which options of TCP may take.
            let link = SHORT_MTU_BYTES + FRAME_HEADER_BYTES;
            assert!(longest.is_some_and(|bytes| (link - 8..=link).contains(&bytes)), "{longest:?}");
        });
        lab.finish("down", &[]).must_succeed();
    }
}
