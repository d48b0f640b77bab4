//! Emitted headers are byte for byte those of the protocols, and parse to the same values.

use std::net::{Ipv4Addr, Ipv6Addr};

use packet::checksum::Sum;
use packet::ethernet::{EtherType, MacAddress};
use packet::{Error, Protocol, arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, mld, ndisc, tcp, udp, vlan};

const A: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xa]);
const B: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xb]);
const A4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const B4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
const A6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const B6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 2, 3, 4, 0x1122, 0x3344);

#[test]
fn ethernet_and_vlan_round_trip() {
    let repr = ethernet::Repr { destination: B, source: A, ethertype: EtherType::VLAN };
    let mut bytes = [0; 20];
    repr.emit(&mut bytes);
    let tag = vlan::Tag { priority: 5, drop_eligible: true, id: 0xabc };
    vlan::emit(tag, EtherType::IPV6, &mut bytes[ethernet::HEADER_BYTES..]);
    let frame = ethernet::Frame::new_checked(bytes).expect("a frame");
    assert_eq!(ethernet::Repr::parse(&frame), repr);
    let network = ethernet::NetworkHeader { tag: Some(tag), ethertype: EtherType::IPV6, offset: 18 };
    assert_eq!(frame.network_header(), Ok(network));
    assert_eq!(bytes[14..18], [0xba, 0xbc, 0x86, 0xdd]);
    assert!(ethernet::Frame::new_checked(&bytes[..17]).expect("a frame").network_header().is_err(), "a truncated tag");
    bytes[12..14].copy_from_slice(&EtherType::IPV4.0.to_be_bytes());
    let mut frame = ethernet::Frame::new_checked(bytes).expect("a frame");
    frame.set_source(B);
    frame.set_destination(MacAddress::BROADCAST);
    assert_eq!(frame.network_header().map(|network| (network.ethertype, network.offset)), Ok((EtherType::IPV4, 14)));
    assert_eq!((frame.source(), frame.destination()), (B, MacAddress::BROADCAST));
}

#[test]
fn mac_addresses_round_trip_as_text() {
    assert_eq!("02:00:00:00:00:0a".parse(), Ok(A));
    assert_eq!(A.to_string(), "02:00:00:00:00:0a");
    for wrong in ["", "02:00:00:00:00", "02:00:00:00:00:0a:", "02:00:00:00:00:+a", "2:0:0:0:0:a", "02-00-00-00-00-0a"] {
        assert!(wrong.parse::<MacAddress>().is_err(), "{wrong}");
    }
    assert!(A.is_unicast() && !MacAddress::BROADCAST.is_unicast());
    assert_eq!(MacAddress::from_multicast_v6(ndisc::solicited_node(B6)).to_string(), "33:33:ff:22:33:44");
    assert_eq!(ndisc::solicited_node(B6).to_string(), "ff02::1:ff22:3344");
}

#[test]
fn arp_round_trips_and_other_hardware_is_rejected() {
    for operation in [arp::Operation::Request, arp::Operation::Reply] {
        let repr = arp::Repr { operation, sender_mac: A, sender: A4, target_mac: B, target: B4 };
        let mut bytes = [0; arp::PACKET_BYTES];
        repr.emit(&mut bytes);
        assert_eq!(arp::Packet::new_checked(bytes).map(|packet| arp::Repr::parse(&packet)), Ok(repr));
        for (at, value) in [(1, 6), (3, 1), (4, 8), (5, 16), (7, 3), (6, 1)] {
            let mut other = bytes;
            other[at] = value;
            assert!(arp::Packet::new_checked(other).is_err(), "byte {at}");
        }
        assert!(arp::Packet::new_checked(&bytes[..27]).is_err());
    }
}

fn ipv4_repr() -> ipv4::Repr {
    ipv4::Repr {
        source: A4,
        destination: B4,
        protocol: Protocol::UDP,
        ttl: 64,
        traffic_class: 0xb8,
        identification: 0x1234,
        do_not_fragment: true,
        payload_bytes: 12,
    }
}

