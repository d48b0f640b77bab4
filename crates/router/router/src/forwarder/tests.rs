//! A forwarder between simulated hosts: two ports with one IPv4 and one IPv6 network each.

mod claims;
mod cluster;
mod forwarding;
mod hostile;
mod icmp;
mod large;
mod neighbours;
mod transit;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use packet::ethernet::{EtherType, FRAME_BYTES_MIN, HEADER_BYTES, MacAddress};
use packet::{Protocol, ipv4, ipv6};

use super::Forwarder;
use crate::{Config, DropReason, Event, Hop, NodeId, Output, Pool, PortConfig, PortId, Rib, Time};

const NODE: NodeId = NodeId(0);
const PORTS: [PortId; 2] = [PortId(0), PortId(1)];
const MTU_BYTES: u16 = 1500;
const BUFFERS: u32 = 512;

/// Returns the router's address on the network of `port`.
fn own_v4(port: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, port, 1)
}

fn own_v6(port: u8) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, u16::from(port), 0, 0, 0, 0, 1)
}

/// Returns the address of a host on the network of `port`.
fn host_v4(port: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, port, host)
}

fn host_v6(port: u8, host: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, u16::from(port), 0, 0, 0, 0, host)
}

fn own_mac(port: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, port])
}

fn host_mac(port: u8, host: u8) -> MacAddress {
    MacAddress([2, 1, 0, 0, port, host])
}

/// A forwarder with the parts that its node provides.
struct Testbed {
    forwarder: Forwarder,
    rib: Rib,
    pool: Pool,
    output: Output,
    now: Time,
}

impl Testbed {
    /// Creates a testbed with two ports without a kernel.
    fn new() -> Testbed {
        Testbed::with(|config| config)
    }

    /// Creates a testbed with modified port configurations.
    fn with(change: impl Fn(PortConfig) -> PortConfig) -> Testbed {
        let (rib, tables) = Rib::new().expect("memory for tables");
        let forwarder = Forwarder::new(Config::new(NODE), tables);
        let pool = Pool::new(BUFFERS, 2048, 128);
        let now = Time::from_ns(1_000_000_000);
        let mut bed = Testbed { forwarder, rib, pool, output: Output::new(256), now };
        for port in PORTS {
            let networks = [IpNet::new(own_v4(port.0).into(), 24), IpNet::new(own_v6(port.0).into(), 64)];
            let networks = networks.map(|network| network.expect("a prefix length"));
            let config = change(PortConfig::new(own_mac(port.0), MTU_BYTES).with_addresses(networks));
            bed.set_port(port, config.clone());
            let own = if config.has_kernel { Hop::kernel(NODE) } else { Hop::router(NODE) };
            for network in networks {
                bed.route(network, &[Hop::on_link(NODE, port)]);
                bed.route(network.addr().into(), &[own]);
            }
        }
        bed
    }

    fn set_port(&mut self, port: PortId, config: PortConfig) {
        let Testbed { forwarder, pool, output, .. } = self;
        forwarder.set_port(self.now, port, config, pool, output).expect("a valid port");
    }

    fn route(&mut self, prefix: IpNet, hops: &[Hop]) {
        self.rib.announce(hops[0].node, prefix, 0, hops).expect("a valid route");
    }

    /// Adds a neighbour, in state stale.
    fn learn(&mut self, port: u8, address: IpAddr, mac: MacAddress) {
        let Testbed { forwarder, pool, output, now, .. } = self;
        forwarder.learn_neighbour(*now, PortId(port), address, mac, pool, output);
    }

    /// Adds all hosts to which tests send.
    fn learn_hosts(&mut self) {
        for port in [0, 1] {
            self.learn(port, host_v4(port, 2).into(), host_mac(port, 2));
            self.learn(port, host_v6(port, 2).into(), host_mac(port, 2));
        }
        self.output.events.clear();
    }

    fn receive(&mut self, port: u8, frame: &[u8]) {
        self.receive_all(port, &[frame.to_vec()]);
    }

    fn receive_all(&mut self, port: u8, frames: &[Vec<u8>]) {
        let Testbed { forwarder, pool, output, now, .. } = self;
        let mut packets = frames.iter().map(|frame| pool.alloc_copy(frame).expect("a buffer")).collect();
        forwarder.ingress(*now, PortId(port), &mut packets, pool, output);
        assert!(packets.is_empty(), "all packets are consumed");
    }

    fn wait(&mut self, span: Duration) {
        let Testbed { forwarder, pool, output, now, .. } = self;
        *now = *now + span;
        forwarder.poll(*now, pool, output);
    }

    /// Drains the transmit queue of a port.
    fn sent(&mut self, port: u8) -> Vec<Vec<u8>> {
        let Testbed { pool, output, .. } = self;
        let taken = output.to_port(PortId(port)).drain(..).map(|packet| {
            let frame = pool.bytes(&packet).to_vec();
            pool.free(packet);
            frame
        });
        taken.collect()
    }

    /// Drains the transmit queue of a port, which must have exactly one frame.
    fn sent_one(&mut self, port: u8) -> Vec<u8> {
        let mut frames = self.sent(port);
        assert_eq!(frames.len(), 1, "frames of port {port}: {frames:02x?}, drops {:?}", self.drops());
        frames.remove(0)
    }

    fn received_by_kernel(&mut self) -> Vec<Vec<u8>> {
        let Testbed { pool, output, .. } = self;
        let taken = output.to_kernel.drain(..).map(|packet| {
            let bytes = pool.bytes(&packet).to_vec();
            pool.free(packet);
            bytes
        });
        taken.collect()
    }

