//! ARP and neighbour discovery, as seen by hosts.

use packet::{arp, icmpv4, icmpv6, ndisc};

use super::*;
use crate::{AdjacencyId, Limits, NeighbourState, Rate};

pub(super) fn arp_frame(to: MacAddress, message: &arp::Repr) -> Vec<u8> {
    let mut bytes = vec![0; arp::PACKET_BYTES];
    message.emit(&mut bytes);
    framed(to, message.sender_mac, EtherType::ARP, &bytes)
}

pub(super) fn request(sender: Ipv4Addr, sender_mac: MacAddress, target: Ipv4Addr) -> arp::Repr {
    arp::Repr { operation: arp::Operation::Request, sender_mac, sender, target_mac: MacAddress::default(), target }
}

fn reply(sender: Ipv4Addr, sender_mac: MacAddress) -> arp::Repr {
    let operation = arp::Operation::Reply;
    arp::Repr { operation, sender_mac, sender, target_mac: own_mac(1), target: own_v4(1) }
}

pub(super) fn arp_of(frame: &[u8]) -> arp::Repr {
    assert_eq!(frame[12..14], EtherType::ARP.0.to_be_bytes(), "{frame:02x?}");
    arp::Repr::parse(&arp::Packet::new_checked(&frame[HEADER_BYTES..]).expect("ARP"))
}

pub(super) fn discovery_frame(
    to: MacAddress,
    message: &ndisc::Message,
    source: Ipv6Addr,
    destination: Ipv6Addr,
) -> Vec<u8> {
    let mut payload = vec![0; ndisc::MESSAGE_BYTES_MAX];
    let bytes = message.emit(&mut payload, source, destination);
    payload.truncate(bytes);
    let header = |header: &mut ipv6::Repr| {
        (header.source, header.destination) = (source, destination);
        (header.next_header, header.hop_limit) = (Protocol::ICMPV6, ndisc::HOP_LIMIT);
    };
    framed(to, host_mac(1, 2), EtherType::IPV6, &V6::with(header).payload(payload).bytes())
}

pub(super) fn discovery_of(frame: &[u8]) -> (Ipv6Addr, Ipv6Addr, ndisc::Message) {
    let packet = v6_of(frame);
    assert_eq!(packet.hop_limit(), 255);
    let message = ndisc::Message::parse(packet.payload(), packet.source(), packet.destination());
    (packet.source(), packet.destination(), message.expect("valid discovery"))
}

#[test]
fn a_packet_is_queued_until_its_neighbour_is_resolved() {
    let mut bed = Testbed::new();
    bed.receive(0, &V4::new().frame());
    let ask = bed.sent_one(1);
    assert_eq!(ask[..6], MacAddress::BROADCAST.0);
    assert_eq!(arp_of(&ask), request(own_v4(1), own_mac(1), host_v4(1, 2)));
    bed.receive(1, &arp_frame(own_mac(1), &reply(host_v4(1, 2), host_mac(1, 2))));
    let frame = bed.sent_one(1);
    assert_eq!((&frame[..6], v4_of(&frame).ttl()), (&host_mac(1, 2).0[..], 63));
    let events = bed.events();
    assert!(
        matches!(events[..], [Event::NeighbourUp { port: PortId(1), address, .. }] if address == host_v4(1, 2)),
        "{events:?}"
    );
    bed.receive(0, &V4::new().frame());
    assert_eq!(bed.sent(1).len(), 1, "now it is sent at once");
    bed.assert_no_leak();
}

