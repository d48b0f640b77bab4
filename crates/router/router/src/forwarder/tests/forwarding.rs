//! Forwarding (RFC 1812, section 5; RFC 8200).

use packet::flow::Flow;
use packet::{Protocol, vlan};

use super::*;
use crate::{AdjacencyId, Filter, Step, Vlan};

#[test]
fn forwarding_changes_only_ttl_and_checksum() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let packet = V4::new();
    bed.receive(0, &packet.frame());
    let frame = bed.sent_one(1);
    assert_eq!((&frame[..6], &frame[6..12]), (&host_mac(1, 2).0[..], &own_mac(1).0[..]));
    let mut expected = packet.bytes();
    expected[8] -= 1;
    with_checksum(&mut expected);
    assert_eq!(frame[HEADER_BYTES..], expected, "without the padding of the received frame");
    let packet = V6::new();
    bed.receive(0, &packet.frame());
    let frame = bed.sent_one(1);
    assert_eq!((&frame[..6], &frame[6..12]), (&host_mac(1, 2).0[..], &own_mac(1).0[..]));
    let mut expected = packet.bytes();
    expected[7] -= 1;
    assert_eq!(frame[HEADER_BYTES..], expected);
    let counters = bed.forwarder.counters();
    assert_eq!((counters.ports[0].received.packets, counters.ports[1].sent.packets), (2, 2));
    bed.assert_no_leak();
}

#[test]
fn every_ttl_is_decremented_with_a_correct_checksum() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    for ttl in 2..=255 {
        // The identifications cause carries in the checksum.
        for identification in [0, 0x00ff, 0xfeff, 0xffff, u16::from(ttl) << 8] {
            let packet = V4::with(|header| (header.ttl, header.identification) = (ttl, identification));
            bed.receive(0, &packet.frame());
            let frame = bed.sent_one(1);
            assert_eq!(v4_of(&frame).ttl(), ttl - 1);
        }
    }
}

#[test]
fn packets_of_a_vector_leave_in_the_order_of_their_arrival() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let frames: Vec<Vec<u8>> = (0..200)
        .map(|number| {
            let packet = V4::with(|header| header.identification = number);
            // Some take the slow path, because of options or fragmentation.
            match number % 10 {
                3 => packet.payload(vec![0; 1700]).frame(),
                6 => packet.options(&[7, 7, 4, 0, 0, 0, 0, 0]).frame(),
                _ => packet.frame(),
            }
        })
        .collect();
    bed.receive_all(0, &frames);
    let sent = bed.sent(1);
    let numbers: Vec<u16> = sent.iter().map(|frame| v4_of(frame).identification()).collect();
    assert!(numbers.is_sorted(), "{numbers:?}");
    assert_eq!(numbers.len(), 220);
    bed.assert_no_leak();
}

#[test]
fn malformed_headers_are_dropped_by_reason() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let changed = |at: usize, value: u8| {
        let mut bytes = V4::new().bytes();
        bytes[at] = value;
        framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &bytes)
    };
    bed.assert_dropped(0, &changed(0, 0x55), DropReason::Version);
    bed.assert_dropped(0, &changed(0, 0x44), DropReason::HeaderLength);
    bed.assert_dropped(0, &changed(3, 19), DropReason::TotalLength);
    bed.assert_dropped(0, &changed(2, 4), DropReason::TotalLength);
    bed.assert_dropped(0, &changed(10, 0xee), DropReason::Checksum);
    bed.assert_dropped(0, &changed(8, 63), DropReason::Checksum);
    bed.assert_dropped(0, &V4::new().frame()[..HEADER_BYTES + 19], DropReason::Truncated);
    bed.assert_dropped(0, &V4::new().frame()[..13], DropReason::Truncated);
    bed.assert_dropped(0, &[], DropReason::Truncated);
    let mut bytes = V6::new().bytes();
    bytes[0] = 0x50;
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV6, &bytes), DropReason::Version);
    bed.assert_dropped(0, &V6::new().frame()[..HEADER_BYTES + 39], DropReason::Truncated);
    let long = framed(own_mac(0), host_mac(0, 2), EtherType::IPV6, &V6::new().bytes()[..50]);
    bed.assert_dropped(0, &long[..64], DropReason::TotalLength);
    let jumbo = V6::with(|header| header.next_header = Protocol(0)).payload(Vec::new());
    bed.assert_dropped(0, &jumbo.frame(), DropReason::TotalLength);
}

