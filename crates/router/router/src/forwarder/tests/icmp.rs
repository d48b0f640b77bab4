//! ICMP errors (RFC 1812, section 4.3; RFC 4443), redirects, and packets to the router itself.

use packet::{icmpv4, icmpv6};

use super::*;
use crate::{AdjacencyId, Limits, Rate};

/// Returns source, destination and message of an ICMP packet.
fn icmp_v4(frame: &[u8]) -> (Ipv4Addr, Ipv4Addr, icmpv4::Message<'_>) {
    let packet = ipv4::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a packet");
    assert!(packet.verify_checksum() && packet.protocol() == Protocol::ICMP);
    let range = HEADER_BYTES + packet.header_bytes()..HEADER_BYTES + packet.total_bytes();
    (packet.source(), packet.destination(), icmpv4::Message::parse(&frame[range]).expect("a valid message"))
}

fn icmp_v6(frame: &[u8]) -> (Ipv6Addr, Ipv6Addr, icmpv6::Message<'_>) {
    let packet = ipv6::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a packet");
    assert_eq!(packet.next_header(), Protocol::ICMPV6);
    let (source, destination) = (packet.source(), packet.destination());
    let range = HEADER_BYTES + ipv6::HEADER_BYTES..HEADER_BYTES + packet.total_bytes();
    (source, destination, icmpv6::Message::parse(&frame[range], source, destination).expect("a valid message"))
}

/// The same of an error, which must not exceed its maximum length.
fn error_v4(frame: &[u8]) -> (Ipv4Addr, Ipv4Addr, icmpv4::Message<'_>) {
    assert!(ipv4::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a packet").total_bytes() <= 576);
    icmp_v4(frame)
}

fn error_v6(frame: &[u8]) -> (Ipv6Addr, Ipv6Addr, icmpv6::Message<'_>) {
    assert!(ipv6::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a packet").total_bytes() <= 1280);
    icmp_v6(frame)
}

#[test]
fn an_expired_ttl_is_reported_from_the_ingress_port() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    for ttl in [0, 1] {
        let packet = V4::with(|header| header.ttl = ttl);
        bed.receive(0, &packet.frame());
        let frame = bed.sent_one(0);
        let (from, to, message) = error_v4(&frame);
        assert_eq!((from, to), (own_v4(0), host_v4(0, 2)));
        assert_eq!(message, icmpv4::Message::TimeExceeded { code: 0, original: &packet.bytes() });
        let packet = V6::with(|header| header.hop_limit = ttl);
        bed.receive(0, &packet.frame());
        let frame = bed.sent_one(0);
        let (from, to, message) = error_v6(&frame);
        assert_eq!((from, to), (own_v6(0), host_v6(0, 2)));
        assert_eq!(message, icmpv6::Message::TimeExceeded { code: 0, original: &packet.bytes() });
    }
    assert_eq!(bed.dropped(DropReason::TimeExceeded), 4);
    bed.assert_no_leak();
}

#[test]
fn routes_that_drop_packets_are_reported() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let routes = [
        (Hop::BLACKHOLE, DropReason::Blackhole, None, None),
        (Hop::UNREACHABLE, DropReason::Unreachable, Some(1), Some(3)),
        (Hop::PROHIBITED, DropReason::Prohibited, Some(13), Some(1)),
        (Hop::NO_ROUTE, DropReason::NoRoute, Some(0), Some(0)),
    ];
    for (hop, reason, code_v4, code_v6) in routes {
        bed.route("192.0.2.0/24".parse().expect("a prefix"), &[hop]);
        bed.route("2001:db8:9::/48".parse().expect("a prefix"), &[hop]);
        bed.receive(0, &V4::to(Ipv4Addr::new(192, 0, 2, 9)).frame());
        assert_eq!(bed.dropped(reason), 1);
        let reported = bed.sent(0).first().map(|frame| match error_v4(frame).2 {
            icmpv4::Message::Unreachable { code, .. } => code,
            other => panic!("{other:?}"),
        });
        assert_eq!(reported, code_v4);
        bed.receive(0, &V6::to("2001:db8:9::9".parse().expect("an address")).frame());
        assert_eq!(bed.dropped(reason), 2);
        let reported = bed.sent(0).first().map(|frame| match error_v6(frame).2 {
            icmpv6::Message::Unreachable { code, .. } => code,
            other => panic!("{other:?}"),
        });
        assert_eq!(reported, code_v6);
    }
    bed.receive(0, &V4::to(Ipv4Addr::new(203, 0, 113, 1)).frame());
    assert!(matches!(error_v4(&bed.sent_one(0)).2, icmpv4::Message::Unreachable { code: 0, .. }), "no route");
    bed.receive(0, &V6::to("2001:db8:8::1".parse().expect("an address")).frame());
    assert!(matches!(error_v6(&bed.sent_one(0)).2, icmpv6::Message::Unreachable { code: 0, .. }), "no route");
    assert_eq!(bed.dropped(DropReason::NoRoute), 4);
    bed.assert_no_leak();
}