#[test]
fn an_ipv6_packet_is_queued_until_its_neighbour_is_resolved() {
    let mut bed = Testbed::new();
    bed.receive(0, &V6::new().frame());
    let ask = bed.sent_one(1);
    let target = host_v6(1, 2);
    let (source, destination, message) = discovery_of(&ask);
    assert_eq!((source, destination), (own_v6(1), ndisc::solicited_node(target)));
    assert_eq!(ask[..6], [0x33, 0x33, 0xff, 0, 0, 2]);
    assert_eq!(message, ndisc::Message::NeighbourSolicitation { target, source_mac: Some(own_mac(1)) });
    let answer = ndisc::Message::NeighbourAdvertisement {
        target,
        is_router: false,
        solicited: true,
        override_known: true,
        target_mac: Some(host_mac(1, 2)),
    };
    bed.receive(1, &discovery_frame(own_mac(1), &answer, target, own_v6(1)));
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 2).0);
    assert_eq!(bed.events().len(), 1);
    let state = bed.forwarder.neighbours().next().map(|neighbour| neighbour.state);
    assert_eq!(state, Some(NeighbourState::Reachable));
    bed.assert_no_leak();
}

#[test]
fn a_neighbour_that_does_not_answer_three_solicitations_fails() {
    let mut bed = Testbed::new();
    for number in 0..10 {
        bed.receive(0, &V4::with(|header| header.identification = number).frame());
    }
    let mut solicitations = bed.sent(1).len();
    bed.learn(0, host_v4(0, 2).into(), host_mac(0, 2));
    for _ in 0..5 {
        bed.wait(Duration::from_millis(500));
        solicitations += bed.sent(1).len();
        assert!(bed.sent(0).is_empty(), "no ICMP error before");
    }
    bed.wait(Duration::from_millis(500));
    solicitations += bed.sent(1).len();
    assert_eq!(solicitations, 3);
    assert_eq!((bed.dropped(DropReason::NeighbourQueue), bed.dropped(DropReason::NeighbourFailed)), (2, 8));
    let reported: Vec<u16> = bed
        .sent(0)
        .iter()
        .map(|frame| match icmpv4::Message::parse(v4_of(frame).payload()).expect("a message") {
            icmpv4::Message::Unreachable { code: 1, original, .. } => u16::from_be_bytes([original[4], original[5]]),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(reported, [2, 3, 4, 5, 6, 7, 8, 9], "host unreachable, about the newest packets");
    assert_eq!(bed.forwarder.neighbours().count(), 1, "only the sender is left");
    bed.assert_no_leak();
}

#[test]
fn a_stale_neighbour_is_probed_by_unicast_before_it_fails() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let state = |bed: &Testbed| {
        let address = IpAddr::from(host_v4(1, 2));
        bed.forwarder.neighbours().find(|neighbour| neighbour.address == address).map(|neighbour| neighbour.state)
    };
    assert_eq!(state(&bed), Some(NeighbourState::Stale));
    bed.receive(0, &V4::new().frame());
    assert_eq!((bed.sent(1).len(), state(&bed)), (1, Some(NeighbourState::Delay)));
    bed.wait(Duration::from_secs(5));
    assert_eq!(state(&bed), Some(NeighbourState::Probe));
    let ask = bed.sent_one(1);
    assert_eq!((&ask[..6], arp_of(&ask).target), (&host_mac(1, 2).0[..], host_v4(1, 2)), "asked alone, not all");
    bed.receive(0, &V4::new().frame());
    assert_eq!(bed.sent(1).len(), 1, "packets are sent meanwhile");
    bed.receive(1, &arp_frame(own_mac(1), &reply(host_v4(1, 2), host_mac(1, 2))));
    assert_eq!(state(&bed), Some(NeighbourState::Reachable));
    bed.wait(Duration::from_secs(46));
    assert_eq!(state(&bed), Some(NeighbourState::Stale), "for 15 s to 45 s");
    bed.receive(0, &V4::new().frame());
    for _ in 0..9 {
        bed.wait(Duration::from_secs(1));
    }
    assert_eq!(state(&bed), None, "no answer to three solicitations");
    let events = bed.events();
    assert!(matches!(events[..], [Event::NeighbourDown { .. }]), "{events:?}");
    bed.sent(1);
    bed.assert_no_leak();
}

#[test]
fn requests_are_answered_only_on_ports_without_a_kernel() {
    for has_kernel in [false, true] {
        let mut bed = Testbed::with(|config| PortConfig { has_kernel, ..config });
        let ask = request(host_v4(1, 2), host_mac(1, 2), own_v4(1));
        bed.receive(1, &arp_frame(MacAddress::BROADCAST, &ask));
        let sent: Vec<arp::Repr> = bed.sent(1).iter().map(|frame| arp_of(frame)).collect();
        let answer = arp::Repr { target_mac: host_mac(1, 2), target: host_v4(1, 2), ..reply(own_v4(1), own_mac(1)) };
        // The requester itself is asked whether it exists.
        let asked = arp::Repr { target_mac: host_mac(1, 2), ..request(own_v4(1), own_mac(1), host_v4(1, 2)) };
        assert_eq!(sent, if has_kernel { vec![asked] } else { vec![asked, answer] });
        let known: Vec<Option<MacAddress>> = bed.forwarder.neighbours().map(|neighbour| neighbour.mac).collect();
        assert_eq!(known, [Some(host_mac(1, 2))], "the requester is learned");
        bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(host_v4(1, 3), host_mac(1, 3), host_v4(1, 4))));
        assert_eq!((bed.sent(1).len(), bed.forwarder.neighbours().count()), (0, 1), "what others ask each other");
    }
}