#[test]
fn martians_are_dropped() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.route("0.0.0.0/0".parse().expect("a prefix"), &[Hop::on_link(NODE, PortId(1))]);
    bed.route("::/0".parse().expect("a prefix"), &[Hop::on_link(NODE, PortId(1))]);
    for source in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"] {
        let source = source.parse().expect("an address");
        bed.assert_dropped(0, &V4::with(|header| header.source = source).frame(), DropReason::MartianSource);
    }
    for destination in ["0.0.0.0", "127.0.0.1", "240.0.0.1"] {
        let packet = V4::to(destination.parse().expect("an address"));
        bed.assert_dropped(0, &packet.frame(), DropReason::MartianDestination);
    }
    for source in [host_v4(0, 255), host_v4(1, 255)] {
        bed.assert_dropped(0, &V4::with(|header| header.source = source).frame(), DropReason::MartianSource);
    }
    bed.assert_dropped(0, &V4::with(|header| header.source = own_v4(1)).frame(), DropReason::OwnSource);
    bed.assert_dropped(0, &V4::to("224.0.0.5".parse().expect("an address")).frame(), DropReason::Multicast);
    bed.assert_dropped(0, &V4::to("255.255.255.255".parse().expect("an address")).frame(), DropReason::Broadcast);
    for source in ["::", "::1", "ff02::1", "::ffff:10.0.0.2"] {
        let source = source.parse().expect("an address");
        bed.assert_dropped(0, &V6::with(|header| header.source = source).frame(), DropReason::MartianSource);
    }
    for destination in ["::", "::1"] {
        let packet = V6::to(destination.parse().expect("an address"));
        bed.assert_dropped(0, &packet.frame(), DropReason::MartianDestination);
    }
    bed.assert_dropped(0, &V6::with(|header| header.source = own_v6(1)).frame(), DropReason::OwnSource);
    bed.assert_dropped(0, &V6::to("ff0e::1".parse().expect("an address")).frame(), DropReason::Multicast);
    bed.assert_dropped(0, &V6::to("fe80::2".parse().expect("an address")).frame(), DropReason::LinkLocal);
    assert_eq!(bed.forwarder.counters().icmp_errors_sent, 0, "martians are not reported");
}

/// RFC 3927, section 7: whatever the routes are, and also with options.
#[test]
fn link_local_addresses_of_ipv4_are_not_forwarded_from_or_to() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.route("0.0.0.0/0".parse().expect("a prefix"), &[Hop::on_link(NODE, PortId(1))]);
    bed.route("169.254.7.0/24".parse().expect("a prefix"), &[Hop::on_link(NODE, PortId(1))]);
    bed.route("169.254.8.0/24".parse().expect("a prefix"), &[Hop::NO_ROUTE]);
    bed.learn(1, Ipv4Addr::new(169, 254, 7, 2).into(), host_mac(1, 2));
    let nop = [1, 1, 1, 0];
    let from = |source: Ipv4Addr| V4::with(|header| header.source = source);
    for address in [[169, 254, 0, 1], [169, 254, 7, 2], [169, 254, 8, 2], [169, 254, 255, 255]].map(Ipv4Addr::from) {
        for packet in [from(address), V4::to(address)] {
            bed.assert_dropped(0, &packet.frame(), DropReason::LinkLocal);
        }
        for packet in [from(address), V4::to(address)] {
            bed.assert_dropped(0, &packet.options(&nop).frame(), DropReason::LinkLocal);
        }
    }
    assert_eq!(bed.forwarder.counters().icmp_errors_sent, 0, "not reported");
    for address in [Ipv4Addr::new(169, 253, 255, 255), Ipv4Addr::new(169, 255, 0, 0)] {
        bed.receive(0, &from(address).frame());
        bed.sent_one(1);
    }
}

#[test]
fn frames_to_other_hosts_and_unicast_packets_in_broadcast_frames_are_dropped() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let bytes = V4::new().bytes();
    let to = |mac| framed(mac, host_mac(0, 2), EtherType::IPV4, &bytes);
    bed.assert_dropped(0, &to(host_mac(0, 7)), DropReason::OtherMac);
    bed.assert_dropped(0, &to(own_mac(1)), DropReason::OtherMac);
    bed.assert_dropped(0, &to(MacAddress::BROADCAST), DropReason::LinkBroadcast);
    bed.assert_dropped(0, &to(MacAddress([1, 0, 0x5e, 0, 0, 1])), DropReason::LinkBroadcast);
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType(0x88cc), &bytes), DropReason::EtherType);
    bed.assert_dropped(5, &to(own_mac(0)), DropReason::PortDown);
}