#[test]
fn packets_that_must_not_be_fragmented_are_reported_with_the_mtu() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let narrow = PortConfig { mtu_bytes: 1300, ..bed.forwarder.port_config(PORTS[1]).expect("a port").clone() };
    bed.set_port(PORTS[1], narrow);
    let packet = V4::with(|header| header.do_not_fragment = true).payload(vec![9; 1281]);
    bed.receive(0, &packet.frame());
    let frame = bed.sent_one(0);
    let expected = icmpv4::Message::Unreachable { code: 4, mtu: 1300, original: &packet.bytes()[..548] };
    assert_eq!(error_v4(&frame).2, expected);
    let packet = V6::new().payload(vec![9; 1261]);
    bed.receive(0, &packet.frame());
    let frame = bed.sent_one(0);
    assert_eq!(error_v6(&frame).2, icmpv6::Message::PacketTooBig { mtu: 1300, original: &packet.bytes()[..1232] });
    assert_eq!(bed.dropped(DropReason::TooBig), 2);
    bed.receive(0, &V4::with(|header| header.do_not_fragment = true).payload(vec![9; 1280]).frame());
    bed.receive(0, &V6::new().payload(vec![9; 1260]).frame());
    assert_eq!(bed.sent(1).len(), 2, "packets that fit are forwarded");
    bed.assert_no_leak();
}

#[test]
fn icmp_errors_and_later_fragments_are_not_reported() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let expired = |change: &dyn Fn(&mut V4)| {
        let mut packet = V4::with(|header| header.ttl = 1);
        change(&mut packet);
        packet
    };
    let icmp = |kind: u8| {
        expired(&|packet| {
            packet.header.protocol = Protocol::ICMP;
            packet.payload = vec![kind, 0, 0, 0, 0, 0, 0, 0];
        })
    };
    for kind in [3, 4, 5, 11, 12, 200] {
        bed.assert_dropped(0, &icmp(kind).frame(), DropReason::TimeExceeded);
    }
    bed.assert_dropped(
        0,
        &expired(&|packet| packet.header.protocol = Protocol::ICMP).payload(vec![8]).frame(),
        DropReason::TimeExceeded,
    );
    bed.receive(0, &icmp(8).frame());
    assert_eq!(bed.sent(0).len(), 1, "a request is not an error");
    let mut later = V4::with(|header| header.ttl = 1).bytes();
    ipv4::Packet::new_checked(&mut later[..]).expect("a packet").set_fragment(false, false, 8);
    with_checksum(&mut later);
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &later), DropReason::TimeExceeded);
    let expired = |next_header, payload| {
        V6::with(|header| (header.hop_limit, header.next_header) = (1, next_header)).payload(payload)
    };
    for kind in [1, 2, 3, 4, 100, 127, 137] {
        let packet = expired(Protocol::ICMPV6, vec![kind, 0, 0, 0, 0, 0, 0, 0]);
        bed.assert_dropped(0, &packet.frame(), DropReason::TimeExceeded);
    }
    let later = expired(ipv6::FRAGMENT, vec![17, 0, 0, 8, 0, 0, 0, 1, 1, 2, 3, 4]);
    bed.assert_dropped(0, &later.frame(), DropReason::TimeExceeded);
    assert_eq!(bed.forwarder.counters().icmp_errors_sent, 1);
}

#[test]
fn errors_are_rate_limited() {
    let (rib, tables) = Rib::new().expect("memory for tables");
    let limits = Limits { icmp_errors: Rate { per_second: 10, burst: 5 }, ..Limits::default() };
    let mut bed = Testbed::new();
    bed.forwarder = Forwarder::new(Config { limits, ..Config::new(NODE) }, tables);
    bed.rib = rib;
    bed.set_port(PORTS[0], PortConfig::new(own_mac(0), MTU_BYTES).with_addresses([network(0)]));
    bed.route(network(0), &[Hop::on_link(NODE, PORTS[0])]);
    bed.learn(0, host_v4(0, 2).into(), host_mac(0, 2));
    let storm = vec![V4::new().frame(); 100];
    bed.receive_all(0, &storm);
    assert_eq!(bed.sent(0).len(), 5);
    bed.wait(Duration::from_secs(1));
    bed.receive_all(0, &storm);
    assert_eq!(bed.sent(0).len(), 5);
    let counters = bed.forwarder.counters();
    assert_eq!((counters.icmp_errors_sent, counters.icmp_errors_suppressed), (10, 190));
    assert_eq!(bed.dropped(DropReason::NoRoute), 200, "all drops are counted");
    bed.assert_no_leak();
}

