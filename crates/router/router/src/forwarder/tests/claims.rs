//! Duplicate address detection and the MLD listener.

use packet::{mld, ndisc};

use super::neighbours::{arp_frame, arp_of, discovery_frame, discovery_of, request};
use super::*;
use crate::ClaimState;

/// Returns a testbed whose ports probe for their addresses; `node` is part of the MAC addresses.
fn claiming(node: u8) -> Testbed {
    Testbed::with(|config| {
        let [.., port] = config.mac.0;
        PortConfig { mac: MacAddress([2, 0, 0, 0, node, port]), probes: true, ..config }
    })
}

/// The same, after the first probes.
fn probing(node: u8) -> Testbed {
    let mut bed = claiming(node);
    bed.wait(Duration::from_secs(1));
    bed
}

fn is_report(frame: &[u8]) -> bool {
    frame[..6] == MacAddress::from_multicast_v6(mld::ALL_ROUTERS).0
}

/// Drains the transmit queue of a port, and returns the frames that are not MLD reports.
fn sent_without_reports(bed: &mut Testbed, port: u8) -> Vec<Vec<u8>> {
    let mut frames = bed.sent(port);
    frames.retain(|frame| !is_report(frame));
    frames
}

/// Returns the addresses of port 1 that are not in use, and their states.
fn unassigned(bed: &Testbed) -> Vec<(IpAddr, ClaimState)> {
    let of_port = bed.forwarder.unassigned_addresses().filter(|(port, ..)| *port == PORTS[1]);
    of_port.map(|(_, address, state)| (address, state)).collect()
}

fn link_local(node: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, u16::from(node) << 8 | 1)
}

fn request_v4() -> Vec<u8> {
    arp_frame(MacAddress::BROADCAST, &request(host_v4(1, 2), host_mac(1, 2), own_v4(1)))
}

fn solicitation_v6() -> Vec<u8> {
    let target = own_v6(1);
    let group = ndisc::solicited_node(target);
    let ask = ndisc::Message::NeighbourSolicitation { target, source_mac: Some(host_mac(1, 2)) };
    discovery_frame(MacAddress::from_multicast_v6(group), &ask, host_v6(1, 2), group)
}

fn echo_request() -> Vec<u8> {
    let payload = vec![8, 0, 0xf7, 0xff, 0, 0, 0, 0];
    let header = |header: &mut ipv4::Repr| (header.destination, header.protocol) = (own_v4(1), Protocol::ICMP);
    V4::with(header).payload(payload).frame()
}

#[test]
fn addresses_are_probed_for_before_they_are_used() {
    let mut bed = claiming(0);
    bed.wait(Duration::ZERO);
    assert_eq!((bed.sent(0).len(), bed.sent(1).len()), (0, 0), "the first probe is delayed");
    bed.wait(Duration::from_secs(1));
    let probes = sent_without_reports(&mut bed, 1);
    assert_eq!((probes.len(), sent_without_reports(&mut bed, 0).len()), (3, 3), "{probes:02x?}");
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    assert_eq!((&probes[0][..6], arp_of(&probes[0])), (&[0xff; 6][..], request(Ipv4Addr::UNSPECIFIED, mac, own_v4(1))));
    for (probe, target) in probes[1..].iter().zip([own_v6(1), link_local(0)]) {
        let (source, destination, message) = discovery_of(probe);
        assert_eq!((source, destination), (Ipv6Addr::UNSPECIFIED, ndisc::solicited_node(target)));
        assert_eq!(message, ndisc::Message::NeighbourSolicitation { target, source_mac: None });
    }
    let tentative = ClaimState::Tentative;
    let own = [own_v4(1).into(), own_v6(1).into(), link_local(0).into()].map(|address| (address, tentative));
    assert_eq!(unassigned(&bed), own);
    bed.receive_all(1, &[request_v4(), solicitation_v6()]);
    assert_eq!(bed.sent(1).len(), 0, "tentative addresses are not answered for");
    bed.assert_dropped(0, &echo_request(), DropReason::AddressNotInUse);
    bed.wait(Duration::from_secs(1));
    assert_eq!(unassigned(&bed), own[..1], "one probe and a second by IPv6");
    for _ in 0..3 {
        bed.wait(Duration::from_secs(2));
    }
    assert_eq!((unassigned(&bed), arp_of(bed.sent(1).last().expect("frames")).sender), (vec![], Ipv4Addr::UNSPECIFIED));
    bed.wait(Duration::ZERO);
    assert_eq!(arp_of(&bed.sent_one(1)), request(own_v4(1), mac, own_v4(1)), "announced");
    bed.wait(Duration::from_secs(2));
    assert_eq!(arp_of(&bed.sent_one(1)).sender, own_v4(1), "twice");
    bed.receive_all(1, &[request_v4(), solicitation_v6()]);
    // Two answers, and two solicitations for the hosts that asked.
    assert_eq!(bed.sent(1).len(), 4, "assigned addresses are answered for");
    assert_eq!((bed.forwarder.counters().address_conflicts, bed.forwarder.next_timer().is_some()), (0, true));
    bed.sent(0);
    bed.assert_no_leak();
}

