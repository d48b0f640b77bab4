//! The fast path: vector packet processing, as in VPP. A vector of packets passes through one stage after the other, so
//! that the code of a stage stays in the instruction cache and the cache misses of different packets overlap. Exception
//! packets leave for the slow path.

use std::vec::Drain;

use packet::checksum;
use packet::ethernet::{EtherType, Frame, HEADER_BYTES};
use packet::flow;
use packet::{ipv4, ipv6, vlan};

use fib::GroupId;

use super::vector::{SLOW_PATH, Stage, StageProbe, VECTOR_PACKETS_MAX, Vector, Vectors};
use super::{Context, Forwarder, Origin, PortState};
use crate::counters::DropReason;
use crate::local_addresses::{LocalAddresses, is_special_v4, is_special_v6};
use crate::output::Output;
use crate::trace::flow_of;
use crate::{Hop, NODES_MAX, NodeId, PORTS_MAX, Packet, Pool, PortId, Time, TransitPath};

/// An IP version, as far as the stages depend on it.
trait Family {
    type Address: Copy + Default;
    const ETHERTYPE: EtherType;

    fn lookup_batch(tables: &fib::Tables<Hop>, addresses: &[Self::Address], groups: &mut [Option<GroupId>]);

    /// Returns the symmetric hash of a packet's flow.
    fn flow_hash(packet: &[u8]) -> u32;

    /// Decrements the TTL or hop limit. Returns false, and changes nothing, if the packet must take the slow path: its
    /// TTL expires, or it has IPv4 options.
    fn decrement_ttl(packet: &mut [u8]) -> bool;
}

struct V4;

impl Family for V4 {
    type Address = u32;
    const ETHERTYPE: EtherType = EtherType::IPV4;

    #[inline(always)]
    fn lookup_batch(tables: &fib::Tables<Hop>, addresses: &[u32], groups: &mut [Option<GroupId>]) {
        tables.v4.lookup_batch(addresses, groups);
    }

    #[inline(always)]
    fn flow_hash(packet: &[u8]) -> u32 {
        flow_hash_v4(packet)
    }

    #[inline(always)]
    fn decrement_ttl(packet: &mut [u8]) -> bool {
        let Some(header) = packet.first_chunk_mut::<{ ipv4::HEADER_BYTES }>() else { return false };
        if header[8] <= 1 || header[0] != VERSION_IHL {
            return false;
        }
        let old = u16::from_be_bytes([header[8], header[9]]);
        let sum = u16::from_be_bytes([header[10], header[11]]);
        let sum = checksum::update(sum, old, old - 0x100).to_be_bytes();
        header[8] -= 1;
        header[10..12].copy_from_slice(&sum);
        true
    }
}

struct V6;

impl Family for V6 {
    type Address = u128;
    const ETHERTYPE: EtherType = EtherType::IPV6;

    #[inline(always)]
    fn lookup_batch(tables: &fib::Tables<Hop>, addresses: &[u128], groups: &mut [Option<GroupId>]) {
        tables.v6.lookup_batch(addresses, groups);
    }

    #[inline(always)]
    fn flow_hash(packet: &[u8]) -> u32 {
        flow_hash_v6(packet)
    }

    #[inline(always)]
    fn decrement_ttl(packet: &mut [u8]) -> bool {
        let Some(header) = packet.first_chunk_mut::<{ ipv6::HEADER_BYTES }>() else { return false };
        if header[7] <= 1 {
            return false;
        }
        header[7] -= 1;
        true
    }
}

/// What the stages need from the headers of a packet of the fast path.
struct FastPacket {
    destination: Destination,
    /// Length of the IP packet in bytes, without padding of the frame.
    bytes: usize,
    /// Tag control information of the VLAN tag, if any.
    tag: Option<u16>,
}

enum Destination {
    V4(u32),
    V6(u128),
}

const TYPE_V4: u16 = EtherType::IPV4.0;
const TYPE_V6: u16 = EtherType::IPV6.0;
const TYPE_VLAN: u16 = EtherType::VLAN.0;
/// First byte of an IPv4 header without options: version 4, 20 bytes.
const VERSION_IHL: u8 = 0x45;
const MAC_MASK: u64 = (1 << 48) - 1;

impl Forwarder {
    /// Processes frames that a port received, and leaves `frames` empty.
    pub fn ingress(&mut self, now: Time, port: PortId, frames: &mut Vec<Packet>, pool: &mut Pool, output: &mut Output) {
        self.ingress_probed(now, port, frames, pool, output, &mut ());
    }