#[test]
fn directed_broadcasts_are_dropped() {
    let mut bed = Testbed::new();
    for host in [0, 255] {
        bed.assert_dropped(0, &V4::to(host_v4(1, host)).frame(), DropReason::Broadcast);
    }
}

#[test]
fn a_packet_that_exceeds_the_mtu_is_fragmented_and_can_be_reassembled() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let payload: Vec<u8> = (0..1477).map(|at| (at * 7 % 251) as u8).collect();
    for mtu_bytes in [68, 100, 576, 1003, 1400, 1496] {
        let config = PortConfig { mtu_bytes, ..bed.forwarder.port_config(PORTS[1]).expect("a port").clone() };
        bed.set_port(PORTS[1], config);
        let options = [7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0];
        let packet = V4::new().payload(payload.clone()).options(&options);
        bed.receive(0, &packet.frame());
        let frames = bed.sent(1);
        assert!(frames.len() > 1, "MTU {mtu_bytes}");
        let mut whole = vec![0; payload.len()];
        for (number, frame) in frames.iter().enumerate() {
            let fragment = v4_of(frame);
            assert!(fragment.total_bytes() <= usize::from(mtu_bytes));
            assert_eq!((fragment.identification(), fragment.ttl()), (0x1234, 63));
            assert_eq!(fragment.more_fragments(), number + 1 < frames.len());
            let kinds: Vec<u8> = fragment.options().map(|option| option.expect("a valid option").kind).collect();
            assert_eq!(kinds, if number == 0 { vec![7, 148] } else { vec![148] }, "options with the copied flag");
            let at = fragment.fragment_offset_bytes();
            whole[at..at + fragment.payload().len()].copy_from_slice(fragment.payload());
        }
        assert_eq!(whole, payload, "MTU {mtu_bytes}");
    }
    bed.assert_no_leak();
}

#[test]
fn a_fragment_of_a_fragment_keeps_offset_and_more_fragments_flag() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let mut bytes = V4::new().payload(vec![5; 1600]).bytes();
    ipv4::Packet::new_checked(&mut bytes[..]).expect("a packet").set_fragment(false, true, 800);
    with_checksum(&mut bytes);
    bed.receive(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &bytes));
    let frames = bed.sent(1);
    let places: Vec<(usize, bool)> =
        frames.iter().map(|frame| (v4_of(frame).fragment_offset_bytes(), v4_of(frame).more_fragments())).collect();
    assert_eq!(places, [(800, true), (2280, true)]);
    // A fragment that would end beyond the maximum length: the ping of death.
    ipv4::Packet::new_checked(&mut bytes[..]).expect("a packet").set_fragment(false, true, 8191 * 8);
    with_checksum(&mut bytes);
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &bytes), DropReason::TooBig);
}

#[test]
fn equal_cost_hops_share_flows_and_both_directions_take_the_same_path() {
    let mut bed = Testbed::new();
    let hops: Vec<Hop> = (0..4)
        .map(|host| {
            let Testbed { forwarder, pool, output, now, .. } = &mut bed;
            let address = host_v4(1, 10 + host).into();
            let adjacency = forwarder.pin_adjacency(*now, PORTS[1], address, pool, output).expect("room");
            Hop { node: NODE, port: PORTS[1], adjacency }
        })
        .collect();
    for host in 0..4 {
        bed.learn(1, host_v4(1, 10 + host).into(), host_mac(1, 10 + host));
    }
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &hops);
    bed.route("198.51.100.0/24".parse().expect("a prefix"), &hops);
    let mut by_host = [0; 4];
    for number in 0..200_u8 {
        let (local, remote) = (Ipv4Addr::new(192, 0, 2, number), Ipv4Addr::new(198, 51, 100, 7));
        let there = V4::with(|header| (header.source, header.destination) = (local, remote));
        let mut back = V4::with(|header| (header.source, header.destination) = (remote, local));
        back.payload[..4].copy_from_slice(&[0x13, 0x89, 0x13, 0x88]);
        let hosts = [there, back].map(|packet| {
            bed.receive(0, &packet.frame());
            usize::from(bed.sent_one(1)[5]) - 10
        });
        assert_eq!(hosts[0], hosts[1], "flow {number}");
        by_host[hosts[0]] += 1;
    }
    assert!(by_host.iter().all(|flows| (25..80).contains(flows)), "{by_host:?}");
}