/// Exchanges the frames of two routers until both are silent.
fn exchange(one: &mut Testbed, other: &mut Testbed, port: u8) {
    for _ in 0..10 {
        let (from_one, from_other) = (one.sent(port), other.sent(port));
        if from_one.is_empty() && from_other.is_empty() {
            return;
        }
        other.receive_all(port, &from_one);
        one.receive_all(port, &from_other);
    }
    panic!("the routers do not become silent");
}

#[test]
fn the_second_of_two_nodes_with_the_same_addresses_uses_none() {
    let (mut first, mut second) = (probing(0), Testbed::with(|config| PortConfig { is_up: false, ..config }));
    for _ in 0..10 {
        first.wait(Duration::from_secs(1));
    }
    first.sent(1);
    let config = second.forwarder.port_config(PORTS[1]).expect("a port").clone();
    let mac = MacAddress([2, 0, 0, 0, 9, 1]);
    second.set_port(PORTS[1], PortConfig { mac, probes: true, is_up: true, ..config });
    second.wait(Duration::from_secs(1));
    exchange(&mut first, &mut second, 1);
    let duplicate = ClaimState::Duplicate;
    let duplicates = [(own_v4(1).into(), duplicate), (own_v6(1).into(), duplicate)];
    for _ in 0..10 {
        first.wait(Duration::from_secs(1));
        second.wait(Duration::from_secs(1));
        exchange(&mut first, &mut second, 1);
    }
    assert_eq!(
        (unassigned(&second), unassigned(&first)),
        (duplicates.to_vec(), vec![]),
        "its link-local address is unique"
    );
    let first_mac = Some(MacAddress([2, 0, 0, 0, 0, 1]));
    let event = duplicates.map(|(address, _)| Event::Duplicate { port: PORTS[1], address, mac: first_mac });
    assert_eq!((second.events(), second.forwarder.counters().address_conflicts), (event.to_vec(), 2));
    second.receive_all(1, &[request_v4(), solicitation_v6()]);
    assert_eq!(second.sent(1).len(), 0);
    let config = second.forwarder.port_config(PORTS[1]).expect("a port").clone();
    second.set_port(PORTS[1], PortConfig { mtu_bytes: 1400, ..config.clone() });
    assert_eq!(unassigned(&second), duplicates, "a change of the MTU does not restart probes");
    second.set_port(PORTS[1], PortConfig { is_up: false, ..config.clone() });
    second.set_port(PORTS[1], config);
    for _ in 0..9 {
        second.wait(Duration::from_secs(1));
    }
    assert_eq!(unassigned(&second), [], "a port that was down probes again, and gets no answer");
}

#[test]
fn two_nodes_that_probe_for_the_same_addresses_at_once_use_neither() {
    let (mut one, mut other) = (probing(0), probing(9));
    exchange(&mut one, &mut other, 1);
    let duplicate = ClaimState::Duplicate;
    let duplicates = vec![(own_v4(1).into(), duplicate), (own_v6(1).into(), duplicate)];
    for _ in 0..5 {
        one.wait(Duration::from_secs(1));
        other.wait(Duration::from_secs(1));
        exchange(&mut one, &mut other, 1);
    }
    assert_eq!((unassigned(&one), unassigned(&other)), (duplicates.clone(), duplicates));
}

#[test]
fn reflected_own_probes_and_requests_of_others_are_no_conflict() {
    let mut bed = probing(0);
    let probes = sent_without_reports(&mut bed, 1);
    assert_eq!(probes.len(), 3);
    bed.receive_all(1, &probes);
    bed.receive_all(1, &[request_v4(), solicitation_v6()]);
    // A probe for another address.
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(Ipv4Addr::UNSPECIFIED, host_mac(1, 9), host_v4(1, 9))));
    assert_eq!((unassigned(&bed).len(), bed.forwarder.counters().address_conflicts), (3, 0));
    for _ in 0..9 {
        bed.wait(Duration::from_secs(1));
        let sent = bed.sent(1);
        bed.receive_all(1, &sent);
    }
    assert_eq!((unassigned(&bed), bed.forwarder.counters().address_conflicts), (vec![], 0));
    bed.sent(0);
    bed.assert_no_leak();
}

