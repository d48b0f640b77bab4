//! Arbitrary input to a router at its ports, from its kernel or from other nodes: no panic, no lost buffer, and sent
//! packets have valid headers and fit their links. The fast path and the slow path, which traced packets take, behave
//! the same.
#![no_main]

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::Duration;

use arbitrary::Arbitrary;
use ipnet::IpNet;
use libfuzzer_sys::fuzz_target;
use packet::ethernet::{HEADER_BYTES, MacAddress};
use packet::ipv4;
use router::{
    AdjacencyId, Config, Counters, Filter, Forwarder, Hop, Limits, NodeId, Output, Packet, Pool, PortConfig, PortId,
    Rate, Rib, RoutedPacket, Tables, Time, Vlan,
};

const NODE: NodeId = NodeId(0);
const REMOTE: NodeId = NodeId(1);
const BUFFERS: u32 = 64;
const BUFFER_BYTES: u16 = 2048;
const HEADROOM_BYTES: u16 = 128;
const STEPS_MAX: usize = 16;

#[derive(Arbitrary, Debug)]
enum Step<'a> {
    /// A complete frame.
    Frame {
        port: u8,
        bytes: &'a [u8],
    },
    /// The payload of a frame that is addressed to the router.
    Packet {
        port: u8,
        is_v6: bool,
        tag: Option<u16>,
        fix_checksum: bool,
        bytes: &'a [u8],
    },
    Kernel {
        fix_checksum: bool,
        bytes: &'a [u8],
    },
    Egress {
        node: u8,
        port: u8,
        adjacency: u16,
        bytes: &'a [u8],
    },
    Neighbour {
        port: u8,
        is_v6: bool,
        host: u8,
        mac: [u8; 6],
    },
    Pin {
        port: u8,
        is_v6: bool,
        host: u8,
    },
    Unpin {
        adjacency: u16,
    },
    Port {
        port: u8,
        mtu_bytes: u16,
        is_up: bool,
        has_kernel: bool,
        probes: bool,
    },
    Remote {
        port: u8,
        mtu_bytes: u16,
        is_up: bool,
    },
    Wait {
        ms: u16,
    },
}

thread_local! {
    /// Creating nodes takes long, so that the same two process all inputs, and are reset before each. No step writes
    /// the tables.
    static NODES: RefCell<Nodes> = RefCell::new(Nodes::new());
}

static NETWORKS: LazyLock<[[IpNet; 2]; 3]> = LazyLock::new(|| {
    let parsed = |text: String| text.parse().expect("a network");
    [0, 1, 2].map(|port| [format!("10.0.{port}.1/24"), format!("2001:db8:{port}::1/64")].map(parsed))
});

fn network(port: u8) -> [IpNet; 2] {
    NETWORKS[usize::from(port)]
}

fn host(port: u8, is_v6: bool, host: u8) -> IpAddr {
    match is_v6 {
        true => IpAddr::from([0x2001, 0xdb8, u16::from(port), 0, 0, 0, 0, u16::from(host)]),
        false => IpAddr::from([10, 0, port, host]),
    }
}

fn mac(port: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, port])
}

fn tables() -> (Rib, Tables) {
    let (mut rib, tables) = Rib::new().expect("memory for tables");
    let mut route = |prefix: IpNet, hops: &[Hop]| rib.announce(hops[0].node, prefix, 0, hops).expect("room");
    for port in 0..3 {
        for network in network(port) {
            route(network, &[Hop::on_link(NODE, PortId(port))]);
            let own = if port == 0 { Hop::router(NODE) } else { Hop::kernel(NODE) };
            route(network.addr().into(), &[own]);
        }
    }
    let hop = |node, adjacency| Hop { node, port: PortId(1), adjacency: AdjacencyId(adjacency) };
    for (prefix, hops) in [
        ("11.0.0.0/8", vec![hop(NODE, 1), hop(NODE, 2), hop(NODE, 3)]),
        ("12.0.0.0/8", vec![hop(REMOTE, 1)]),
        ("2001:db8:12::/48", vec![hop(REMOTE, 1)]),
        ("13.0.0.0/8", vec![Hop::BLACKHOLE]),
        ("14.0.0.0/8", vec![Hop::PROHIBITED]),
        ("14.1.0.0/16", vec![Hop::NO_ROUTE]),
        ("2001:db8:15::/48", vec![Hop::kernel(REMOTE)]),
    ] {
        let node = hops[0].node;
        rib.announce(node, prefix.parse().expect("a prefix"), 0, &hops).expect("room");
    }
    (rib, tables)
}