#[test]
fn a_vlan_port_receives_frames_with_its_tag_and_tags_sent_ones() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let network: IpNet = "10.9.0.1/24".parse().expect("a network");
    let vlan = Some(Vlan { parent: PORTS[1], id: 77 });
    let config = PortConfig { vlan, ..PortConfig::new(own_mac(1), MTU_BYTES).with_addresses([network]) };
    bed.set_port(PortId(2), config.clone());
    bed.route(network, &[Hop::on_link(NODE, PortId(2))]);
    let host = Ipv4Addr::new(10, 9, 0, 2);
    bed.learn(2, host.into(), host_mac(9, 2));
    bed.receive(0, &V4::to(host).frame());
    let frame = bed.sent_one(1);
    assert_eq!((&frame[..6], &frame[12..18]), (&host_mac(9, 2).0[..], &[0x81, 0, 0, 77, 8, 0][..]));
    let tagged = |id: u16, packet: &V4| {
        let mut payload = vec![0; vlan::HEADER_BYTES];
        vlan::emit(vlan::Tag { priority: 5, drop_eligible: false, id }, EtherType::IPV4, &mut payload);
        payload.extend_from_slice(&packet.bytes());
        framed(own_mac(1), host_mac(9, 2), EtherType::VLAN, &payload)
    };
    let back = V4::with(|header| (header.source, header.destination) = (host, host_v4(0, 2)));
    bed.receive(1, &tagged(77, &back));
    assert_eq!(v4_of(&bed.sent_one(0)).source(), host);
    bed.receive(1, &tagged(0, &back));
    assert_eq!(v4_of(&bed.sent_one(0)).source(), host, "a priority tag without a VLAN");
    bed.assert_dropped(1, &tagged(78, &back), DropReason::Vlan);
    // A reply carries the tag.
    bed.receive(1, &tagged(77, &V4 { header: ipv4::Repr { ttl: 1, ..back.header }, ..back.clone() }));
    assert_eq!(bed.sent_one(1)[12..18], [0x81, 0, 0, 77, 8, 0]);
    let traffic = |bed: &Testbed, port: usize| {
        let counters = &bed.forwarder.counters().ports[port];
        (counters.received.packets, counters.sent.packets)
    };
    assert_eq!((traffic(&bed, 2), traffic(&bed, 1)), ((2, 2), (4, 2)), "the parent counts frames of its VLANs");
    let parent = bed.forwarder.port_config(PORTS[1]).expect("a port").clone();
    for (port, whole) in [(PortId(2), &config), (PORTS[1], &parent)] {
        bed.set_port(port, PortConfig { is_up: false, ..whole.clone() });
        bed.receive(0, &V4::to(host).frame());
        assert_eq!((bed.sent(1).len(), bed.dropped(DropReason::EgressDown)), (0, u64::from(3 - port.0)));
        let reason = if port == PORTS[1] { DropReason::PortDown } else { DropReason::Vlan };
        bed.sent(0);
        bed.assert_dropped(1, &tagged(77, &back), reason);
        bed.set_port(port, whole.clone());
    }
    let taken = PortConfig { vlan: Some(Vlan { parent: PORTS[1], id: 77 }), ..config };
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    let error = forwarder.set_port(*now, PortId(3), taken, pool, output).expect_err("the VLAN has a port");
    assert_eq!(error.to_string(), "port 3: VLAN 77 of port 1: use 1 to 4094, each once, of a port without a VLAN");
    forwarder.remove_port(*now, PortId(2), pool, output);
    bed.assert_dropped(1, &tagged(77, &back), DropReason::Vlan);
}

#[test]
fn a_forwarder_can_be_sent_to_another_thread() {
    let bed = Testbed::new();
    let thread = std::thread::spawn(move || bed.forwarder.next_timer());
    assert_eq!(thread.join().expect("no panic"), None);
}

#[test]
fn invalid_port_configurations_are_rejected_in_one_line() {
    let mut bed = Testbed::new();
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    let mut error = |port: u8, config: PortConfig| {
        forwarder.set_port(*now, PortId(port), config, pool, output).expect_err("refused").to_string()
    };
    let valid = PortConfig::new(own_mac(5), 1500);
    assert_eq!(error(64, valid.clone()), "port 64: a node has ports 0 to 63");
    let short = PortConfig { mtu_bytes: 67, ..valid.clone() };
    assert_eq!(error(5, short), "port 5: an MTU of 67 B; IPv4 needs at least 68 B");
    let group = PortConfig { mac: MacAddress([1, 0, 0, 0, 0, 1]), ..valid };
    assert_eq!(
        error(5, group),
        "port 5: 01:00:00:00:00:01 is a group address; the MAC address of a port has an even first byte"
    );
}