/// Returns the advertisement of an address by host 9 on port 1, to all nodes.
fn advertisement_of(target: Ipv6Addr) -> Vec<u8> {
    let all = "ff02::1".parse().expect("an address");
    let claim = ndisc::Message::NeighbourAdvertisement {
        target,
        is_router: false,
        solicited: false,
        override_known: true,
        target_mac: Some(host_mac(1, 9)),
    };
    discovery_frame(MacAddress::from_multicast_v6(all), &claim, target, all)
}

#[test]
fn a_tentative_address_that_another_host_uses_is_given_up() {
    let mut bed = probing(0);
    bed.sent(1);
    bed.receive(1, &advertisement_of(own_v6(1)));
    // Not a reply: a request for another address, whose sender address is ours.
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(own_v4(1), host_mac(1, 8), host_v4(1, 2))));
    let event = |address, host| Event::Duplicate { port: PORTS[1], address, mac: Some(host_mac(1, host)) };
    assert_eq!(bed.events(), [event(own_v6(1).into(), 9), event(own_v4(1).into(), 8)]);
    bed.wait(Duration::from_secs(9));
    let duplicate = ClaimState::Duplicate;
    assert_eq!(unassigned(&bed), [(own_v4(1).into(), duplicate), (own_v6(1).into(), duplicate)]);
}

/// Returns a testbed whose addresses are assigned and announced.
fn own() -> Testbed {
    let mut bed = probing(0);
    for _ in 0..10 {
        bed.wait(Duration::from_secs(1));
    }
    bed.sent(0);
    bed.sent(1);
    assert_eq!(unassigned(&bed), []);
    bed
}

#[test]
fn an_assigned_address_is_defended_at_a_limited_rate() {
    let mut bed = own();
    let claim = arp_frame(MacAddress::BROADCAST, &request(own_v4(1), host_mac(1, 9), host_v4(1, 2)));
    bed.receive(1, &claim);
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    assert_eq!(arp_of(&bed.sent_one(1)), request(own_v4(1), mac, own_v4(1)));
    let event = Event::Conflict { port: PORTS[1], address: own_v4(1).into(), mac: Some(host_mac(1, 9)) };
    assert_eq!((bed.events(), unassigned(&bed)), (vec![event], vec![]));
    for _ in 0..5 {
        bed.wait(Duration::from_secs(9));
        bed.receive(1, &claim);
    }
    assert_eq!(
        (sent_without_reports(&mut bed, 1), bed.events()),
        (vec![], vec![]),
        "the address is kept, and conflicts are not answered in turn forever"
    );
    bed.wait(Duration::from_secs(10));
    bed.receive(1, &claim);
    assert_eq!((sent_without_reports(&mut bed, 1).len(), bed.events()), (1, vec![event]), "once more after a pause");
    assert_eq!(bed.forwarder.counters().address_conflicts, 7);
    bed.sent(0);
    bed.assert_no_leak();
}

#[test]
fn an_ipv6_conflict_is_reported_and_not_answered() {
    let mut bed = own();
    let claim = advertisement_of(own_v6(1));
    bed.receive_all(1, &[claim.clone(), claim]);
    let event = Event::Conflict { port: PORTS[1], address: own_v6(1).into(), mac: Some(host_mac(1, 9)) };
    assert_eq!((bed.sent(1), bed.events(), unassigned(&bed)), (vec![], vec![event], vec![]));
}

#[test]
fn a_kernel_defends_its_addresses_itself() {
    let mut bed = Testbed::with(|config| PortConfig { has_kernel: true, ..config });
    bed.receive(1, &arp_frame(MacAddress::BROADCAST, &request(own_v4(1), host_mac(1, 9), host_v4(1, 2))));
    assert_eq!((bed.sent(1).len(), bed.events().len()), (0, 1));
}

/// Returns the record type, the source and the groups of a report.
fn reported(frame: &[u8]) -> (u8, Ipv6Addr, Vec<Ipv6Addr>) {
    let packet = v6_of(frame);
    assert_eq!((packet.destination(), packet.hop_limit()), (mld::ALL_ROUTERS, mld::HOP_LIMIT));
    let records = packet.payload()[16..].chunks(20);
    let groups = records.clone().map(|record| <[u8; 16]>::try_from(&record[4..]).expect("a group").into()).collect();
    (records.map(|record| record[0]).next().expect("a group"), packet.source(), groups)
}