struct Node {
    forwarder: Forwarder,
    pool: Pool,
    output: Output,
    now: Time,
    /// Whether packets must be valid; those from other nodes need not be.
    is_valid: bool,
}

/// The output of a step: frames by port, packets by node and to the kernel.
type Out = Vec<(u16, Vec<u8>)>;

impl Node {
    fn new(tables: Tables) -> Node {
        let rate = Rate { per_second: 100, burst: 8 };
        let limits = Limits {
            neighbours_max: 12,
            neighbours_incomplete_max: 4,
            pending_packets_of_neighbour_max: 3,
            pending_packets_max: 6,
            solicitations: rate,
            learned: rate,
            icmp_errors: rate,
            redirects: rate,
            replies: rate,
        };
        let forwarder = Forwarder::new(Config { limits, ..Config::new(NODE) }, tables);
        let pool = Pool::new(BUFFERS, BUFFER_BYTES, HEADROOM_BYTES);
        Node { forwarder, pool, output: Output::new(8), now: Time::ZERO, is_valid: true }
    }

    /// Resets the node to its initial state, so that each input is reproducible in isolation.
    fn reset(&mut self, filter: Option<Filter>) {
        self.forwarder.reset();
        (self.now, self.is_valid) = (Time::from_ns(1_000_000_000), true);
        self.output.events_lost = false;
        for port in 0..3 {
            self.set_port(port, 1500, true, port != 0, false);
        }
        self.forwarder.set_remote_mtu(REMOTE, PortId(1), 1000);
        self.forwarder.trace(filter);
        self.output.events.clear();
    }

    fn set_port(&mut self, port: u8, mtu_bytes: u16, is_up: bool, has_kernel: bool, probes: bool) {
        // The third port is a VLAN of the second.
        let vlan = (port == 2).then_some(Vlan { parent: PortId(1), id: 5 });
        let config = PortConfig { is_up, has_kernel, probes, vlan, ..PortConfig::new(mac(port.min(1)), mtu_bytes) };
        let config = config.with_addresses(network(port));
        let Node { forwarder, pool, output, now, .. } = self;
        let _ = forwarder.set_port(*now, PortId(port), config, pool, output);
    }

    fn packet(&mut self, bytes: &[u8]) -> Vec<Packet> {
        let bytes_max = self.pool.bytes_max();
        self.pool.alloc_copy(&bytes[..bytes.len().min(bytes_max)]).into_iter().collect()
    }

    fn process(&mut self, step: &Step<'_>) {
        match *step {
            Step::Frame { port, bytes } => {
                let mut frames = self.packet(bytes);
                let Node { forwarder, pool, output, now, .. } = self;
                forwarder.ingress(*now, PortId(port % 3), &mut frames, pool, output);
            }
            Step::Packet { port, is_v6, tag, fix_checksum, bytes } => {
                let mut frames = self.packet(&framed(port % 2, is_v6, tag, fix_checksum, bytes));
                let Node { forwarder, pool, output, now, .. } = self;
                forwarder.ingress(*now, PortId(port % 2), &mut frames, pool, output);
            }
            Step::Kernel { fix_checksum, bytes } => {
                let mut packets = self.packet(&with_checksum(bytes, fix_checksum));
                let Node { forwarder, pool, output, now, .. } = self;
                forwarder.from_kernel(*now, &mut packets, pool, output);
            }
            Step::Egress { node, port, adjacency, bytes } => {
                self.is_valid = false;
                let hop = Hop { node: NodeId(node % 9), port: PortId(port), adjacency: AdjacencyId(adjacency) };
                let routed = |packet| RoutedPacket { hop, flow: 0, packet };
                let mut packets: Vec<RoutedPacket> = self.packet(bytes).into_iter().map(routed).collect();
                let Node { forwarder, pool, output, now, .. } = self;
                forwarder.egress(*now, &mut packets, pool, output);
            }
            _ => self.control(step),
        }
    }