#[test]
fn a_port_that_is_down_neither_receives_nor_sends() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let down = PortConfig { is_up: false, ..bed.forwarder.port_config(PORTS[1]).expect("a port").clone() };
    bed.set_port(PORTS[1], down);
    bed.receive(0, &V4::new().frame());
    assert_eq!((bed.sent(1).len(), bed.dropped(DropReason::EgressDown)), (0, 1));
    assert_eq!(v4_of(&bed.sent_one(0)).protocol(), Protocol::ICMP, "reported to the sender");
    let frame = framed(own_mac(1), host_mac(1, 2), EtherType::IPV4, &V4::new().bytes());
    bed.assert_dropped(1, &frame, DropReason::PortDown);
}

#[test]
fn a_full_queue_drops_and_counts() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.output = Output::new(10);
    let frames = vec![V4::new().frame(); 25];
    bed.receive_all(0, &frames);
    assert_eq!((bed.sent(1).len(), bed.dropped(DropReason::PortQueue)), (10, 15));
    bed.assert_no_leak();
}

#[test]
fn a_traced_packet_records_its_steps() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.forwarder.trace(Some(Filter { destination: Some(host_v4(1, 2).into_net()), ..Filter::all(1) }));
    bed.receive(0, &V6::new().frame());
    bed.receive(0, &V4::new().frame());
    bed.receive(0, &V4::new().frame());
    assert_eq!((bed.sent(1).len(), bed.output.traced.len()), (3, 3), "only the steps of one packet");
    let steps: Vec<Step> = bed.output.traced.iter().map(|step| step.step).collect();
    let hop = Hop { node: NODE, port: PORTS[1], adjacency: AdjacencyId::ON_LINK };
    assert_eq!(steps, [Step::Received(PORTS[0]), Step::LookedUp { hop, hops: 1 }, Step::Sent(PORTS[1])]);
    let flow = bed.output.traced[0].flow;
    let expected = Flow {
        source: host_v4(0, 2).into(),
        destination: host_v4(1, 2).into(),
        protocol: Protocol::UDP,
        source_port: 5000,
        destination_port: 5001,
    };
    assert_eq!(flow, expected);
    bed.output.traced.clear();
    bed.forwarder.trace(Some(Filter::all(9)));
    bed.receive(0, &V4::with(|header| header.ttl = 1).frame());
    let steps: Vec<String> = bed.output.traced.iter().map(|step| step.step.to_string()).collect();
    let expected = [
        "received at port 0",
        "looked up: node 0, port 1, adjacency 0, of 1 equal",
        "answered by ICMP 11/0",
        "made here",
        "looked up: node 0, port 0, adjacency 0, of 1 equal",
        "sent by port 0",
        "dropped: time to live exceeded",
    ];
    assert_eq!(steps, expected);
}

/// Conversion of an address to a network of one address.
trait IntoNet {
    fn into_net(self) -> IpNet;
}

impl IntoNet for Ipv4Addr {
    fn into_net(self) -> IpNet {
        IpNet::from(IpAddr::from(self))
    }
}

#[test]
fn a_reset_forwarder_behaves_like_a_new_one() {
    let scenario = |bed: &mut Testbed| {
        bed.learn_hosts();
        let unknown = V4::to(host_v4(1, 99)).frame();
        let expired = V4::with(|header| header.ttl = 1).frame();
        let mut sent = Vec::new();
        for frame in [V4::new().frame(), expired.clone(), unknown, V6::new().frame(), expired] {
            bed.receive(0, &frame);
            bed.wait(Duration::from_millis(1));
            sent.extend([bed.sent(0), bed.sent(1)]);
        }
        // Resolution of the unknown neighbour fails.
        bed.wait(Duration::from_secs(10));
        sent.extend([bed.sent(0), bed.sent(1)]);
        (sent, bed.events(), bed.forwarder.counters().clone(), bed.forwarder.neighbours().count())
    };
    let mut bed = Testbed::new();
    let began = bed.now;
    let first = scenario(&mut bed);
    for port in PORTS {
        let Testbed { forwarder, pool, output, now, .. } = &mut bed;
        forwarder.remove_port(*now, port, pool, output);
    }
    bed.assert_no_leak();
    bed.output.events.clear();
    bed.forwarder.reset();
    assert_eq!((bed.forwarder.neighbours().count(), bed.drops()), (0, Vec::new()));
    bed.now = began;
    for port in PORTS {
        let networks = [IpNet::new(own_v4(port.0).into(), 24), IpNet::new(own_v6(port.0).into(), 64)];
        let networks = networks.map(|network| network.expect("a prefix length"));
        bed.set_port(port, PortConfig::new(own_mac(port.0), MTU_BYTES).with_addresses(networks));
    }
    assert_eq!(scenario(&mut bed), first);
}