#[test]
fn ipv4_round_trips_and_its_ttl_is_decremented() {
    let repr = ipv4_repr();
    let mut bytes = [0xee; 40];
    repr.emit(&mut bytes);
    let mut packet = ipv4::Packet::new_checked(&mut bytes[..]).expect("a packet");
    assert!(packet.verify_checksum());
    assert_eq!(ipv4::Repr::parse(&packet), repr);
    assert_eq!(packet.payload(), [0xee; 12], "the payload excludes padding");
    for ttl in (0..64).rev() {
        packet.decrement_ttl();
        assert_eq!(packet.ttl(), ttl);
        assert!(packet.verify_checksum(), "{ttl}");
    }
    packet.set_fragment(false, true, 1480);
    assert!(packet.is_fragment() && packet.more_fragments() && !packet.do_not_fragment());
    packet.set_identification(7);
    assert_eq!((packet.fragment_offset_bytes(), packet.identification()), (1480, 7));
    assert!(!packet.verify_checksum());
    packet.fill_checksum();
    assert!(packet.verify_checksum());
}

#[test]
fn invalid_ipv4_is_rejected_with_the_reason() {
    let mut good = [0; 32];
    ipv4_repr().emit(&mut good);
    let error = |at: usize, value: u8| {
        let mut bytes = good;
        bytes[at] = value;
        ipv4::Packet::new_checked(bytes).map(|_| ()).expect_err("an invalid packet")
    };
    assert_eq!(error(0, 0x65), Error::Version { protocol: "IPv4", found: 6, expected: 4 });
    assert_eq!(error(0, 0x44), Error::HeaderLength { protocol: "IPv4", bytes: 16, bytes_min: 20 });
    assert_eq!(error(0, 0x4f), Error::TotalLength { protocol: "IPv4", bytes: 32, bytes_min: 60 });
    assert_eq!(error(3, 19), Error::TotalLength { protocol: "IPv4", bytes: 19, bytes_min: 20 });
    assert_eq!(error(3, 33), Error::Truncated { protocol: "IPv4", bytes: 32, bytes_min: 33 });
    let short = ipv4::Packet::new_checked(&good[..19]).map(|_| ());
    assert_eq!(short, Err(Error::Truncated { protocol: "IPv4", bytes: 19, bytes_min: 20 }));
}

#[test]
fn ipv4_options_are_iterated_until_one_is_malformed() {
    let mut bytes = [0; 32];
    ipv4::Repr { payload_bytes: 12, ..ipv4_repr() }.emit(&mut bytes);
    bytes[0] = 0x48;
    // No operation, router alert, record route with one slot, end of option list.
    bytes[20..32].copy_from_slice(&[1, 148, 4, 0, 0, 7, 5, 4, 0, 0, 0, 7]);
    let packet = ipv4::Packet::new_checked(bytes).expect("a packet");
    assert!(packet.has_options());
    let options: Vec<_> = packet.options().collect();
    let alert = ipv4::Ipv4Option { kind: ipv4::Ipv4Option::ROUTER_ALERT, data: &[0, 0] };
    let record = ipv4::Ipv4Option { kind: ipv4::Ipv4Option::RECORD_ROUTE, data: &[4, 0, 0] };
    assert_eq!(options, [Ok(alert), Ok(record)]);
    assert!(alert.is_copied() && !record.is_copied());
    for length in [0, 1, 12] {
        let mut wrong = bytes;
        wrong[22] = length;
        let packet = ipv4::Packet::new_checked(wrong).expect("a packet");
        let malformed = Error::Malformed { protocol: "IPv4", what: "option" };
        assert_eq!(packet.options().collect::<Vec<_>>().last(), Some(&Err(malformed)), "{length}");
    }
}

fn ipv6_repr() -> ipv6::Repr {
    ipv6::Repr {
        source: A6,
        destination: B6,
        next_header: Protocol::TCP,
        hop_limit: 2,
        traffic_class: 0xa5,
        flow_label: 0xf_1234,
        payload_bytes: 24,
    }
}

#[test]
fn ipv6_round_trips_and_its_hop_limit_is_decremented() {
    let repr = ipv6_repr();
    let mut bytes = [0; 70];
    repr.emit(&mut bytes);
    let mut packet = ipv6::Packet::new_checked(&mut bytes[..]).expect("a packet");
    assert_eq!(ipv6::Repr::parse(&packet), repr);
    assert_eq!((packet.payload().len(), packet.total_bytes()), (24, 64));
    packet.decrement_hop_limit();
    assert_eq!(packet.hop_limit(), 1);
    assert!(ipv6::Packet::new_checked(&bytes[..63]).is_err());
    bytes[0] = 0x4a;
    assert!(ipv6::Packet::new_checked(&bytes[..]).is_err());
}