#[test]
fn solicited_node_groups_are_joined_before_probes_and_reported_every_minute() {
    let mut bed = probing(0);
    let frames = bed.sent(1);
    assert!(is_report(&frames[0]) && frames[1..].iter().all(|frame| !is_report(frame)), "{frames:02x?}");
    let groups = vec![ndisc::solicited_node(own_v6(1))];
    assert_eq!(groups[0], ndisc::solicited_node(link_local(0)), "the addresses share a group");
    let joins = mld::RecordType::ChangeToExclude as u8;
    assert_eq!(reported(&frames[0]), (joins, Ipv6Addr::UNSPECIFIED, groups.clone()));
    let mut reports = Vec::new();
    for second in 1..=150 {
        bed.wait(Duration::from_secs(1));
        let of_second = bed.sent(1).into_iter().filter(|frame| is_report(frame));
        reports.extend(of_second.map(|frame| (second, reported(&frame))));
    }
    let listens = |second| (second, (mld::RecordType::ModeIsExclude as u8, link_local(0), groups.clone()));
    let again = (1, (joins, Ipv6Addr::UNSPECIFIED, groups.clone()));
    assert_eq!(reports, [again, listens(61), listens(121)]);
    let config = bed.forwarder.port_config(PORTS[1]).expect("a port").clone();
    bed.set_port(PORTS[1], PortConfig { is_up: false, ..config });
    bed.wait(Duration::from_secs(100));
    assert_eq!(bed.sent(1).len(), 0, "a port that is down is silent");
    bed.sent(0);
    bed.assert_no_leak();
}

#[test]
fn a_port_without_ipv6_addresses_has_no_groups() {
    let mut bed = Testbed::with(|config| {
        let v4 = config.addresses.iter().copied().filter(|network| matches!(network, IpNet::V4(_)));
        PortConfig { probes: true, ..config.clone() }.with_addresses(v4)
    });
    for _ in 0..100 {
        bed.wait(Duration::from_secs(1));
    }
    assert!(!bed.sent(1).iter().any(|frame| is_report(frame)));
}

/// Returns a query of a router on the link, to all nodes.
fn query(port: u8, response_max_ms: u16, group: Ipv6Addr, is_v1: bool) -> Vec<u8> {
    let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut frame = query_to(all, port, response_max_ms, group, is_v1);
    frame[..6].copy_from_slice(&MacAddress::from_multicast_v6(all).0);
    frame
}

/// Returns a query to one address.
fn query_to(destination: Ipv6Addr, port: u8, response_max_ms: u16, group: Ipv6Addr, is_v1: bool) -> Vec<u8> {
    let source = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x99);
    let [a, b] = response_max_ms.to_be_bytes();
    let mut message = [&[mld::QUERY, 0, 0, 0, a, b, 0, 0][..], &group.octets()].concat();
    message.extend(if is_v1 { &[][..] } else { &[2, 125, 0, 0] });
    let pseudo = packet::icmpv6::pseudo(source, destination, message.len());
    let checksum = pseudo.add_bytes(&message).checksum().to_be_bytes();
    message[2..4].copy_from_slice(&checksum);
    let payload = [&[Protocol::ICMPV6.0, 0, 5, 2, 0, 0, 1, 0][..], &message].concat();
    let change = |header: &mut ipv6::Repr| {
        (header.source, header.destination) = (source, destination);
        (header.next_header, header.hop_limit) = (ipv6::HOP_BY_HOP, mld::HOP_LIMIT);
    };
    let mut frame = V6::with(change).payload(payload).frame();
    frame[..6].copy_from_slice(&own_mac(port).0);
    frame[6..12].copy_from_slice(&host_mac(port, 9).0);
    frame
}

/// Returns the reports of port 1 in this time, each with its tenth of a second. No unsolicited one is due then.
fn answers(bed: &mut Testbed, tenths: u32) -> Vec<(u32, Vec<u8>)> {
    let mut reports = Vec::new();
    for tenth in 1..=tenths {
        bed.wait(Duration::from_millis(100));
        reports.extend(bed.sent(1).into_iter().map(|frame| (tenth, frame)));
    }
    reports
}

/// Returns a testbed after the initial joins, whose next unsolicited report is almost a minute away.
fn settled() -> Testbed {
    let mut bed = probing(0);
    for _ in 0..10 {
        bed.wait(Duration::from_secs(1));
    }
    bed.sent(0);
    bed.sent(1);
    bed
}