    /// Like [`Forwarder::ingress`], with a probe that observes the ends of stages.
    pub fn ingress_probed<P: StageProbe>(
        &mut self,
        now: Time,
        port: PortId,
        frames: &mut Vec<Packet>,
        pool: &mut Pool,
        output: &mut Output,
        probe: &mut P,
    ) {
        let mut ctx = Context { now, pool, output };
        if self.port_config(port).is_none_or(|config| !config.is_up) {
            for frame in frames.drain(..) {
                self.counters.drops.add(DropReason::PortDown, frame.on_wire(HEADER_BYTES).0);
                ctx.pool.free(frame);
            }
            return;
        }
        let mut vectors = self.vectors.take().expect("the vectors are put back below");
        while !frames.is_empty() {
            let count = frames.len().min(VECTOR_PACKETS_MAX);
            self.vector(&mut ctx, port, frames.drain(..count), &mut vectors, probe);
        }
        self.vectors = Some(vectors);
        self.run_neighbour_actions(&mut ctx);
    }

    /// Runs one vector through all stages.
    fn vector<P: StageProbe>(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        frames: Drain<'_, Packet>,
        vectors: &mut Vectors,
        probe: &mut P,
    ) {
        let count = frames.len();
        self.parse(ctx, port, frames, vectors);
        probe.mark(Stage::Parse, count);
        let slow = vectors.slow.len();
        if slow > 0 {
            for frame in vectors.slow.drain(..) {
                self.receive_frame(ctx, frame, port);
            }
            self.run_neighbour_actions(ctx);
            probe.mark(Stage::Slow, slow);
        }
        let Vectors { v4, v6, .. } = vectors;
        self.forward_vector::<V4, P>(ctx, v4, count, probe);
        self.forward_vector::<V6, P>(ctx, v6, count, probe);
    }

    /// Runs the stages behind parsing on the packets of one IP version; `count` is the size of the whole vector.
    fn forward_vector<F: Family, P: StageProbe>(
        &mut self,
        ctx: &mut Context<'_>,
        vector: &mut Vector<F::Address>,
        count: usize,
        probe: &mut P,
    ) {
        if vector.packets.is_empty() {
            return;
        }
        let (mtus, node, packets) = (&*self.mtus, self.config.node, vector.packets.len());
        self.tables.read(|tables| {
            lookup::<F>(tables, vector);
            probe.mark(Stage::Lookup, packets);
            rewrite::<F>(tables, mtus, node, ctx.pool, vector);
            probe.mark(Stage::Rewrite, packets);
        });
        self.enqueue::<F>(ctx, vector);
        probe.mark(Stage::Enqueue, count);
    }

    /// Classifies frames: packets of the fast path go into the vector of their IP version, others aside.
    #[inline(never)] // Profilers attribute instructions to the stage by its symbol.
    fn parse(&mut self, ctx: &mut Context<'_>, port: PortId, frames: Drain<'_, Packet>, vectors: &mut Vectors) {
        let state = &self.ports[usize::from(port.0)];
        let is_traced = self.trace.is_some();
        let is_diverted = self.transit != TransitPath::Router;
        let (mut count, mut bytes_total) = (0, 0);
        for mut packet in frames {
            let frame = ctx.pool.bytes(&packet);
            let (packets, bytes) = packet.on_wire(HEADER_BYTES);
            (count, bytes_total) = (count + packets, bytes_total + bytes);
            if is_diverted || is_traced && self.is_traced_frame(frame) {
                vectors.slow.push(packet);
                continue;
            }
            let found = classify(frame, state, &self.local)
                .and_then(|found| Some((state.port_of_tag(port, found.tag)?, found)));
            let Some(((port_of, header_bytes), found)) = found else {
                vectors.slow.push(packet);
                continue;
            };
            if port_of != port {
                self.counters.ports[usize::from(port_of.0)].received.add(packet.on_wire(usize::from(header_bytes)));
            }
            ctx.pool.trim(&mut packet, header_bytes, found.bytes);
            match found.destination {
                Destination::V4(destination) => vectors.v4.push(packet, port_of, destination),
                Destination::V6(destination) => vectors.v6.push(packet, port_of, destination),
            }
        }
        self.counters.ports[usize::from(port.0)].received.add((count, bytes_total));
    }

    /// Returns whether the trace filter matches the packet in the frame.
    fn is_traced_frame(&self, frame: &[u8]) -> bool {
        let Some(filter) = &self.trace else { return false };
        let network = Frame::new_checked(frame).and_then(|frame| frame.network_header());
        network.is_ok_and(|network| flow_of(&frame[network.offset..]).is_some_and(|flow| filter.matches(&flow)))
    }