/// Returns a packet with these extension headers of 8 bytes each.
fn with_extensions(headers: &[(Protocol, [u8; 6])], last: Protocol) -> Vec<u8> {
    let mut bytes = vec![0; 40 + headers.len() * 8 + 4];
    let first = headers.first().map_or(last, |(kind, _)| *kind);
    let repr = ipv6::Repr { next_header: first, payload_bytes: headers.len() * 8 + 4, ..ipv6_repr() };
    repr.emit(&mut bytes);
    for (index, (_, rest)) in headers.iter().enumerate() {
        let next = headers.get(index + 1).map_or(last, |(kind, _)| *kind);
        let at = 40 + index * 8;
        bytes[at] = next.0;
        bytes[at + 2..at + 8].copy_from_slice(rest);
    }
    bytes
}

#[test]
fn extension_headers_are_followed_to_the_payload() {
    let routing = [0, 3, 0, 0, 0, 0];
    let fragment = [0, 9, 0, 0, 0, 77];
    let bytes = with_extensions(
        &[(ipv6::HOP_BY_HOP, [0; 6]), (ipv6::ROUTING, routing), (ipv6::FRAGMENT, [0, 1, 0, 0, 0, 77])],
        Protocol::UDP,
    );
    let upper = ipv6::Packet::new_checked(&bytes).expect("a packet").upper_layer().expect("headers");
    assert_eq!((upper.protocol, upper.offset), (Protocol::UDP, 24));
    assert!(upper.has_hop_by_hop && upper.has_segments_left);
    assert_eq!(upper.fragment, Some(ipv6::Fragment { offset_bytes: 0, more: true, identification: 77 }));
    // The payload of a later fragment begins with no header.
    let bytes = with_extensions(&[(ipv6::FRAGMENT, fragment), (ipv6::HOP_BY_HOP, [0; 6])], Protocol::UDP);
    let upper = ipv6::Packet::new_checked(&bytes).expect("a packet").upper_layer().expect("headers");
    assert_eq!((upper.protocol, upper.offset), (ipv6::HOP_BY_HOP, 8));
    assert_eq!(upper.fragment, Some(ipv6::Fragment { offset_bytes: 8, more: true, identification: 77 }));
    // An authentication header counts its length in other units.
    let bytes = with_extensions(&[(ipv6::AUTHENTICATION, [0; 6])], Protocol::TCP);
    let upper = ipv6::Packet::new_checked(&bytes).expect("a packet").upper_layer().expect("headers");
    assert_eq!((upper.protocol, upper.offset), (Protocol::TCP, 8));
}

#[test]
fn too_many_or_malformed_extension_headers_are_rejected() {
    let many = vec![(ipv6::DESTINATION_OPTIONS, [0; 6]); ipv6::EXTENSIONS_MAX + 1];
    let error = |bytes: &[u8]| {
        ipv6::Packet::new_checked(bytes).expect("a packet").upper_layer().expect_err("malformed headers")
    };
    let bytes = with_extensions(&many, Protocol::UDP);
    assert_eq!(error(&bytes), Error::Headers { protocol: "IPv6", headers_max: ipv6::EXTENSIONS_MAX });
    let bytes = with_extensions(&many[1..], Protocol::UDP);
    assert!(ipv6::Packet::new_checked(bytes).expect("a packet").upper_layer().is_ok());
    let bytes = with_extensions(&[(ipv6::ROUTING, [0; 6]), (ipv6::HOP_BY_HOP, [0; 6])], Protocol::UDP);
    assert!(matches!(error(&bytes), Error::Malformed { .. }));
    let mut bytes = with_extensions(&[(ipv6::ROUTING, [0; 6])], Protocol::UDP);
    bytes[41] = 1;
    assert!(matches!(error(&bytes), Error::Truncated { bytes: 12, bytes_min: 16, .. }));
    let bytes = with_extensions(&[], ipv6::FRAGMENT);
    assert!(matches!(error(&bytes), Error::Truncated { bytes: 4, bytes_min: 8, .. }));
}

