//! Compares runs with listed losses with reference models that share no code with the simulator: which packet is sent
//! when, to the picosecond, and for the engine's go-back-N in which order.

use std::cell::RefCell;
use std::rc::Rc;

use netsim::endpoint::Flow;
use netsim::impairment::{Impairments, Loss};
use netsim::network::{Network, NetworkConfig, PacketTap, TapDirection, TappedPacket};
use netsim::rate::LinkRate;
use netsim::rdma::{RdmaConfig, RdmaEndpoint};
use netsim::sliding_window::{SlidingWindow, SlidingWindowConfig, SlidingWindowHeader};
use netsim::topology::{HostId, NetworkLink, NetworkNode, Topology};
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::wire::{Header, Psn};
use sim::{Random, Span, Time};

/// At 100 Gb/s.
const PS_PER_BYTE: u64 = 80;
const DELAY_PS: u64 = 1_000_000;
const PAYLOAD: u64 = 1000;
/// Preamble, Ethernet, IPv4, UDP and this transport's header.
const DATA_BYTES: u64 = PAYLOAD + 82;
const ACK_BYTES: u64 = 84;
const TIMEOUT_PS: u64 = 50_000_000;

fn config(lost: &[u64]) -> NetworkConfig {
    let rate = LinkRate::from_gbps(100.0).unwrap();
    let link =
        NetworkLink { ends: [0, 1].map(|host| NetworkNode::Host(HostId(host))), rate, delay: Span::from_ps(DELAY_PS) };
    let loss = Impairments { loss: Loss::Listed(lost.to_vec()), ..Impairments::default() };
    let topology = Topology::new(2, 0, vec![link]).unwrap();
    NetworkConfig { impairments: vec![(0, 0, loss)], ..NetworkConfig::new(topology, 1) }
}

fn flow(packets: u64) -> Vec<Flow> {
    vec![Flow::new(Time::ZERO, HostId(0), HostId(1), packets * PAYLOAD)]
}

/// What the first host sent: the time in picoseconds and the packet's number.
#[derive(Clone, Default)]
struct Log(Rc<RefCell<Vec<(u64, u32)>>>);

impl PacketTap<SlidingWindowHeader> for Log {
    fn observe(&mut self, packet: &TappedPacket<'_, SlidingWindowHeader>) {
        if packet.direction == TapDirection::Sent && packet.from == HostId(0) {
            self.0.borrow_mut().push((packet.at.ps(), packet.header.number));
        }
    }
}

impl PacketTap<Header> for Log {
    fn observe(&mut self, packet: &TappedPacket<'_, Header>) {
        let header = packet.header;
        if packet.direction == TapDirection::Sent && packet.from == HostId(0) && header.payload_bytes > 0 {
            self.0.borrow_mut().push((packet.at.ps(), header.psn.get()));
        }
    }
}

/// A naive model of the sliding window's sender: whenever its link is idle, it evaluates the full history.
fn window_reference(packets: u32, window: usize, lost: &[u64]) -> Vec<(u64, u32)> {
    let mut sends: Vec<(u64, u32)> = Vec::new();
    // By send: when its acknowledgement arrives, if it does.
    let mut acks: Vec<Option<u64>> = Vec::new();
    let (mut now, mut ack_link_free) = (0, 0);
    loop {
        let arrived = |number: u32, now: u64| {
            sends.iter().zip(&acks).any(|((_, sent), ack)| *sent == number && ack.is_some_and(|at| at <= now))
        };
        if (0..packets).all(|number| arrived(number, now)) {
            return sends;
        }
        let last_send = |number: u32| sends.iter().rev().find(|(_, sent)| *sent == number).map(|(at, _)| *at);
        let first_send = |number: u32| sends.iter().find(|(_, sent)| *sent == number).map(|(at, _)| *at);
        // A packet is lost when one three later has been acknowledged, which is checked once, or after its time-out.
        let overtaken_at = |number: u32| {
            let later = sends.iter().zip(&acks).filter(|((_, sent), _)| *sent >= number + 3);
            later.filter_map(|(_, ack)| *ack).min().filter(|at| *at <= now)
        };
        let is_lost = |number: u32| {
            let (Some(first), Some(last)) = (first_send(number), last_send(number)) else { return None };
            if arrived(number, now) {
                return None;
            }
            let timed_out = (last + TIMEOUT_PS <= now).then_some(last + TIMEOUT_PS);
            let overtaken = overtaken_at(number).filter(|at| first == last && last < *at);
            [timed_out, overtaken].into_iter().flatten().min()
        };
        let known_lost: Vec<(u64, u32)> =
            (0..packets).filter_map(|number| is_lost(number).map(|at| (at, number))).collect();
        let in_flight = (0..packets)
            .filter(|number| last_send(*number).is_some() && !arrived(*number, now) && is_lost(*number).is_none())
            .count();
        let new = (0..packets).find(|number| last_send(*number).is_none());
        let next = known_lost.iter().min().map(|(_, number)| *number).or(new);
        if let Some(number) = next.filter(|_| in_flight < window) {
            let is_lost_on_link = lost.contains(&(sends.len() as u64));
            sends.push((now, number));
            now += DATA_BYTES * PS_PER_BYTE;
            let here = now + DELAY_PS;
            acks.push((!is_lost_on_link).then(|| {
                ack_link_free = here.max(ack_link_free) + ACK_BYTES * PS_PER_BYTE;
                ack_link_free + DELAY_PS
            }));
            continue;
        }
        let timeouts = (0..packets).filter(|number| !arrived(*number, now)).filter_map(last_send);
        let wakes = timeouts.map(|at| at + TIMEOUT_PS).chain(acks.iter().flatten().copied());
        now = wakes.filter(|at| *at > now).min().expect("an event is pending");
    }
}