fn network(port: u8) -> IpNet {
    IpNet::new(own_v4(port).into(), 24).expect("a prefix length")
}

fn echo_v4(to: Ipv4Addr, data: &[u8]) -> V4 {
    let message = icmpv4::Message::EchoRequest { identifier: 7, sequence: 3, data };
    let mut payload = vec![0; message.total_bytes()];
    message.emit(&mut payload);
    V4::with(|header| (header.destination, header.protocol, header.ttl) = (to, Protocol::ICMP, 1)).payload(payload)
}

fn echo_v6(from: Ipv6Addr, to: Ipv6Addr, data: &[u8]) -> V6 {
    let message = icmpv6::Message::EchoRequest { identifier: 7, sequence: 3, data };
    let mut payload = vec![0; message.total_bytes()];
    message.emit(&mut payload, from, to);
    let header = |header: &mut ipv6::Repr| {
        (header.source, header.destination) = (from, to);
        (header.next_header, header.hop_limit) = (Protocol::ICMPV6, 1);
    };
    V6::with(header).payload(payload)
}

#[test]
fn a_host_with_an_ipv4_link_local_address_is_answered_by_the_router_itself() {
    let mut bed = Testbed::new();
    let (link_local, own) = (Ipv4Addr::new(169, 254, 7, 2), Ipv4Addr::new(169, 254, 7, 1));
    bed.route("169.254.7.0/24".parse().expect("a prefix"), &[Hop::on_link(NODE, PortId(0))]);
    bed.route(IpAddr::from(own).into(), &[Hop::router(NODE)]);
    bed.learn(0, link_local.into(), host_mac(0, 7));
    let mut request = echo_v4(own, b"near");
    request.header.source = link_local;
    bed.receive(0, &request.frame());
    let frame = bed.sent_one(0);
    let (from, to, _) = icmp_v4(&frame);
    assert_eq!((from, to), (own, link_local));
}

#[test]
fn echo_requests_to_any_own_address_are_answered_without_a_kernel() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    for port in [0, 1] {
        for data in [&b""[..], b"x", &[7; 1400]] {
            bed.receive(0, &echo_v4(own_v4(port), data).frame());
            let frame = bed.sent_one(0);
            let (from, to, message) = icmp_v4(&frame);
            assert_eq!((from, to), (own_v4(port), host_v4(0, 2)));
            assert_eq!(message, icmpv4::Message::EchoReply { identifier: 7, sequence: 3, data });
            bed.receive(0, &echo_v6(host_v6(0, 2), own_v6(port), data).frame());
            let frame = bed.sent_one(0);
            let (from, to, message) = icmp_v6(&frame);
            assert_eq!((from, to), (own_v6(port), host_v6(0, 2)));
            assert_eq!(message, icmpv6::Message::EchoReply { identifier: 7, sequence: 3, data });
        }
    }
    let link_local: Ipv6Addr = "fe80::7".parse().expect("an address");
    let own: Ipv6Addr = "fe80::ff:fe00:0".parse().expect("an address");
    bed.learn(0, link_local.into(), host_mac(0, 7));
    bed.receive(0, &echo_v6(link_local, own, b"near").frame());
    let frame = bed.sent_one(0);
    assert_eq!((&frame[..6], icmp_v6(&frame).0), (&host_mac(0, 7).0[..], own));
    bed.assert_no_leak();
}

