//! The neighbour table in virtual time.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use packet::ethernet::MacAddress;
use sim::Random;

use super::{Action, NeighbourState, NeighbourUpdate, Neighbours, PortL2};
use crate::config::Limits;
use crate::{AdjacencyId, DropReason, Pool, PortId, Time};

const ATTACKED: PortId = PortId(1);
const OTHER: PortId = PortId(2);
/// As with three ports and the default limits.
const OF_PORT_MAX: usize = 1024;

/// A table, its clock, and what it has reported.
struct Bed {
    table: Neighbours,
    now: Time,
    pool: Pool,
    up: Vec<(PortId, IpAddr)>,
    down: Vec<(PortId, IpAddr)>,
    solicited: Vec<(PortId, IpAddr)>,
    refused: usize,
    no_room: usize,
}

fn address(number: u32) -> IpAddr {
    Ipv6Addr::from(0x2001_0db8_u128 << 96 | u128::from(number)).into()
}

fn mac(number: u32) -> MacAddress {
    let [a, b, c, d] = number.to_be_bytes();
    MacAddress([2, 1, a, b, c, d])
}

impl Bed {
    fn new(ports: usize) -> Bed {
        Bed::with(Limits::default(), ports)
    }

    fn with(limits: Limits, ports: usize) -> Bed {
        let mut table = Neighbours::new(limits, 1);
        table.set_ports(ports);
        let (pool, now) = (Pool::new(4096, 256, 64), Time::from_ns(1_000_000_000));
        let (up, down, solicited) = (Vec::new(), Vec::new(), Vec::new());
        Bed { table, now, pool, up, down, solicited, refused: 0, no_room: 0 }
    }

    /// Executes the actions of the table.
    fn run(&mut self) {
        while let Some(action) = self.table.next_action() {
            match action {
                Action::Up { port, address, .. } => self.up.push((port, address)),
                Action::Down { port, address, .. } => self.down.push((port, address)),
                Action::Solicit { port, address, .. } => self.solicited.push((port, address)),
                Action::Refused => self.refused += 1,
                Action::Dropped { packet, reason, .. } => {
                    self.no_room += usize::from(reason == DropReason::NeighbourTable);
                    self.pool.free(packet);
                }
                Action::Send { packet, .. } | Action::Undeliverable { packet, .. } => self.pool.free(packet),
            }
        }
    }

    fn wait(&mut self, span: Duration) {
        self.now = self.now + span;
        self.table.poll(self.now);
        self.run();
    }

    fn wait_seconds(&mut self, seconds: u32) {
        (0..seconds).for_each(|_| self.wait(Duration::from_secs(1)));
    }

    fn update(&mut self, port: PortId, number: u32, mac: MacAddress, is_solicited: bool) {
        let update = NeighbourUpdate {
            port,
            address: address(number),
            mac,
            is_solicited,
            overrides: true,
            creates: !is_solicited,
            is_configured: false,
        };
        self.table.update(self.now, &update, &PortL2 { mac: mac_of_router(port), queue: port, vlan: None });
        self.run();
    }

    /// A message that claims to be from a host: a solicitation, or an ARP request.
    fn claim(&mut self, port: PortId, number: u32) {
        self.update(port, number, mac(number), false);
    }

    fn answer(&mut self, port: PortId, number: u32) {
        self.update(port, number, mac(number), true);
    }

    /// A packet to a host.
    fn send(&mut self, port: PortId, number: u32) {
        let packet = self.pool.alloc_copy(&[0; 60]).expect("a buffer");
        let sent = match self.table.find(port, address(number)) {
            Some(adjacency) => self.table.send_or_queue(self.now, adjacency, packet),
            None => {
                self.table.resolve(self.now, port, address(number), packet);
                None
            }
        };
        sent.into_iter().for_each(|packet| self.pool.free(packet));
        self.run();
    }

    /// Adds a host that answers.
    fn add_host(&mut self, port: PortId, number: u32) {
        self.send(port, number);
        self.answer(port, number);
        assert_eq!(self.state(port, number), Some(NeighbourState::Reachable), "host {number}");
    }