#[test]
fn solicitations_and_probes_for_own_addresses_are_answered() {
    let mut bed = Testbed::new();
    let host = host_v6(1, 2);
    let ask = ndisc::Message::NeighbourSolicitation { target: own_v6(1), source_mac: Some(host_mac(1, 2)) };
    let group = ndisc::solicited_node(own_v6(1));
    bed.receive(1, &discovery_frame(MacAddress::from_multicast_v6(group), &ask, host, group));
    let [verifying, frame] = &bed.sent(1)[..] else { panic!("a solicitation and an answer") };
    let asked = ndisc::Message::NeighbourSolicitation { target: host, source_mac: Some(own_mac(1)) };
    assert_eq!((discovery_of(verifying).2, &verifying[..6]), (asked, &host_mac(1, 2).0[..]), "the host is verified");
    let (source, destination, message) = discovery_of(frame);
    assert_eq!((source, destination, &frame[..6]), (own_v6(1), host, &host_mac(1, 2).0[..]));
    let advertised = |solicited| ndisc::Message::NeighbourAdvertisement {
        target: own_v6(1),
        is_router: true,
        solicited,
        override_known: true,
        target_mac: Some(own_mac(1)),
    };
    assert_eq!(message, advertised(true));
    // A unicast solicitation, as a neighbour in state probe sends it: the destination is an own address.
    bed.receive(1, &discovery_frame(own_mac(1), &ask, host, own_v6(1)));
    assert_eq!(discovery_of(&bed.sent_one(1)).2, advertised(true));
    let probe = ndisc::Message::NeighbourSolicitation { target: own_v6(1), source_mac: None };
    let unspecified = Ipv6Addr::UNSPECIFIED;
    bed.receive(1, &discovery_frame(MacAddress::from_multicast_v6(group), &probe, unspecified, group));
    let (_, destination, message) = discovery_of(&bed.sent_one(1));
    assert_eq!((destination, message), ("ff02::1".parse().expect("an address"), advertised(false)));
    bed.assert_no_leak();
}