    /// Places packets in transmit queues, in the order of their arrival.
    #[inline(never)] // Profilers attribute instructions to the stage by its symbol.
    fn enqueue<F: Family>(&mut self, ctx: &mut Context<'_>, vector: &mut Vector<F::Address>) {
        let is_traced = self.trace.is_some();
        for (at, mut packet) in vector.packets.drain(..).enumerate() {
            let (hop, port) = (vector.hops[at % VECTOR_PACKETS_MAX], vector.ports[at % VECTOR_PACKETS_MAX]);
            if hop.port == port && hop.node == self.config.node {
                self.redirect(ctx, &packet, port, hop);
            }
            if hop == SLOW_PATH {
                self.take_slow_path(ctx, packet, port);
            } else if is_traced || !self.prepare_transmit(ctx, &mut packet, hop, F::ETHERTYPE) {
                self.dispatch(ctx, packet, hop, vector.flows[at % VECTOR_PACKETS_MAX]);
            } else {
                let queue = &mut ctx.output.to_ports[usize::from(hop.port.0 % PORTS_MAX)];
                queue.push_back(packet);
            }
        }
    }

    /// Passes a packet to the slow path. Packets with IPv4 options have not been validated yet.
    fn take_slow_path(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        let first = ctx.pool.bytes(&packet).first();
        if first.is_some_and(|first| first >> 4 == 4 && *first != VERSION_IHL) {
            self.receive_ip(ctx, packet, Origin::Port(port));
        } else {
            self.forward(ctx, packet, Origin::Port(port), None);
        }
    }

    /// Prepends the Ethernet header if the hop leads to a ready adjacency of an untagged local port whose transmit
    /// queue has room, and the packet is not a large one. Returns whether it did; the caller then queues the packet.
    #[inline(always)]
    fn prepare_transmit(&mut self, ctx: &mut Context<'_>, packet: &mut Packet, hop: Hop, ethertype: EtherType) -> bool {
        if hop.node != self.config.node || packet.is_large() {
            return false;
        }
        let ready = self.neighbours.adjacencies().get(usize::from(hop.adjacency.0));
        let Some(header) = ready.and_then(|ready| ready.untagged(hop.port, ethertype)) else { return false };
        let port = usize::from(hop.port.0 % PORTS_MAX);
        let has_room = ctx.output.to_ports[port].len() < ctx.output.queue_packets_max;
        if !has_room || !ctx.pool.prepend(packet, &header) {
            return false;
        }
        self.counters.ports[port].sent.add(packet.on_wire(0));
        true
    }
}

/// MTUs by node and port.
type Mtus = [[u16; 256]; NODES_MAX as usize];

impl PortState {
    /// Returns the port to which frames with this tag belong, and the number of bytes before their IP packet.
    #[inline(always)]
    fn port_of_tag(&self, port: PortId, tag: Option<u16>) -> Option<(PortId, u16)> {
        let Some(tag) = tag else { return Some((port, HEADER_BYTES as u16)) };
        let (_, of) = self.vlans.iter().find(|(id, _)| *id == tag & 0xfff)?;
        Some((*of, (HEADER_BYTES + vlan::HEADER_BYTES) as u16))
    }
}

/// Classifies a frame. Returns `None` for exception packets: everything except valid IP packets to this port between
/// forwardable addresses. Of IPv4 packets with options only the lengths are checked.
#[inline(always)]
fn classify(frame: &[u8], state: &PortState, local: &LocalAddresses) -> Option<FastPacket> {
    let head = frame.first_chunk::<{ HEADER_BYTES + vlan::HEADER_BYTES }>()?;
    let [a, b, c, d, e, f, g, h, ..] = *head;
    if u64::from_le_bytes([a, b, c, d, e, f, g, h]) & MAC_MASK != state.mac_word {
        return None;
    }
    match u16::from_be_bytes([head[12], head[13]]) {
        TYPE_V4 => classify_v4(&frame[HEADER_BYTES..], local, None),
        TYPE_V6 => classify_v6(&frame[HEADER_BYTES..], local, None),
        TYPE_VLAN if !state.vlans.is_empty() => classify_tagged(frame, local),
        _ => None,
    }
}

/// Classifies a frame with a VLAN tag.
fn classify_tagged(frame: &[u8], local: &LocalAddresses) -> Option<FastPacket> {
    const BYTES: usize = HEADER_BYTES + vlan::HEADER_BYTES;
    let head = frame.first_chunk::<BYTES>()?;
    let tag = Some(u16::from_be_bytes([head[14], head[15]]));
    match u16::from_be_bytes([head[16], head[17]]) {
        TYPE_V4 => classify_v4(&frame[BYTES..], local, tag),
        TYPE_V6 => classify_v6(&frame[BYTES..], local, tag),
        _ => None,
    }
}