#[test]
fn the_sliding_window_sends_each_packet_when_the_reference_does() {
    let mut random = Random::new(5, "lists");
    let mut lists = vec![vec![], vec![0], vec![39], vec![37, 38, 39], vec![5, 6, 7, 40], (10..20).collect()];
    lists.extend((0..40).map(|_| {
        let mut list: Vec<u64> = (0..random.below(12)).map(|_| random.below(70)).collect();
        list.sort_unstable();
        list.dedup();
        list
    }));
    for (index, lost) in lists.iter().enumerate() {
        let window = [8, 16, 64][index % 3];
        let timeout = Span::from_ps(TIMEOUT_PS);
        let endpoint = SlidingWindowConfig { payload_bytes: PAYLOAD as u32, window, timeout };
        let mut network = Network::new(&config(lost), SlidingWindow::for_hosts(endpoint, 2), flow(40));
        let log = Log::default();
        network.set_tap(Box::new(log.clone()));
        assert!(network.run_flows(Time::from_ps(1_000_000_000_000)));
        let expected = window_reference(40, window as usize, lost);
        assert_eq!(*log.0.borrow(), expected, "window {window}, lost {lost:?}");
    }
}

/// A naive model of go-back-N: the receiver sends one NAK for a gap, and the sender goes back when the NAK arrives.
fn go_back_n_reference(packets: u32, lost: &[u64], data_ps: impl Fn(u32) -> u64, ack_ps: u64) -> Vec<u32> {
    let (mut order, mut now, mut next) = (Vec::new(), 0, 0);
    let (mut expected, mut has_sent_nak) = (0, false);
    let mut nak: Option<(u64, u32)> = None;
    while next < packets || nak.is_some() {
        if let Some((at, from)) = nak.filter(|(at, _)| *at <= now || next == packets) {
            (now, next, nak) = (now.max(at), from, None);
        }
        let is_lost_on_link = lost.contains(&(order.len() as u64));
        order.push(next);
        now += data_ps(next);
        if !is_lost_on_link && next == expected {
            (expected, has_sent_nak) = (expected + 1, false);
        } else if !is_lost_on_link && next > expected && !has_sent_nak {
            has_sent_nak = true;
            nak = Some((now + DELAY_PS + ack_ps + DELAY_PS, expected));
        }
        next += 1;
    }
    order
}

#[test]
fn the_engines_go_back_n_sends_in_the_order_of_the_reference() {
    // The last lost packet is followed by others, so that no time-out is needed. Each loss comes after the one before
    // has been recovered.
    for lost in [vec![], vec![0], vec![7], vec![3, 90], vec![20, 21, 22], vec![10, 100, 190]] {
        let profile = NicProfile { mtu_bytes: PAYLOAD as u32, ..NicProfile::new(TransportPolicy::GoBackN) };
        let endpoints = RdmaEndpoint::for_hosts(RdmaConfig::new(profile), 2).unwrap();
        let mut network = Network::new(&config(&lost), endpoints, flow(150));
        let log = Log::default();
        network.set_tap(netsim::rdma::header_tap(Box::new(log.clone())));
        assert!(network.run_flows(Time::from_ps(1_000_000_000_000)));
        let sent: Vec<u32> = log.0.borrow().iter().map(|(_, psn)| *psn).collect();
        let first = Psn::new(sent[0]);
        let order: Vec<u32> = sent.iter().map(|psn| Psn::new(*psn).after(first) as u32).collect();
        // RETH on a first packet; Ethernet, IPv4, UDP, BTH and checksum on all.
        let data_ps = |number: u32| (PAYLOAD + 82 + if number == 0 { 16 } else { 0 }) * PS_PER_BYTE;
        assert_eq!(order, go_back_n_reference(150, &lost, data_ps, 86 * PS_PER_BYTE), "lost {lost:?}");
    }
}