#[test]
fn other_packets_to_the_router_itself_are_reported() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.receive(0, &V4::to(own_v4(0)).frame());
    assert!(matches!(error_v4(&bed.sent_one(0)).2, icmpv4::Message::Unreachable { code: 3, .. }), "a port");
    bed.receive(0, &V4::with(|header| (header.destination, header.protocol) = (own_v4(1), Protocol::TCP)).frame());
    assert!(matches!(error_v4(&bed.sent_one(0)).2, icmpv4::Message::Unreachable { code: 2, .. }), "a protocol");
    bed.receive(0, &V6::to(own_v6(1)).frame());
    assert!(matches!(error_v6(&bed.sent_one(0)).2, icmpv6::Message::Unreachable { code: 4, .. }), "a port");
    bed.receive(0, &V6::with(|header| (header.destination, header.next_header) = (own_v6(1), Protocol::TCP)).frame());
    let frame = bed.sent_one(0);
    assert!(matches!(error_v6(&frame).2, icmpv6::Message::ParameterProblem { code: 1, pointer: 6, .. }));
    let mut corrupted = echo_v4(own_v4(0), b"data").bytes();
    corrupted[25] ^= 1;
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &corrupted), DropReason::NoService);
}

/// The router reassembles nothing: a kernel receives the fragments, and reassembles them.
#[test]
fn fragments_to_the_router_itself_are_dropped_and_those_to_a_kernel_delivered() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let mut first = echo_v4(own_v4(0), &[7; 1400]).bytes();
    first[6] = 0x20;
    with_checksum(&mut first);
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &first), DropReason::NoService);
    let mut later = first.clone();
    (later[6], later[7]) = (0, 176);
    with_checksum(&mut later);
    bed.assert_dropped(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &later), DropReason::NoService);
    let piece = [&[58, 0, 0, 1, 0, 0, 0, 9][..], &[7; 64]].concat();
    let to = |header: &mut ipv6::Repr| (header.destination, header.next_header) = (own_v6(0), ipv6::FRAGMENT);
    bed.assert_dropped(0, &V6::with(to).payload(piece).frame(), DropReason::NoService);
    assert_eq!((bed.sent(0).len(), bed.forwarder.counters().icmp_errors_sent), (0, 0), "silently");
    bed.route(IpAddr::from(own_v4(1)).into(), &[Hop::kernel(NODE)]);
    first[16..20].copy_from_slice(&own_v4(1).octets());
    with_checksum(&mut first);
    bed.receive(0, &framed(own_mac(0), host_mac(0, 2), EtherType::IPV4, &first));
    assert_eq!(bed.received_by_kernel(), [first]);
    bed.assert_no_leak();
}

#[test]
fn options_are_processed_and_source_routes_rejected() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.receive(0, &V4::new().options(&[7, 7, 4, 0, 0, 0, 0, 0]).frame());
    let frame = bed.sent_one(1);
    let packet = v4_of(&frame);
    assert_eq!((packet.ttl(), &packet.header()[20..28]), (63, &[7, 7, 8, 10, 0, 0, 1, 0][..]));
    bed.receive(0, &V4::new().options(&[131, 7, 4, 10, 0, 1, 2, 0]).frame());
    assert!(matches!(error_v4(&bed.sent_one(0)).2, icmpv4::Message::Unreachable { code: 5, .. }));
    bed.receive(0, &V4::new().options(&[7, 40, 4, 0]).frame());
    assert!(matches!(error_v4(&bed.sent_one(0)).2, icmpv4::Message::ParameterProblem { pointer: 21, .. }));
    assert_eq!((bed.dropped(DropReason::SourceRoute), bed.dropped(DropReason::Options)), (1, 1));
    assert_eq!(bed.sent(1).len(), 0);
    bed.assert_no_leak();
}

#[test]
fn a_packet_with_a_link_local_source_does_not_leave_its_link() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let link_local: Ipv6Addr = "fe80::7".parse().expect("an address");
    bed.learn(0, link_local.into(), host_mac(0, 7));
    bed.receive(0, &V6::with(|header| header.source = link_local).frame());
    let frame = bed.sent_one(0);
    let (from, to, message) = error_v6(&frame);
    assert!(matches!(message, icmpv6::Message::Unreachable { code: 2, .. }));
    assert_eq!((from, to), ("fe80::ff:fe00:0".parse().expect("an address"), link_local));
    assert_eq!((bed.sent(1).len(), bed.dropped(DropReason::LinkLocal)), (0, 1));
}