#[inline(always)]
fn classify_v4(ip: &[u8], local: &LocalAddresses, tag: Option<u16>) -> Option<FastPacket> {
    let header = ip.first_chunk::<{ ipv4::HEADER_BYTES }>()?;
    let (words, _) = header.as_chunks::<4>();
    let bytes = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let (source, destination) = (u32::from_be_bytes(words[3]), u32::from_be_bytes(words[4]));
    // A ones' complement sum does not depend on the byte order, as long as all words have the same one.
    let sum: u64 = words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum();
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let is_fast = header[0] == VERSION_IHL
        && (ipv4::HEADER_BYTES..=ip.len()).contains(&bytes)
        && sum == 0xffff
        && !is_special_v4(source)
        && !is_special_v4(destination)
        && !local.may_have_v4(source);
    // A packet with options takes the slow path from within the vector, so that its flow stays in order.
    let has_options = || {
        let header_bytes = usize::from(header[0] & 0xf) * 4;
        (0x46..=0x4f).contains(&header[0]) && (header_bytes..=ip.len()).contains(&bytes)
    };
    (is_fast || has_options()).then_some(FastPacket { destination: Destination::V4(destination), bytes, tag })
}

#[inline(always)]
fn classify_v6(ip: &[u8], local: &LocalAddresses, tag: Option<u16>) -> Option<FastPacket> {
    let header = ip.first_chunk::<{ ipv6::HEADER_BYTES }>()?;
    let (addresses, _) = header[8..].as_chunks::<16>();
    let payload_bytes = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let bytes = ipv6::HEADER_BYTES + payload_bytes;
    let (source, destination) = (u128::from_be_bytes(addresses[0]), u128::from_be_bytes(addresses[1]));
    let is_fast = header[0] >> 4 == 6
        && bytes <= ip.len()
        // Hop-by-hop options and a payload length of 0: a jumbogram (RFC 2675), or malformed.
        && (payload_bytes > 0 || header[6] != 0)
        && !is_special_v6(source)
        && !is_special_v6(destination)
        && !local.may_have_v6(source);
    is_fast.then_some(FastPacket { destination: Destination::V6(destination), bytes, tag })
}

#[inline(never)] // Profilers attribute instructions to the stage by its symbol.
fn lookup<F: Family>(tables: &fib::Tables<Hop>, vector: &mut Vector<F::Address>) {
    let count = vector.packets.len();
    F::lookup_batch(tables, &vector.addresses[..count], &mut vector.groups[..count]);
}

/// Selects a hop of a group, by the flow hash if there are several. Also returns the flow hash if the hop is at another
/// node, which needs it too.
#[inline(always)]
fn select_hop(tables: &fib::Tables<Hop>, group: GroupId, node: NodeId, flow: impl Fn() -> u32) -> Option<(Hop, u32)> {
    let mut known = None;
    let hop = tables.groups.select_by(group, || *known.get_or_insert_with(&flow))?;
    let flow = if hop.node == node { 0 } else { known.unwrap_or_else(flow) };
    Some((hop, flow))
}

#[inline(never)] // Profilers attribute instructions to the stage by its symbol.
fn rewrite<F: Family>(
    tables: &fib::Tables<Hop>,
    mtus: &Mtus,
    node: NodeId,
    pool: &mut Pool,
    vector: &mut Vector<F::Address>,
) {
    let Vector { packets, groups, hops, flows, .. } = vector;
    for (((packet, group), hop), flow) in packets.iter().zip(&groups[..]).zip(&mut hops[..]).zip(&mut flows[..]) {
        let bytes = pool.bytes_mut(packet);
        *hop = SLOW_PATH;
        let chosen = group.and_then(|group| select_hop(tables, group, node, || F::flow_hash(bytes)));
        let Some((chosen, flow_hash)) = chosen else { continue };
        let mtu_bytes = mtus[usize::from(chosen.node.0 % NODES_MAX)][usize::from(chosen.port.0)];
        if packet.ip_bytes_max() <= usize::from(mtu_bytes) && F::decrement_ttl(bytes) {
            (*hop, *flow) = (chosen, flow_hash);
        }
    }
}

/// Seed of flow hashes: the same at every node, so that both directions of a flow take the same path.
const FLOW_SEED: u64 = 0;

#[inline]
pub(super) fn flow_hash_v4(bytes: &[u8]) -> u32 {
    ipv4::Packet::new_checked(bytes).map_or(0, |packet| flow::hash_v4(&packet, FLOW_SEED))
}

#[inline]
pub(super) fn flow_hash_v6(bytes: &[u8]) -> u32 {
    ipv6::Packet::new_checked(bytes).map_or(0, |packet| flow::hash_v6(&packet, FLOW_SEED))
}