#[test]
fn invalid_discovery_or_one_that_crossed_a_router_is_ignored() {
    let mut bed = Testbed::new();
    let host = host_v6(1, 2);
    let group = ndisc::solicited_node(own_v6(1));
    let ask = ndisc::Message::NeighbourSolicitation { target: own_v6(1), source_mac: Some(host_mac(1, 2)) };
    let valid = discovery_frame(MacAddress::from_multicast_v6(group), &ask, host, group);
    let mut routed = valid.clone();
    routed[HEADER_BYTES + 7] = 254;
    bed.assert_dropped(1, &routed, DropReason::Multicast);
    let mut corrupted = valid;
    corrupted[HEADER_BYTES + 50] ^= 1;
    bed.assert_dropped(1, &corrupted, DropReason::NeighbourDiscovery);
    let probe = discovery_frame(MacAddress::from_multicast_v6(group), &ask, Ipv6Addr::UNSPECIFIED, group);
    bed.assert_dropped(1, &probe, DropReason::NeighbourDiscovery);
    let all = "ff02::1".parse().expect("an address");
    let broadcast = ndisc::Message::NeighbourAdvertisement {
        target: host,
        is_router: false,
        solicited: true,
        override_known: true,
        target_mac: Some(host_mac(1, 2)),
    };
    let broadcast = discovery_frame(MacAddress::from_multicast_v6(all), &broadcast, host, all);
    bed.assert_dropped(1, &broadcast, DropReason::NeighbourDiscovery);
    let mut short = arp_frame(own_mac(1), &reply(host_v4(1, 2), host_mac(1, 2)));
    short[HEADER_BYTES + 1] = 9;
    bed.assert_dropped(1, &short, DropReason::Arp);
    assert_eq!(bed.forwarder.neighbours().count(), 0);
}

#[test]
fn a_host_that_claims_an_own_address_is_counted_and_ignored() {
    let mut bed = Testbed::new();
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(own_v4(1), host_mac(1, 9), host_v4(1, 2))));
    let claim = ndisc::Message::NeighbourAdvertisement {
        target: own_v6(1),
        is_router: false,
        solicited: false,
        override_known: true,
        target_mac: Some(host_mac(1, 9)),
    };
    let all = "ff02::1".parse().expect("an address");
    bed.receive(1, &discovery_frame(MacAddress::from_multicast_v6(all), &claim, host_v6(1, 9), all));
    assert_eq!(bed.forwarder.counters().address_conflicts, 2);
    assert_eq!(bed.forwarder.neighbours().count(), 0);
}

#[test]
fn no_neighbour_is_learned_with_a_broadcast_address() {
    let mut bed = Testbed::new();
    for host in [0, 255] {
        let claim = request(host_v4(1, host), host_mac(1, 9), own_v4(1));
        bed.receive(1, &arp_frame(MacAddress::BROADCAST, &claim));
        bed.sent(1);
        bed.assert_dropped(0, &V4::to(host_v4(1, host)).frame(), DropReason::Broadcast);
    }
    assert_eq!((bed.forwarder.neighbours().count(), bed.events()), (0, vec![]));
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(host_v4(1, 254), host_mac(1, 9), own_v4(1))));
    assert_eq!(bed.forwarder.neighbours().count(), 1, "other addresses are learned");
    bed.sent(1);
    bed.assert_no_leak();
}

/// A forwarder with one port, 1, which has a network for 65,534 hosts and room for 100 neighbours.
fn bed_with_small_table() -> Testbed {
    let (rib, tables) = Rib::new().expect("memory for tables");
    let limits = Limits {
        neighbours_max: 300,
        solicitations: Rate { per_second: 10, burst: 10 },
        learned: Rate { per_second: 1_000_000, burst: 1_000_000 },
        replies: Rate { per_second: 10, burst: 50 },
        ..Limits::default()
    };
    let mut bed = Testbed::new();
    bed.forwarder = Forwarder::new(Config { limits, ..Config::new(NODE) }, tables);
    bed.rib = rib;
    let network: IpNet = "10.0.1.1/16".parse().expect("a network");
    bed.set_port(PORTS[1], PortConfig::new(own_mac(1), MTU_BYTES).with_addresses([network]));
    bed.route(network, &[Hop::on_link(NODE, PORTS[1])]);
    bed
}