#[test]
fn checksums_of_udp_and_tcp_cover_their_addresses() {
    let pseudo = Sum::new().add_pseudo_v4(A4, B4, Protocol::UDP, 15);
    let mut bytes = *b"\x00\x35\xf0\x0f\x00\x0f..payload";
    let mut packet = udp::Packet::new_checked(&mut bytes[..]).expect("a datagram");
    packet.fill_checksum(pseudo);
    assert!(packet.verify_checksum(pseudo) && packet.payload() == b"payload");
    assert_eq!((packet.source_port(), packet.destination_port()), (53, 0xf00f));
    assert!(!packet.verify_checksum(Sum::new().add_pseudo_v4(A4, A4, Protocol::UDP, 15)));
    bytes[4..6].copy_from_slice(&7_u16.to_be_bytes());
    assert!(udp::Packet::new_checked(bytes).is_err(), "shorter than its header");

    let pseudo = Sum::new().add_pseudo_v6(A6, B6, Protocol::TCP, 27);
    let mut bytes = *b"\x00\x50\x9c\x40\xde\xad\xbe\xef....\x50\x18......payload";
    let mut packet = tcp::Packet::new_checked(&mut bytes[..]).expect("a segment");
    assert_eq!((packet.source_port(), packet.destination_port(), packet.sequence()), (80, 40_000, 0xdead_beef));
    packet.fill_checksum(pseudo);
    assert!(packet.verify_checksum(pseudo) && packet.payload() == b"payload");
    packet.set_sequence(1);
    packet.set_flags(packet.flags().without(tcp::Flags::PSH));
    assert!(packet.flags().has(tcp::Flags::ACK) && !packet.flags().has(tcp::Flags::PSH));
    assert!(!packet.verify_checksum(pseudo));
    packet.fill_checksum(pseudo);
    assert!(packet.verify_checksum(pseudo) && packet.sequence() == 1);
    bytes[12] = 0x40;
    assert!(tcp::Packet::new_checked(bytes).is_err(), "a header of 16 bytes");
    bytes[12] = 0x70;
    assert!(tcp::Packet::new_checked(bytes).is_err(), "a header beyond the segment");
}

#[test]
fn icmp_messages_round_trip() {
    let original = &[0x45, 0, 0, 28][..];
    let messages = [
        icmpv4::Message::EchoRequest { identifier: 1, sequence: 2, data: b"abc" },
        icmpv4::Message::EchoReply { identifier: 0xffff, sequence: 0, data: b"" },
        icmpv4::Message::Unreachable { code: icmpv4::Unreachable::FragmentationNeeded as u8, mtu: 1400, original },
        icmpv4::Message::Redirect { code: 1, gateway: A4.octets(), original },
        icmpv4::Message::TimeExceeded { code: 0, original },
        icmpv4::Message::ParameterProblem { pointer: 20, original },
    ];
    for message in messages {
        let mut bytes = [0xee; 16];
        message.emit(&mut bytes);
        let (bytes, rest) = bytes.split_at_mut(message.total_bytes());
        assert!(rest.iter().all(|byte| *byte == 0xee), "bytes behind the message are unchanged");
        assert_eq!(icmpv4::Message::parse(bytes), Ok(message));
        let is_error = !matches!(message, icmpv4::Message::EchoRequest { .. } | icmpv4::Message::EchoReply { .. });
        assert_eq!(icmpv4::Packet::new_checked(&bytes).map(|packet| packet.is_error()), Ok(is_error));
        bytes[5] ^= 1;
        assert_eq!(icmpv4::Message::parse(bytes), Err(Error::Checksum { protocol: "ICMP" }));
    }
    let messages = [
        icmpv6::Message::Unreachable { code: icmpv6::Unreachable::Address as u8, original },
        icmpv6::Message::PacketTooBig { mtu: 1280, original },
        icmpv6::Message::TimeExceeded { code: 0, original },
        icmpv6::Message::ParameterProblem { code: 1, pointer: 6, original },
        icmpv6::Message::EchoRequest { identifier: 7, sequence: 8, data: b"data" },
        icmpv6::Message::EchoReply { identifier: 7, sequence: 8, data: b"data" },
    ];
    for message in messages {
        let mut bytes = [0; 12];
        message.emit(&mut bytes, A6, B6);
        assert_eq!(icmpv6::Message::parse(&bytes, A6, B6), Ok(message));
        assert_eq!(icmpv6::Message::parse(&bytes, A6, A6), Err(Error::Checksum { protocol: "ICMPv6" }));
        let is_error = !matches!(message, icmpv6::Message::EchoRequest { .. } | icmpv6::Message::EchoReply { .. });
        assert_eq!(icmpv6::Packet::new_checked(bytes).map(|packet| packet.is_error()), Ok(is_error));
    }
}

