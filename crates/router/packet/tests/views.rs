//! Views of arbitrary bytes reject them or read them without a panic, and what was parsed can be emitted again. The
//! fuzz target `packet_views` searches deeper with the same checks.

mod exercise;

use std::net::{Ipv4Addr, Ipv6Addr};

use exercise::exercise;
use packet::ethernet::{EtherType, MacAddress};
use packet::{Protocol, arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, ndisc, vlan};
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn views_reject_arbitrary_bytes_or_read_them_without_a_panic(
        mut bytes in vec(any::<u8>(), 0..120),
        version in prop_oneof![Just(0x45_u8), Just(0x46), Just(0x4f), Just(0x60)],
        length: u8,
    ) {
        exercise(&bytes);
        // More like a packet: the correct version and a plausible length.
        if bytes.len() > 6 {
            bytes[0] = version;
            bytes[2..4].copy_from_slice(&[0, length % 128]);
            bytes[4..6].copy_from_slice(&[0, length % 128]);
            exercise(&bytes);
        }
    }

    #[test]
    fn setters_keep_a_checked_view_valid(
        mut bytes in vec(any::<u8>(), 60..120),
        words: [u16; 2],
        at in 0..8000_usize,
    ) {
        bytes[0] = 0x45 + (words[0] % 5) as u8;
        bytes[2..4].copy_from_slice(&60_u16.to_be_bytes());
        let mut packet = ipv4::Packet::new_checked(&mut bytes[..]).expect("a packet");
        packet.set_identification(words[1]);
        packet.set_fragment(words[0] & 1 == 0, words[0] & 2 == 0, at * 8);
        packet.fill_checksum();
        prop_assert!(packet.verify_checksum());
        if packet.ttl() > 0 {
            packet.decrement_ttl();
            prop_assert!(packet.verify_checksum());
        }
        prop_assert!(ipv4::Packet::new_checked(&bytes[..]).is_ok());
    }
}

/// Returns valid packets of every protocol, from the Ethernet header on.
fn whole_packets() -> Vec<Vec<u8>> {
    let (a, b) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(198, 51, 100, 2));
    let (a6, b6) = (Ipv6Addr::from_bits(0x2001_0db8 << 96 | 1), Ipv6Addr::from_bits(0xfe80 << 112 | 2));
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    let framed = |ethertype: EtherType, is_tagged: bool, packet: &[u8]| {
        let mut bytes = vec![0; 14 + if is_tagged { 4 } else { 0 }];
        let outer = if is_tagged { EtherType::VLAN } else { ethertype };
        ethernet::Repr { destination: mac, source: mac, ethertype: outer }.emit(&mut bytes);
        if is_tagged {
            vlan::emit(vlan::Tag::from_bits(0x2007), ethertype, &mut bytes[14..]);
        }
        [&bytes[..], packet].concat()
    };
    let ipv4 = |protocol, options: usize, payload: &[u8]| {
        let mut bytes = vec![1; 20 + options];
        let (ttl, identification, payload_bytes) = (3, 1, options + payload.len());
        let repr = ipv4::Repr {
            source: a,
            destination: b,
            protocol,
            ttl,
            traffic_class: 0,
            identification,
            do_not_fragment: false,
            payload_bytes,
        };
        repr.emit(&mut bytes);
        bytes[0] += (options / 4) as u8;
        framed(EtherType::IPV4, options > 0, &[&bytes[..], payload].concat())
    };
    let ipv6 = |next_header, payload: &[u8]| {
        let mut bytes = vec![0; 40];
        let (hop_limit, payload_bytes) = (255, payload.len());
        let (traffic_class, flow_label) = (0, 0);
        let repr = ipv6::Repr {
            source: a6,
            destination: b6,
            next_header,
            hop_limit,
            traffic_class,
            flow_label,
            payload_bytes,
        };
        repr.emit(&mut bytes);
        framed(EtherType::IPV6, false, &[&bytes[..], payload].concat())
    };
    let mut echo = [0; 16];
    icmpv4::Message::EchoRequest { identifier: 1, sequence: 1, data: b"12345678" }.emit(&mut echo);
    let mut too_big = [0; 16];
    icmpv6::Message::PacketTooBig { mtu: 1280, original: b"12345678" }.emit(&mut too_big, a6, b6);
    let mut solicitation = [0; 32];
    ndisc::Message::NeighbourSolicitation { target: b6, source_mac: Some(mac) }.emit(&mut solicitation, a6, b6);
    let mut request = [0; 28];
    let (sender_mac, target_mac) = (mac, MacAddress::default());
    arp::Repr { operation: arp::Operation::Request, sender_mac, sender: a, target_mac, target: b }.emit(&mut request);
    let extended =
        [&[60, 0, 0, 0, 0, 0, 0, 0, 44, 0, 1, 0, 0, 0, 0, 0, 17, 0, 0, 1, 0, 0, 0, 9][..], &[0; 12]].concat();
    vec![
        framed(EtherType::ARP, false, &request),
        ipv4(Protocol::ICMP, 0, &echo),
        ipv4(Protocol::UDP, 8, &[0, 1, 0, 2, 0, 12, 0, 0, 1, 2, 3, 4]),
        ipv4(Protocol::TCP, 0, &[&[0; 12][..], &[0x60, 2], &[0; 12]].concat()),
        ipv6(ipv6::HOP_BY_HOP, &extended),
        ipv6(Protocol::ICMPV6, &too_big),
        ipv6(Protocol::ICMPV6, &solicitation),
    ]
}

/// Changes a few bytes, and sometimes truncates or extends the packet.
fn corrupt(bytes: &mut Vec<u8>, mut word: u64) {
    let length = bytes.len() as u64;
    let mut draw = |below: u64| {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 33) % below
    };
    for _ in 0..=draw(4) {
        // Values at which lengths and counts are prone to errors, or random ones.
        let values = [0, 1, 4, 8, 0x7f, 0x80, 0xff, draw(256) as u8, draw(256) as u8, draw(256) as u8];
        bytes[draw(length) as usize] = values[draw(10) as usize];
    }
    match draw(8) {
        0 => bytes.truncate(draw(length) as usize),
        1 => bytes.resize((length + draw(64)) as usize, draw(256) as u8),
        _ => {}
    }
}

fn exercise_corrupted_packets(packets: u64) {
    let whole = whole_packets();
    whole.iter().for_each(|bytes| exercise(bytes));
    let mut bytes = Vec::new();
    for number in 0..packets {
        bytes.clear();
        bytes.extend_from_slice(&whole[(number % whole.len() as u64) as usize]);
        corrupt(&mut bytes, number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        exercise(&bytes);
    }
}

#[test]
fn corrupted_packets_cause_no_panic() {
    exercise_corrupted_packets(100_000);
}

#[test]
#[ignore = "takes minutes; runs in ./x exam"]
fn a_hundred_million_corrupted_packets_cause_no_panic() {
    exercise_corrupted_packets(100_000_000);
}