#[test]
fn queries_are_answered_in_time_and_those_of_foreign_groups_are_not() {
    let (own, other) = (ndisc::solicited_node(own_v6(1)), ndisc::solicited_node(host_v6(1, 2)));
    let all = Ipv6Addr::UNSPECIFIED;
    let says = (mld::RecordType::ModeIsExclude as u8, link_local(0), vec![own]);
    let mut tenths = Vec::new();
    for (queried, response_max_ms) in [(all, 1000), (own, 1000), (own, 2000), (all, 2000), (all, 3000)] {
        let mut bed = settled();
        bed.receive(1, &query(1, response_max_ms, queried, false));
        let answers = answers(&mut bed, 40);
        let [(tenth, report)] = &answers[..] else { panic!("{} answers to a query of {queried}", answers.len()) };
        assert_eq!(reported(report), says);
        assert!(*tenth <= u32::from(response_max_ms) / 100, "{tenth} tenths of a second");
        tenths.push(*tenth);
        assert_eq!(bed.forwarder.counters().ports[1].drops.count(DropReason::Consumed), 1);
        bed.assert_no_leak();
    }
    let mut bed = settled();
    bed.receive(1, &query(1, 1000, other, false));
    assert_eq!(answers(&mut bed, 40), [], "a foreign group");
    // One report answers two queries that cover the same groups, at the earlier time.
    for [first, second] in [[all, all], [own, own], [all, own], [own, all]] {
        let mut bed = settled();
        bed.receive(1, &query(1, 0, first, false));
        bed.receive(1, &query(1, 1, second, false));
        let answers = answers(&mut bed, 40);
        assert!((1..=2).contains(&answers.len()) && answers.iter().all(|(_, report)| reported(report) == says));
        assert!(answers.len() == 1 || [first, second] == [own, all], "{first} and {second}: {}", answers.len());
    }
}

/// RFC 3810, section 5.1.15: at any address of the port.
#[test]
fn queries_to_any_address_of_the_port_are_answered_and_others_are_not() {
    let (group, elsewhere) = (Ipv6Addr::UNSPECIFIED, own_v6(0));
    for (destination, count) in [(own_v6(1), 1), (link_local(0), 1), (elsewhere, 0), (host_v6(1, 2), 0)] {
        let mut bed = settled();
        bed.receive(1, &query_to(destination, 1, 1000, group, false));
        let reports = answers(&mut bed, 40).into_iter().filter(|(_, frame)| is_report(frame)).count();
        assert_eq!(reports, count, "{destination}");
    }
}

#[test]
fn queriers_of_version_1_are_answered_group_by_group_while_present() {
    let group = ndisc::solicited_node(own_v6(1));
    let mut bed = settled();
    bed.receive(1, &query(1, 1000, Ipv6Addr::UNSPECIFIED, true));
    let in_time = answers(&mut bed, 10);
    let [(_, frame)] = &in_time[..] else { panic!("{in_time:?}") };
    assert_eq!(frame[..6], MacAddress::from_multicast_v6(group).0);
    let packet = v6_of(frame);
    let (ends, message) = ((packet.source(), packet.destination()), &packet.payload()[8..]);
    assert_eq!((ends, packet.hop_limit(), message.len()), ((link_local(0), group), 1, 24));
    assert_eq!((message[0], &message[8..]), (mld::REPORT_V1, &group.octets()[..]));
    let view = packet::icmpv6::Packet::new_checked(message).expect("a message");
    assert!(view.verify_checksum(ends.0, ends.1));
    let mut kinds = Vec::new();
    for _ in 0..400 {
        bed.wait(Duration::from_secs(1));
        kinds.extend(bed.sent(1).iter().map(|frame| v6_of(frame).payload()[8]));
    }
    let (v1, v2) = (mld::REPORT_V1, mld::REPORT);
    assert_eq!(kinds, [v1, v1, v1, v1, v2, v2], "every minute, and in version 2 after 260 s");
}

#[test]
fn a_port_that_is_down_or_has_a_kernel_answers_no_query() {
    let group = Ipv6Addr::UNSPECIFIED;
    let mut bed = settled();
    let config = bed.forwarder.port_config(PORTS[1]).expect("a port").clone();
    bed.receive(1, &query(1, 2000, group, false));
    bed.set_port(PORTS[1], PortConfig { is_up: false, ..config });
    assert_eq!(answers(&mut bed, 40), []);
    let mut bed = Testbed::with(|config| PortConfig { has_kernel: true, ..config });
    bed.receive(1, &query(1, 1000, group, false));
    assert_eq!(answers(&mut bed, 40), []);
}
