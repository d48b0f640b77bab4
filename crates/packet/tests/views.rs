//! Views of whatever bytes: they are refused, or read without a panic. The deep search is the fuzz target
//! `packet_views`, which does the same.

use packet::{arp, ethernet, flow, icmpv4, icmpv6, ipv4, ipv6, ndisc, tcp, udp, vlan};
use proptest::collection::vec;
use proptest::prelude::*;

/// Every accessor of every view that takes the bytes.
fn look_at(bytes: &[u8]) {
    if let Ok(frame) = ethernet::Frame::new_checked(bytes) {
        let _ = (ethernet::Repr::parse(&frame), frame.network(), frame.payload());
    }
    if let Ok(packet) = vlan::Packet::new_checked(bytes) {
        let _ = (packet.tag(), packet.ethertype(), packet.payload());
    }
    let _ = arp::Packet::new_checked(bytes).map(|packet| arp::Repr::parse(&packet));
    if let Ok(packet) = ipv4::Packet::new_checked(bytes) {
        let _ = (ipv4::Repr::parse(&packet), packet.checksum_is_right(), flow::hash_v4(&packet, 1));
        assert!(packet.options().count() <= 40);
        assert_eq!(packet.header().len() + packet.payload().len(), packet.total_bytes());
    }
    if let Ok(packet) = ipv6::Packet::new_checked(bytes) {
        let _ = (ipv6::Repr::parse(&packet), flow::hash_v6(&packet, 1));
        if let Ok(upper) = packet.upper() {
            assert!(upper.offset <= packet.payload().len());
        }
        let (source, destination) = (packet.source(), packet.destination());
        let _ = icmpv6::Message::parse(packet.payload(), source, destination);
        let _ = ndisc::Message::parse(packet.payload(), source, destination);
    }
    let _ = icmpv4::Message::parse(bytes);
    if let Ok(packet) = udp::Packet::new_checked(bytes) {
        let _ = (udp::Repr::parse(&packet), packet.checksum_is_right(packet::checksum::Sum::new()));
    }
    if let Ok(packet) = tcp::Packet::new_checked(bytes) {
        let _ = (tcp::Repr::parse(&packet), packet.options(), packet.payload());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn views_of_any_bytes_are_refused_or_read_without_a_panic(
        mut bytes in vec(any::<u8>(), 0..120),
        version in prop_oneof![Just(0x45_u8), Just(0x46), Just(0x4f), Just(0x60)],
        length: u8,
    ) {
        look_at(&bytes);
        // Nearer to a packet: the version right, the length about right.
        if bytes.len() > 6 {
            bytes[0] = version;
            bytes[2..4].copy_from_slice(&[0, length % 128]);
            bytes[4..6].copy_from_slice(&[0, length % 128]);
            look_at(&bytes);
        }
    }

    #[test]
    fn setters_leave_a_checked_view_right(
        mut bytes in vec(any::<u8>(), 60..120),
        words: [u16; 4],
        at in 0..8000_usize,
    ) {
        bytes[0] = 0x45 + (words[0] % 5) as u8;
        bytes[2..4].copy_from_slice(&60_u16.to_be_bytes());
        let mut packet = ipv4::Packet::new_checked(&mut bytes[..]).expect("a packet");
        packet.set_ttl(words[1] as u8);
        packet.set_traffic_class(words[2] as u8);
        packet.set_identification(words[3]);
        packet.set_fragment(words[0] & 1 == 0, words[0] & 2 == 0, at * 8);
        packet.set_total_bytes(usize::from(words[1] % 20) + 40);
        packet.fill_checksum();
        prop_assert!(packet.checksum_is_right());
        if packet.ttl() > 0 {
            packet.decrement_ttl();
            prop_assert!(packet.checksum_is_right());
        }
        prop_assert!(ipv4::Packet::new_checked(&bytes[..]).is_ok());
    }
}