#[test]
fn a_kernel_gets_from_the_router_only_packets_that_it_has_not_received_itself() {
    let mut bed = Testbed::with(|config| PortConfig { has_kernel: true, ..config });
    bed.learn_hosts();
    for port in [0, 1] {
        bed.assert_dropped(0, &echo_v4(own_v4(port), b"").frame(), DropReason::KernelHasIt);
    }
    // The kernel has not received packets from another node, or from a port without a kernel.
    let kernel = Hop::kernel(NODE);
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    let packet = pool.alloc_copy(&V4::to(own_v4(0)).bytes()).expect("a buffer");
    let mut routed_packets = vec![crate::RoutedPacket { hop: kernel, flow: 1, packet }];
    forwarder.egress(*now, &mut routed_packets, pool, output);
    assert_eq!(bed.received_by_kernel(), [V4::to(own_v4(0)).bytes()]);
    let plain = PortConfig { has_kernel: false, ..bed.forwarder.port_config(PORTS[0]).expect("a port").clone() };
    bed.set_port(PORTS[0], plain);
    bed.receive(0, &V4::to(own_v4(1)).frame());
    assert_eq!(bed.received_by_kernel(), [V4::to(own_v4(1)).bytes()]);
    bed.assert_no_leak();
}

#[test]
fn packets_from_the_kernel_keep_their_ttl_and_never_return_to_it() {
    let mut bed = Testbed::with(|config| PortConfig { has_kernel: true, ..config });
    bed.learn_hosts();
    let from_kernel = |bed: &mut Testbed, bytes: &[u8]| {
        let Testbed { forwarder, pool, output, now, .. } = bed;
        let mut packets = vec![pool.alloc_copy(bytes).expect("a buffer")];
        forwarder.from_kernel(*now, &mut packets, pool, output);
    };
    let sent = V4::with(|header| (header.source, header.ttl) = (own_v4(0), 1));
    from_kernel(&mut bed, &sent.bytes());
    assert_eq!(bed.sent_one(1)[HEADER_BYTES..], sent.bytes());
    from_kernel(&mut bed, &V4::with(|header| (header.source, header.destination) = (own_v4(0), own_v4(1))).bytes());
    assert_eq!((bed.received_by_kernel().len(), bed.dropped(DropReason::KernelLoop)), (0, 1));
    let nowhere = V4::with(|header| (header.source, header.destination) = (own_v4(0), Ipv4Addr::new(192, 0, 2, 1)));
    from_kernel(&mut bed, &nowhere.bytes());
    let reported = bed.received_by_kernel();
    assert_eq!(reported.len(), 1, "an error from an address that is not the kernel's");
    assert_eq!(reported[0][12..20], [192, 0, 0, 8, 10, 0, 0, 1]);
    from_kernel(&mut bed, &[0x15; 40]);
    from_kernel(&mut bed, &[]);
    assert_eq!((bed.dropped(DropReason::Version), bed.dropped(DropReason::Truncated)), (1, 1));
    bed.assert_no_leak();
}

#[test]
fn unused_adjacency_numbers_are_rejected() {
    let mut bed = Testbed::new();
    for adjacency in [1, 9, u16::MAX] {
        let hop = Hop { node: NODE, port: PORTS[1], adjacency: AdjacencyId(adjacency) };
        bed.route("192.0.2.0/24".parse().expect("a prefix"), &[hop]);
        bed.assert_dropped(0, &V4::to(Ipv4Addr::new(192, 0, 2, 1)).frame(), DropReason::Hop);
    }
}

/// Host number of a better router on the network of port 0.
const BETTER_ROUTER: u8 = 9;

#[test]
fn redirects_are_sent_to_a_better_router_or_neighbour_and_the_packet_is_forwarded() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.learn(0, host_v4(0, BETTER_ROUTER).into(), host_mac(0, BETTER_ROUTER));
    let Testbed { forwarder, pool, output, now, .. } = &mut bed;
    let adjacency =
        forwarder.pin_adjacency(*now, PORTS[0], host_v4(0, BETTER_ROUTER).into(), pool, output).expect("room");
    let hop = Hop { node: NODE, port: PORTS[0], adjacency };
    bed.route("192.0.2.0/24".parse().expect("a prefix"), &[hop]);
    // On the fast path and on the slow path.
    let usual = V4::to([192, 0, 2, 7].into());
    let neighbour = V4::to(host_v4(0, BETTER_ROUTER));
    for (packet, ttl) in [(&usual, 63), (&usual.clone().options(&[1; 4]), 63), (&neighbour, 63)] {
        bed.receive(0, &packet.frame());
        let sent = bed.sent(0);
        assert_eq!(sent.len(), 2, "{sent:02x?}");
        let (reported, forwarded): (Vec<_>, Vec<_>) = sent.iter().partition(|frame| v4_of(frame).source() == own_v4(0));
        assert_eq!(v4_of(forwarded[0]).ttl(), ttl);
        assert_eq!(forwarded[0][..6], host_mac(0, BETTER_ROUTER).0);
        let view = v4_of(reported[0]);
        assert_eq!((view.destination(), &reported[0][..6]), (host_v4(0, 2), &host_mac(0, 2).0[..]));
        let icmpv4::Message::Redirect { code, gateway, original } =
            icmpv4::Message::parse(view.payload()).expect("one")
        else {
            panic!("{reported:02x?}");
        };
        assert_eq!((code, Ipv4Addr::from(gateway)), (1, host_v4(0, BETTER_ROUTER)));
        assert_eq!(original[16..20], packet.header.destination.octets());
    }
    assert_eq!(bed.forwarder.counters().redirects_sent, 3);
    bed.assert_no_leak();
}