#[test]
fn a_storm_of_arp_is_bounded_in_memory_and_replies_and_announces_nothing() {
    let mut bed = bed_with_small_table();
    for number in 0..10_000_u16 {
        let [high, low] = number.to_be_bytes();
        let stranger = MacAddress([2, 9, 9, 9, high, low]);
        let ask = request(Ipv4Addr::new(10, 0, high, low), stranger, own_v4(1));
        bed.receive(1, &arp_frame(MacAddress::BROADCAST, &ask));
    }
    assert_eq!(bed.forwarder.neighbours().count(), 12, "an eighth of the port's neighbours");
    assert_eq!(bed.sent(1).len(), 50 + 1 + 10, "replies, the defence of the router's address, and solicitations");
    // Two senders are the network's own address and the router.
    assert_eq!(bed.forwarder.counters().neighbours_refused, 10_000 - 12 - 2);
    for _ in 0..3 {
        assert_eq!(bed.forwarder.neighbours().count(), 12);
        bed.wait(Duration::from_secs(1));
    }
    assert_eq!(bed.forwarder.neighbours().count(), 0, "none has answered");
    let events = bed.events();
    assert!(matches!(events[..], [Event::Conflict { .. }]), "{events:?}");
    bed.sent(1);
    bed.assert_no_leak();
}

#[test]
fn a_scan_of_a_network_is_bounded_in_memory_and_solicitations() {
    let mut bed = bed_with_small_table();
    for number in 0..1000_u16 {
        let [high, low] = number.to_be_bytes();
        let frame =
            framed(own_mac(1), host_mac(1, 2), EtherType::IPV4, &V4::to(Ipv4Addr::new(10, 0, high | 2, low)).bytes());
        bed.receive(1, &frame);
    }
    assert_eq!(bed.forwarder.neighbours().count(), 25, "a quarter of the port's neighbours");
    assert_eq!(bed.sent(1).len(), 10, "solicitations");
    assert!(bed.dropped(DropReason::NeighbourTable) >= 900);
    for _ in 0..10 {
        bed.wait(Duration::from_secs(1));
    }
    assert_eq!(bed.forwarder.neighbours().count(), 0);
    bed.sent(1);
    bed.assert_no_leak();
}

/// Hosts ask for the router, and the router finds them, while forged messages arrive at the same port.
#[test]
fn hosts_find_the_router_and_are_found_during_a_flood() {
    let mut bed = Testbed::new();
    bed.learn(0, host_v4(0, 2).into(), host_mac(0, 2));
    bed.learn(0, host_v6(0, 2).into(), host_mac(0, 2));
    bed.events();
    let forge = |bed: &mut Testbed, number: u16| {
        let group = ndisc::solicited_node(own_v6(1));
        let stranger = MacAddress([2, 9, 9, 9, (number >> 8) as u8, number as u8]);
        let message = ndisc::Message::NeighbourSolicitation { target: own_v6(1), source_mac: Some(stranger) };
        let source = host_v6(1, number | 0x8000);
        bed.receive(1, &discovery_frame(MacAddress::from_multicast_v6(group), &message, source, group));
        let claim = request(host_v4(1, (number % 100) as u8 + 100), stranger, own_v4(1));
        bed.receive(1, &arp_frame(MacAddress::BROADCAST, &claim));
        bed.wait(Duration::from_micros(100));
        bed.sent(1);
    };
    (0..1000).for_each(|number| forge(&mut bed, number));
    let ask = ndisc::Message::NeighbourSolicitation { target: own_v6(1), source_mac: Some(host_mac(1, 2)) };
    let group = ndisc::solicited_node(own_v6(1));
    bed.receive(1, &discovery_frame(MacAddress::from_multicast_v6(group), &ask, host_v6(1, 2), group));
    let answer = bed.sent_one(1);
    assert_eq!((discovery_of(&answer).1, &answer[..6]), (host_v6(1, 2), &host_mac(1, 2).0[..]), "it finds the router");
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(host_v4(1, 2), host_mac(1, 2), own_v4(1))));
    assert_eq!(arp_of(&bed.sent_one(1)).target, host_v4(1, 2));
    // The table has no room for what these messages state, but for the hosts that packets are for.
    bed.receive(0, &V4::new().frame());
    bed.receive(0, &V6::new().frame());
    assert_eq!(bed.sent(1).len(), 2, "solicitations");
    (1000..2000).for_each(|number| forge(&mut bed, number));
    bed.receive(1, &arp_frame(own_mac(1), &reply(host_v4(1, 2), host_mac(1, 2))));
    assert_eq!(v4_of(&bed.sent_one(1)).ttl(), 63);
    let answer = ndisc::Message::NeighbourAdvertisement {
        target: host_v6(1, 2),
        is_router: false,
        solicited: true,
        override_known: true,
        target_mac: Some(host_mac(1, 2)),
    };
    bed.receive(1, &discovery_frame(own_mac(1), &answer, host_v6(1, 2), own_v6(1)));
    assert_eq!(v6_of(&bed.sent_one(1)).hop_limit(), 63);
    let found = bed.events();
    assert_eq!(found.len(), 2, "only these two are announced: {found:?}");
    assert!(found.iter().all(|event| matches!(event, Event::NeighbourUp { port: PortId(1), .. })), "{found:?}");
    bed.assert_no_leak();
}