    fn events(&mut self) -> Vec<Event> {
        self.output.events.drain(..).collect()
    }

    fn dropped(&self, reason: DropReason) -> u64 {
        self.forwarder.counters().dropped(reason)
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        DropReason::ALL.iter().map(|reason| (*reason, self.dropped(*reason))).filter(|(_, count)| *count > 0).collect()
    }

    /// Asserts that the frame is dropped for this reason, nothing is sent, and no buffer leaks.
    fn assert_dropped(&mut self, port: u8, frame: &[u8], reason: DropReason) {
        let before = self.dropped(reason);
        self.receive(port, frame);
        assert_eq!(self.dropped(reason), before + 1, "{reason}: {:?}", self.drops());
        assert_eq!((self.sent(0).len(), self.sent(1).len(), self.received_by_kernel().len()), (0, 0, 0), "{reason}");
        self.assert_no_leak();
    }

    /// Asserts that all buffers are free.
    fn assert_no_leak(&self) {
        assert_eq!(self.pool.available(), BUFFERS as usize, "all buffers are free");
    }
}

fn framed(to: MacAddress, from: MacAddress, ethertype: EtherType, payload: &[u8]) -> Vec<u8> {
    let header = packet::ethernet::Repr { destination: to, source: from, ethertype };
    let mut frame = vec![0; HEADER_BYTES];
    header.emit(&mut frame);
    frame.extend_from_slice(payload);
    frame.resize(frame.len().max(FRAME_BYTES_MIN), 0);
    frame
}

/// A UDP packet without a checksum, by default from host 2 on the network of port 0 to host 2 on that of port 1.
#[derive(Clone)]
struct V4 {
    header: ipv4::Repr,
    options: Vec<u8>,
    payload: Vec<u8>,
}

impl V4 {
    fn new() -> V4 {
        let payload = vec![0x13, 0x88, 0x13, 0x89, 0, 12, 0, 0, b'd', b'a', b't', b'a'];
        let header = ipv4::Repr {
            source: host_v4(0, 2),
            destination: host_v4(1, 2),
            protocol: Protocol::UDP,
            ttl: 64,
            traffic_class: 0,
            identification: 0x1234,
            do_not_fragment: false,
            payload_bytes: payload.len(),
        };
        V4 { header, options: Vec::new(), payload }
    }

    fn to(destination: Ipv4Addr) -> V4 {
        V4::with(|header| header.destination = destination)
    }

    fn with(change: impl FnOnce(&mut ipv4::Repr)) -> V4 {
        let mut packet = V4::new();
        change(&mut packet.header);
        packet
    }

    fn payload(mut self, payload: Vec<u8>) -> V4 {
        self.payload = payload;
        self
    }

    fn options(mut self, options: &[u8]) -> V4 {
        self.options = options.to_vec();
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let header_bytes = ipv4::HEADER_BYTES + self.options.len();
        let mut bytes = vec![0; ipv4::HEADER_BYTES];
        ipv4::Repr { payload_bytes: self.payload.len(), ..self.header }.emit(&mut bytes);
        bytes[0] = 0x40 | (header_bytes / 4) as u8;
        bytes.extend_from_slice(&self.options);
        bytes.extend_from_slice(&self.payload);
        let total = bytes.len() as u16;
        bytes[2..4].copy_from_slice(&total.to_be_bytes());
        with_checksum(&mut bytes);
        bytes
    }

    /// Returns the frame in which host 2 sends the packet to port 0.
    fn frame(&self) -> Vec<u8> {
        framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &self.bytes())
    }
}

/// Stores the correct header checksum.
fn with_checksum(bytes: &mut [u8]) {
    ipv4::Packet::new_checked(bytes).expect("a valid header").fill_checksum();
}

/// The same for IPv6.
#[derive(Clone)]
struct V6 {
    header: ipv6::Repr,
    payload: Vec<u8>,
}

impl V6 {
    fn new() -> V6 {
        let header = ipv6::Repr {
            source: host_v6(0, 2),
            destination: host_v6(1, 2),
            next_header: Protocol::UDP,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            payload_bytes: 0,
        };
        V6 { header, payload: V4::new().payload }
    }

    fn to(destination: Ipv6Addr) -> V6 {
        V6::with(|header| header.destination = destination)
    }

    fn with(change: impl FnOnce(&mut ipv6::Repr)) -> V6 {
        let mut packet = V6::new();
        change(&mut packet.header);
        packet
    }

    fn payload(mut self, payload: Vec<u8>) -> V6 {
        self.payload = payload;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; ipv6::HEADER_BYTES];
        ipv6::Repr { payload_bytes: self.payload.len(), ..self.header }.emit(&mut bytes);
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    fn frame(&self) -> Vec<u8> {
        framed(own_mac(0), host_mac(0, 2), EtherType::IPV6, &self.bytes())
    }
}

/// Returns the IPv4 packet in a frame that the router sent, and asserts that it is valid.
fn v4_of(frame: &[u8]) -> ipv4::Packet<&[u8]> {
    assert_eq!(frame[12..14], EtherType::IPV4.0.to_be_bytes(), "{frame:02x?}");
    let packet = ipv4::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a valid packet");
    assert!(packet.verify_checksum(), "{frame:02x?}");
    packet
}

fn v6_of(frame: &[u8]) -> ipv6::Packet<&[u8]> {
    assert_eq!(frame[12..14], EtherType::IPV6.0.to_be_bytes(), "{frame:02x?}");
    ipv6::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a valid packet")
}