    fn state(&self, port: PortId, number: u32) -> Option<NeighbourState> {
        let found = self.table.find(port, address(number))?;
        self.table.iter().find(|neighbour| neighbour.adjacency == found).map(|neighbour| neighbour.state)
    }

    fn count(&self, port: PortId) -> usize {
        self.table.iter().filter(|neighbour| neighbour.port == port).count()
    }
}

fn mac_of_router(port: PortId) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, port.0])
}

#[test]
fn a_neighbour_that_a_message_states_is_reported_when_it_answers() {
    let mut bed = Bed::new(1);
    bed.claim(ATTACKED, 7);
    assert_eq!((bed.state(ATTACKED, 7), bed.up.len()), (Some(NeighbourState::Probe), 0));
    assert_eq!(bed.solicited, [(ATTACKED, address(7))]);
    bed.answer(ATTACKED, 7);
    assert_eq!((bed.state(ATTACKED, 7), &bed.up[..]), (Some(NeighbourState::Reachable), &[(ATTACKED, address(7))][..]));
    // It is verified once: what it states later changes nothing.
    bed.claim(ATTACKED, 7);
    assert_eq!((bed.solicited.len(), bed.up.len(), bed.down.len()), (1, 1, 0));
}

#[test]
fn a_neighbour_that_does_not_answer_is_removed_and_never_reported() {
    let mut bed = Bed::new(1);
    bed.claim(ATTACKED, 7);
    for second in 1..=3 {
        assert_eq!((bed.count(ATTACKED), bed.solicited.len()), (1, second));
        // Another MAC address each time does not prolong its life, nor do packets to it.
        bed.update(ATTACKED, 7, mac(100 + second as u32), false);
        bed.send(ATTACKED, 7);
        bed.wait(Duration::from_secs(1));
    }
    assert_eq!((bed.count(ATTACKED), bed.up.len(), bed.down.len()), (0, 0, 0));
    assert_eq!(bed.pool.available(), 4096);
}

#[test]
fn an_answer_that_nobody_asked_for_confirms_nothing() {
    let mut bed = Bed::new(1);
    // An ARP reply to the router may create an entry.
    let l2 = PortL2 { mac: mac_of_router(ATTACKED), queue: ATTACKED, vlan: None };
    let update = NeighbourUpdate {
        port: ATTACKED,
        address: address(7),
        mac: mac(7),
        is_solicited: true,
        overrides: true,
        creates: true,
        is_configured: false,
    };
    bed.table.update(bed.now, &update, &l2);
    bed.run();
    assert_eq!((bed.state(ATTACKED, 7), bed.up.len()), (Some(NeighbourState::Probe), 0));
    bed.wait_seconds(3);
    assert_eq!((bed.count(ATTACKED), bed.up.len()), (0, 0));
}

/// 60,000 forged messages in 30 s, each from another address.
#[test]
fn a_flood_of_forged_messages_costs_nobody_a_neighbour() {
    let mut bed = Bed::new(3);
    let hosts = 1..=400;
    for number in hosts.clone() {
        bed.add_host(OTHER, number);
        bed.add_host(ATTACKED, number);
    }
    let reported = bed.up.len();
    for round in 0..3000 {
        for number in 0..20 {
            bed.claim(ATTACKED, 1_000_000 + round * 20 + number);
        }
        // Traffic to all hosts goes on, and they answer probes.
        let number = round % 400 + 1;
        for port in [OTHER, ATTACKED] {
            bed.send(port, number);
            bed.answer(port, number);
        }
        bed.wait(Duration::from_millis(10));
        let hosts = 400 + round.div_ceil(500) as usize;
        assert!(bed.count(ATTACKED) <= hosts + OF_PORT_MAX / 8, "{} entries", bed.count(ATTACKED));
        if round % 500 == 0 {
            // A new host becomes known at either port.
            bed.add_host(ATTACKED, 5000 + round);
            bed.add_host(OTHER, 5000 + round);
        }
    }
    assert_eq!((bed.up.len() - reported, bed.down.len()), (12, 0), "only the new hosts are reported");
    assert!(bed.refused > 50_000, "{} refused", bed.refused);
    let all_known = |port| hosts.clone().all(|number| bed.table.find(port, address(number)).is_some());
    assert!(all_known(ATTACKED) && all_known(OTHER));
    bed.wait_seconds(4);
    assert_eq!(bed.count(ATTACKED), 400 + 6, "nothing of the flood is left after some seconds");
}