#[test]
fn a_pinned_neighbour_keeps_its_number_although_it_does_not_answer() {
    let mut bed = Testbed::new();
    bed.learn(0, host_v4(0, 2).into(), host_mac(0, 2));
    let gateway: IpAddr = host_v4(1, 254).into();
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    let adjacency = forwarder.pin_adjacency(*now, PORTS[1], gateway, pool, output).expect("room");
    let again = forwarder.pin_adjacency(*now, PORTS[1], gateway, pool, output).expect("room");
    assert_eq!(adjacency, again);
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &[Hop { node: NODE, port: PORTS[1], adjacency }]);
    let packet = V4::to(Ipv4Addr::new(192, 0, 2, 1));
    for round in 0..2 {
        bed.receive(0, &packet.frame());
        assert_eq!(arp_of(&bed.sent_one(1)).target, host_v4(1, 254), "round {round}");
        for _ in 0..4 {
            bed.wait(Duration::from_secs(1));
        }
        bed.sent(1);
        assert_eq!(bed.dropped(DropReason::NeighbourFailed), round + 1);
        let states: Vec<NeighbourState> = bed
            .forwarder
            .neighbours()
            .filter(|neighbour| neighbour.port == PORTS[1])
            .map(|neighbour| neighbour.state)
            .collect();
        assert_eq!(states, [NeighbourState::Failed]);
    }
    bed.learn(1, gateway, host_mac(1, 254));
    bed.receive(0, &packet.frame());
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 254).0);
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    forwarder.unpin_adjacency(*now, adjacency, pool, output);
    forwarder.unpin_adjacency(*now, adjacency, pool, output);
    bed.wait(Duration::from_secs(6));
    for _ in 0..4 {
        bed.wait(Duration::from_secs(1));
    }
    bed.sent(1);
    assert_eq!(bed.forwarder.neighbours().filter(|neighbour| neighbour.port == PORTS[1]).count(), 0);
}

#[test]
fn a_port_that_goes_down_flushes_its_neighbours() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.receive(0, &V4::to(host_v4(1, 3)).frame());
    assert_eq!(bed.sent(1).len(), 1, "a solicitation");
    let down = PortConfig { is_up: false, ..bed.forwarder.port_config(PORTS[1]).expect("a port").clone() };
    bed.set_port(PORTS[1], down.clone());
    assert_eq!(bed.events().len(), 2, "it had two resolved neighbours");
    assert_eq!(bed.forwarder.neighbours().filter(|neighbour| neighbour.port == PORTS[1]).count(), 0);
    assert_eq!(v4_of(&bed.sent_one(0)).protocol(), Protocol::ICMP, "about the queued packet");
    bed.set_port(PORTS[1], PortConfig { is_up: true, ..down });
    bed.receive(0, &V4::new().frame());
    assert_eq!(arp_of(&bed.sent_one(1)).target, host_v4(1, 2), "resolution starts again");
}

