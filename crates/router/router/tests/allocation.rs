//! Packets cause no heap allocation, once queues and tables exist: neither on the fast path, nor when they are reported
//! by ICMP errors, dropped or sent to other nodes.

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::{EtherType, HEADER_BYTES, MacAddress, Repr};
use router::port::memory::{Destinations, Generator};
use router::{Config, DropReason, Forwarder, Hop, NodeId, Output, Packet, Pool, Port, PortConfig, PortId, Rib, Time};

const NODE: NodeId = NodeId(0);
const REMOTE: NodeId = NodeId(1);
const NOW: Time = Time::from_ns(1_000_000_000);

struct Node {
    forwarder: Forwarder,
    /// Keeps the writer of the tables alive.
    _rib: Rib,
    pool: Pool,
    output: Output,
    vector: Vec<Packet>,
}

fn mac(port: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, port])
}

/// Returns a node that receives at port 0; 10/8 is behind one neighbour on port 1, 11/8 and 2001:db8::/32 behind two,
/// and 12/8 behind node 1.
fn node() -> Node {
    let (mut rib, tables) = Rib::new().expect("memory for tables");
    let mut forwarder = Forwarder::new(Config::new(NODE), tables);
    let (mut pool, mut output) = (Pool::new(1024, 2048, 128), Output::new(512));
    for port in [0, 1] {
        let address: IpNet = format!("192.0.2.{}/31", port * 2).parse().expect("a network");
        let config = PortConfig::new(mac(port), 1500).with_addresses([address]);
        forwarder.set_port(NOW, PortId(port), config, &mut pool, &mut output).expect("a valid port");
    }
    let mut hops = Vec::new();
    for host in [1, 2] {
        let address = IpAddr::from([192, 0, 2, 100 + host]);
        let neighbour = MacAddress([2, 1, 0, 0, 0, host]);
        forwarder.learn_neighbour(NOW, PortId(1), address, neighbour, &mut pool, &mut output);
        let adjacency = forwarder.pin_adjacency(NOW, PortId(1), address, &mut pool, &mut output).expect("room");
        hops.push(Hop { node: NODE, port: PortId(1), adjacency });
    }
    // 198.18.0.0/15 is the route of ICMP errors to the senders.
    let routes =
        [("10.0.0.0/8", &hops[..1]), ("11.0.0.0/8", &hops), ("2001:db8::/32", &hops), ("198.18.0.0/15", &hops)];
    for (prefix, hops) in routes {
        rib.announce(NODE, prefix.parse().expect("a prefix"), 0, hops).expect("room");
    }
    let remote = Hop { node: REMOTE, ..hops[0] };
    rib.announce(REMOTE, "12.0.0.0/8".parse().expect("a prefix"), 0, &[remote]).expect("room");
    forwarder.set_remote_mtu(REMOTE, PortId(1), 1500);
    Node { forwarder, _rib: rib, pool, output, vector: Vec::with_capacity(256) }
}

impl Node {
    /// Processes a vector, and frees the packets that come out.
    fn process_vector(&mut self, generator: &mut Generator) {
        let Node { forwarder, pool, output, vector, .. } = self;
        generator.receive(pool, vector, 256).expect("memory does not fail");
        forwarder.ingress(NOW, PortId(0), vector, pool, output);
        for port in [0, 1] {
            generator.transmit(pool, output.to_port(PortId(port))).expect("memory does not fail");
        }
        output.to_node(REMOTE).drain(..).for_each(|routed| pool.free(routed.packet));
    }
}

fn generator(frame_bytes: &[usize], destinations: Destinations) -> Generator {
    let ethertype = if matches!(destinations, Destinations::V4(_)) { EtherType::IPV4 } else { EtherType::IPV6 };
    let mut ethernet = [0; HEADER_BYTES];
    Repr { destination: mac(0), source: MacAddress([2, 1, 0, 0, 0, 9]), ethertype }.emit(&mut ethernet);
    Generator::new(ethernet, frame_bytes, destinations)
}

#[test]
fn no_packet_causes_an_allocation() {
    let mut node = node();
    let v4 = |first: u32| Destinations::V4((0..1000).map(|host| (first << 24) + host * 7919).collect());
    let v6 = Destinations::V6((0..1000).map(|host| (0x2001_0db8 << 96) + host * 7919).collect());
    let mut cases = [
        ("one next hop", generator(&[60, 1514], v4(10))),
        ("two next hops", generator(&[60, 1514], v4(11))),
        ("another node", generator(&[60, 1514], v4(12))),
        ("IPv6", generator(&[60, 1514], v6)),
        ("no route: an error is sent or suppressed", generator(&[60], v4(13))),
        ("too long: an error is sent or suppressed", generator(&[1700], v4(10))),
        ("a martian", generator(&[60], v4(127))),
    ];
    for (what, generator) in &mut cases {
        // The first vector may allocate lazily.
        node.process_vector(generator);
        let counted = allocation_counter::measure(|| (0..8).for_each(|_| node.process_vector(generator)));
        assert_eq!(counted.count_total, 0, "allocations: {what}");
        assert_eq!(node.pool.available(), 1024, "buffers: {what}");
    }
    let counters = node.forwarder.counters();
    assert_eq!((counters.ports[0].received.packets, counters.to_nodes[1].packets), (7 * 9 * 256, 9 * 256));
    assert_eq!(counters.dropped(DropReason::MartianDestination), 9 * 256);
    assert!(counters.icmp_errors_sent > 0 && counters.ports[1].sent.packets >= 3 * 9 * 256);
}