#[test]
fn redirects_are_rate_limited_and_not_sent_without_a_better_first_hop() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    bed.learn(0, host_v4(0, BETTER_ROUTER).into(), host_mac(0, BETTER_ROUTER));
    let to_better_router = |source: [u8; 4]| {
        V4::with(|header| (header.source, header.destination) = (source.into(), host_v4(0, BETTER_ROUTER)))
    };
    // The sender is not on the network; then the packet leaves by another port.
    bed.receive(0, &to_better_router([198, 51, 100, 1]).frame());
    bed.receive(0, &V4::new().frame());
    assert_eq!((bed.sent(0).len(), bed.sent(1).len(), bed.forwarder.counters().redirects_sent), (1, 1, 0));
    let is_redirected = |bed: &mut Testbed| {
        bed.receive(0, &to_better_router([10, 0, 0, 2]).frame());
        bed.sent(0).len() == 2
    };
    assert_eq!((0..100).filter(|_| is_redirected(&mut bed)).count(), 20, "in a burst");
    bed.wait(Duration::from_secs(1));
    assert!(is_redirected(&mut bed));
    bed.forwarder.set_redirects(false);
    bed.wait(Duration::from_secs(1));
    assert!(!is_redirected(&mut bed));
    bed.assert_no_leak();
}

#[test]
fn redirects_name_a_router_only_by_its_link_local_address() {
    let mut bed = Testbed::new();
    bed.learn_hosts();
    let router: Ipv6Addr = "fe80::9".parse().expect("an address");
    let host = host_v6(0, u16::from(BETTER_ROUTER));
    for address in [router, host] {
        bed.learn(0, address.into(), host_mac(0, BETTER_ROUTER));
    }
    let prefixes = ["2001:db8:100::/48", "2001:db8:200::/48"].map(|prefix| prefix.parse().expect("a prefix"));
    for (prefix, gateway) in prefixes.into_iter().zip([router, host]) {
        let Testbed { forwarder, pool, output, now, .. } = &mut bed;
        let adjacency = forwarder.pin_adjacency(*now, PORTS[0], gateway.into(), pool, output).expect("room");
        bed.route(prefix, &[Hop { node: NODE, port: PORTS[0], adjacency }]);
    }
    let by_other_name = V6::to("2001:db8:200::7".parse().expect("an address"));
    bed.receive(0, &by_other_name.frame());
    assert_eq!(bed.sent(0).len(), 1, "the router's link-local address is unknown");
    let destination: Ipv6Addr = "2001:db8:100::7".parse().expect("an address");
    for (destination, target) in [(destination, router), (host, host)] {
        bed.receive(0, &V6::to(destination).frame());
        let sent = bed.sent(0);
        let (reported, forwarded): (Vec<_>, Vec<_>) =
            sent.iter().partition(|frame| v6_of(frame).source().is_unicast_link_local());
        assert_eq!((reported.len(), forwarded.len()), (1, 1), "{sent:02x?}");
        let (view, payload) = (v6_of(reported[0]), v6_of(reported[0]).payload().to_vec());
        assert_eq!((view.destination(), view.hop_limit(), payload[0]), (host_v6(0, 2), 255, 137));
        assert_eq!(
            (payload[8..24].to_vec(), payload[24..40].to_vec()),
            (target.octets().to_vec(), destination.octets().to_vec())
        );
        assert_eq!(payload[40..48], [&[2, 1][..], &host_mac(0, BETTER_ROUTER).0].concat());
        let original = V6::to(destination).bytes();
        assert_eq!(payload[48..50], [4, 1 + (original.len() / 8) as u8]);
        assert_eq!(payload[56 + 24..56 + 40], destination.octets());
        let message = icmpv6::Packet::new_checked(&payload[..]).expect("a message");
        assert!(message.verify_checksum(view.source(), view.destination()));
    }
    bed.assert_no_leak();
}