#[test]
fn a_changed_mac_address_is_learned() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(host_v4(1, 2), host_mac(1, 77), host_v4(1, 2))));
    bed.receive(0, &V4::new().frame());
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 77).0, "by a gratuitous ARP");
    // In IPv6, an advertisement without the override flag only makes the entry stale (RFC 4861, section 7.2.5).
    let advertisement = |solicited, override_known, mac| ndisc::Message::NeighbourAdvertisement {
        target: host_v6(1, 2),
        is_router: false,
        solicited,
        override_known,
        target_mac: Some(mac),
    };
    let own = own_v6(1);
    bed.receive(1, &discovery_frame(own_mac(1), &advertisement(true, true, host_mac(1, 2)), host_v6(1, 2), own));
    bed.receive(1, &discovery_frame(own_mac(1), &advertisement(true, false, host_mac(1, 78)), host_v6(1, 2), own));
    bed.receive(0, &V6::new().frame());
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 2).0);
    bed.receive(1, &discovery_frame(own_mac(1), &advertisement(false, true, host_mac(1, 78)), host_v6(1, 2), own));
    bed.receive(0, &V6::new().frame());
    assert_eq!(bed.sent_one(1)[..6], host_mac(1, 78).0);
}

#[test]
fn a_change_of_a_ports_networks_changes_the_published_neighbours() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let config = bed.forwarder.port_config(PORTS[1]).expect("a port").clone();
    let only_v6: Vec<IpNet> = config.addresses.iter().filter(|net| net.addr().is_ipv6()).copied().collect();
    bed.set_port(PORTS[1], PortConfig { addresses: only_v6, ..config.clone() });
    let downs: Vec<Event> = bed.events();
    let of = |address: IpAddr| {
        downs.iter().find(|event| matches!(event, Event::NeighbourDown { address: of, .. } if *of == address))
    };
    assert!(of(host_v4(1, 2).into()).is_some() && of(host_v6(1, 2).into()).is_none(), "{downs:?}");
    bed.set_port(PORTS[1], config);
    let ups = bed.events();
    let is_up = |event: &Event| matches!(event, Event::NeighbourUp { address, .. } if *address == host_v4(1, 2));
    assert!(ups.iter().any(is_up), "{ups:?}");
}

#[test]
fn a_freed_adjacency_number_is_reused_only_after_a_delay() {
    let (rib, tables) = Rib::new().expect("memory for tables");
    let mut bed = Testbed::new();
    let limits = Limits { neighbours_max: 2, ..Limits::default() };
    bed.forwarder = Forwarder::new(Config { limits, ..Config::new(NODE) }, tables);
    bed.rib = rib;
    bed.set_port(PORTS[1], PortConfig::new(own_mac(1), MTU_BYTES));
    let pin = |bed: &mut Testbed, host: u8| {
        let Testbed { forwarder, pool, output, now, .. } = bed;
        forwarder.pin_adjacency(*now, PORTS[1], host_v4(1, host).into(), pool, output)
    };
    let first = pin(&mut bed, 2).expect("room");
    assert_eq!((first, pin(&mut bed, 3)), (AdjacencyId(1), Ok(AdjacencyId(2))));
    let error = pin(&mut bed, 4).expect_err("full");
    assert_eq!(error.to_string(), "port 1: no room for neighbour 10.0.1.4; raise neighbours_max");
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    forwarder.unpin_adjacency(*now, first, pool, output);
    assert!(pin(&mut bed, 4).is_err(), "packets for the former neighbour may be in flight");
    bed.wait(Duration::from_secs(2));
    assert_eq!(pin(&mut bed, 4), Ok(first));
}

#[test]
fn errors_about_failed_ipv6_neighbours_are_sent() {
    let mut bed = Testbed::new();
    bed.learn(0, host_v6(0, 2).into(), host_mac(0, 2));
    bed.receive(0, &V6::new().frame());
    for _ in 0..4 {
        bed.wait(Duration::from_secs(1));
    }
    let frame = bed.sent_one(0);
    let packet = v6_of(&frame);
    let message = icmpv6::Message::parse(packet.payload(), packet.source(), packet.destination());
    assert!(matches!(message, Ok(icmpv6::Message::Unreachable { code: 3, .. })), "{message:?}");
    bed.sent(1);
    bed.assert_no_leak();
}