#[test]
fn a_host_that_answers_for_every_address_fills_only_its_port() {
    let mut bed = Bed::new(3);
    bed.add_host(ATTACKED, 1);
    for number in 0..20_000 {
        bed.claim(ATTACKED, 1_000_000 + number);
        bed.answer(ATTACKED, 1_000_000 + number);
        bed.wait(Duration::from_millis(5));
    }
    assert!(bed.count(ATTACKED) <= OF_PORT_MAX, "{}", bed.count(ATTACKED));
    assert!(bed.table.find(ATTACKED, address(1)).is_some(), "a stale host is not displaced by messages");
    for number in 0..OF_PORT_MAX as u32 {
        bed.add_host(OTHER, number);
    }
    // A host that packets are for replaces the neighbour that has been stale for longest.
    let before = bed.down.len();
    bed.wait_seconds(60);
    bed.add_host(ATTACKED, 2);
    assert_eq!((bed.down.len() - before, bed.count(ATTACKED) <= OF_PORT_MAX), (1, true));
}

#[test]
fn a_scan_on_one_port_leaves_the_queues_and_the_room_of_others() {
    let mut bed = Bed::new(3);
    for number in 0..10_000 {
        bed.send(ATTACKED, number);
    }
    assert_eq!((bed.count(ATTACKED), bed.no_room), (OF_PORT_MAX / 4, 10_000 - OF_PORT_MAX / 4));
    bed.send(OTHER, 7);
    let used = 4096 - bed.pool.available();
    bed.answer(OTHER, 7);
    assert_eq!(4096 - bed.pool.available(), used - 1, "the packet to a host of the other port was queued and sent");
}

#[test]
fn every_port_has_its_share_however_many_there_are() {
    let mut bed = Bed::new(64);
    for port in (0..64).map(PortId) {
        for number in 0..2000 {
            bed.send(port, number);
            bed.answer(port, number);
        }
        assert_eq!(bed.count(port), 128, "port {}", port.0);
    }
}

/// Any sequence of events keeps the counts right, and pinned neighbours in the table.
#[test]
fn counts_agree_with_the_table_after_any_events() {
    for seed in 0..20 {
        let mut random = Random::new(seed, "events");
        let mut pick = |count: u32| (random.unit() * f64::from(count)) as u32;
        let mut bed = Bed::with(Limits { neighbours_max: 600, ..Limits::default() }, 3);
        let mut pinned: Vec<AdjacencyId> = Vec::new();
        for _ in 0..2000 {
            let (port, number) = (PortId(pick(3) as u8), pick(400));
            match pick(9) {
                0 | 1 => bed.claim(port, number),
                2 => bed.answer(port, number),
                3 | 4 => bed.send(port, number),
                5 => pinned.extend(bed.table.pin(bed.now, port, address(number))),
                6 if !pinned.is_empty() => {
                    let adjacency = pinned.swap_remove(pick(pinned.len() as u32) as usize);
                    bed.table.unpin(bed.now, adjacency);
                }
                7 if pick(50) == 0 => bed.table.flush_port(bed.now, port),
                _ => bed.wait(Duration::from_millis(u64::from(pick(3000)))),
            }
            bed.run();
            bed.table.assert_consistent();
            assert!(pinned.iter().all(|adjacency| bed.table.address_of(*adjacency).is_some()));
            let known: Vec<_> = bed.table.iter().filter(|neighbour| neighbour.is_confirmed).collect();
            assert_eq!(known.len(), bed.up.len() - bed.down.len(), "each report is taken back once");
        }
    }
}