#[test]
fn neighbour_discovery_round_trips() {
    let prefix =
        ndisc::Prefix { address: B6, bits: 64, on_link: true, autonomous: false, valid_s: 86_400, preferred_s: 3_600 };
    let messages = [
        ndisc::Message::RouterSolicitation { source_mac: Some(A) },
        ndisc::Message::RouterSolicitation { source_mac: None },
        ndisc::Message::RouterAdvertisement {
            hop_limit: 64,
            lifetime_s: 1800,
            source_mac: Some(A),
            mtu: Some(1400),
            prefix: Some(prefix),
        },
        ndisc::Message::NeighbourSolicitation { target: B6, source_mac: Some(A) },
        ndisc::Message::NeighbourSolicitation { target: B6, source_mac: None },
        ndisc::Message::NeighbourAdvertisement {
            target: B6,
            is_router: true,
            solicited: false,
            override_known: true,
            target_mac: Some(B),
        },
    ];
    for message in messages {
        let mut bytes = [0; ndisc::MESSAGE_BYTES_MAX];
        let length = message.emit(&mut bytes, A6, B6);
        assert_eq!(ndisc::Message::parse(&bytes[..length], A6, B6), Ok(message));
        assert!(ndisc::Message::parse(&bytes[..length], B6, B6).is_err(), "the checksum covers the addresses");
    }
}

#[test]
fn malformed_neighbour_discovery_is_rejected() {
    let parse_with_checksum = |mut bytes: Vec<u8>| {
        bytes[2..4].fill(0);
        let checksum = icmpv6::pseudo(A6, B6, bytes.len()).add_bytes(&bytes).checksum();
        bytes[2..4].copy_from_slice(&checksum.to_be_bytes());
        ndisc::Message::parse(&bytes, A6, B6)
    };
    let mut good = vec![0; 32];
    ndisc::Message::NeighbourSolicitation { target: B6, source_mac: Some(A) }.emit(&mut good, A6, B6);
    assert!(parse_with_checksum(good.clone()).is_ok());
    for (at, value, what) in
        [(25, 0, "an option of length 0"), (25, 2, "an option beyond the message"), (1, 1, "an unknown code")]
    {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert!(parse_with_checksum(bytes).is_err(), "{what}");
    }
    let mut bytes = good.clone();
    bytes[8] = 0xff;
    assert!(parse_with_checksum(bytes).is_err(), "a multicast target");
    assert!(parse_with_checksum(good[..30].to_vec()).is_err(), "a truncated option");
    assert!(parse_with_checksum(good[..20].to_vec()).is_err(), "a truncated target");
    let mut other = good;
    other[0] = 200;
    assert_eq!(parse_with_checksum(other), Err(Error::Kind { protocol: "ND", kind: 200 }));
}

#[test]
fn a_listener_report_matches_rfc_3810() {
    let groups = [ndisc::solicited_node(A6), ndisc::solicited_node(B6)];
    let mut bytes = [0xee; 100];
    let length = mld::emit_report(&mut bytes, A6, mld::RecordType::ChangeToExclude, &groups);
    assert_eq!((length, mld::payload_bytes(2), bytes[length]), (56, 56, 0xee));
    assert_eq!(bytes[..8], [58, 0, 5, 2, 0, 0, 1, 0], "router alert, and PadN of two bytes");
    let message = &bytes[8..length];
    assert!(icmpv6::Packet::new_checked(message).expect("a message").verify_checksum(A6, mld::ALL_ROUTERS));
    assert_eq!((message[0], message[1], &message[4..8]), (143, 0, &[0, 0, 0, 2][..]));
    for (record, group) in message[8..].chunks(20).zip(groups) {
        assert_eq!((&record[..4], &record[4..]), (&[4, 0, 0, 0][..], &group.octets()[..]));
    }
    let header = ipv6::Repr {
        source: A6,
        destination: mld::ALL_ROUTERS,
        next_header: ipv6::HOP_BY_HOP,
        hop_limit: mld::HOP_LIMIT,
        traffic_class: 0,
        flow_label: 0,
        payload_bytes: length,
    };
    let mut packet = vec![0; header.total_bytes()];
    header.emit(&mut packet);
    packet[ipv6::HEADER_BYTES..].copy_from_slice(&bytes[..length]);
    let upper = ipv6::Packet::new_checked(&packet[..]).expect("a packet").upper_layer().expect("its upper layer");
    assert_eq!((upper.protocol, upper.offset), (Protocol::ICMPV6, 8));
    let many = vec![A6; 100];
    let mut bytes = vec![0; mld::payload_bytes(100)];
    assert_eq!(mld::emit_report(&mut bytes, A6, mld::RecordType::ModeIsExclude, &many), 16 + 20 * mld::GROUPS_MAX);
}