    fn control(&mut self, step: &Step<'_>) {
        if let Step::Port { port, mtu_bytes, is_up, has_kernel, probes } = *step {
            return self.set_port(port % 3, mtu_bytes, is_up, has_kernel, probes);
        }
        let Node { forwarder, pool, output, now, .. } = self;
        match *step {
            Step::Neighbour { port, is_v6, host: number, mac } => {
                let address = host(port % 3, is_v6, number);
                forwarder.learn_neighbour(*now, PortId(port % 3), address, MacAddress(mac), pool, output);
            }
            Step::Pin { port, is_v6, host: number } => {
                let _ = forwarder.pin_adjacency(*now, PortId(port % 3), host(port % 3, is_v6, number), pool, output);
            }
            Step::Unpin { adjacency } => forwarder.unpin_adjacency(*now, AdjacencyId(adjacency % 16), pool, output),
            Step::Remote { port, mtu_bytes, is_up } => {
                forwarder.set_remote_mtu(REMOTE, PortId(port % 3), mtu_bytes);
                forwarder.set_node_up(REMOTE, is_up);
            }
            Step::Wait { ms } => {
                *now = *now + Duration::from_millis(u64::from(ms));
                forwarder.poll(*now, pool, output);
            }
            _ => {}
        }
    }

    fn out(&mut self) -> Out {
        let Node { pool, output, .. } = self;
        let mut out = Out::new();
        let mut take = |from: u16, packet: Packet| {
            out.push((from, pool.bytes(&packet).to_vec()));
            pool.free(packet);
        };
        for (port, queue) in output.to_ports.iter_mut().enumerate() {
            queue.drain(..).for_each(|packet| take(port as u16, packet));
        }
        for (node, queue) in output.to_nodes.iter_mut().enumerate() {
            queue.drain(..).for_each(|routed| take(0x100 + node as u16, routed.packet));
        }
        output.to_kernel.drain(..).for_each(|packet| take(0x200, packet));
        output.events.clear();
        output.traced.clear();
        out
    }

    /// Removes all ports, which frees all queued packets, and returns the counters.
    fn end(&mut self) -> Counters {
        for port in 0..3 {
            let Node { forwarder, pool, output, now, .. } = self;
            forwarder.remove_port(*now, PortId(port), pool, output);
        }
        self.out();
        assert_eq!(self.pool.available(), BUFFERS as usize, "all buffers are free");
        self.forwarder.counters().clone()
    }
}

struct Nodes {
    fast: Node,
    slow: Node,
    /// Keeps the writer of the tables alive.
    _rib: Rib,
}

impl Nodes {
    fn new() -> Nodes {
        let (rib, tables) = tables();
        Nodes { fast: Node::new(tables.clone()), slow: Node::new(tables), _rib: rib }
    }
}

fn with_checksum(bytes: &[u8], fix_checksum: bool) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if fix_checksum && let Ok(mut packet) = ipv4::Packet::new_checked(&mut bytes[..]) {
        packet.fill_checksum();
    }
    bytes
}

fn framed(port: u8, is_v6: bool, tag: Option<u16>, fix_checksum: bool, bytes: &[u8]) -> Vec<u8> {
    let mut frame = mac(port).0.to_vec();
    frame.extend([2, 1, 0, 0, 0, 1]);
    if let Some(tag) = tag {
        frame.extend([0x81, 0]);
        frame.extend(tag.to_be_bytes());
    }
    frame.extend(if is_v6 { [0x86, 0xdd] } else { [0x08, 0x00] });
    frame.extend(with_checksum(bytes, fix_checksum));
    frame
}

fn check(out: &Out, is_valid: bool) {
    for (to, bytes) in out.iter().filter(|(to, _)| *to < 0x100) {
        assert!(bytes.len() > HEADER_BYTES && bytes[6..12] == mac(*to as u8).0, "{bytes:02x?}");
        let offset = if bytes[12..14] == [0x81, 0] { HEADER_BYTES + 4 } else { HEADER_BYTES };
        if is_valid && bytes[offset - 2..offset] == [0x08, 0x00] {
            let packet = ipv4::Packet::new_checked(&bytes[offset..]).expect("a valid header");
            assert!(packet.verify_checksum() && packet.ttl() > 0, "{bytes:02x?}");
        }
    }
}

fuzz_target!(|steps: Vec<Step<'_>>| {
    NODES.with_borrow_mut(|Nodes { fast, slow, .. }| {
        fast.reset(None);
        slow.reset(Some(Filter::all(u32::MAX)));
        for step in steps.iter().take(STEPS_MAX) {
            fast.process(step);
            slow.process(step);
            let out = fast.out();
            check(&out, fast.is_valid);
            assert_eq!(out, slow.out(), "{step:02x?}");
        }
        assert_eq!(fast.end(), slow.end());
    });
});
