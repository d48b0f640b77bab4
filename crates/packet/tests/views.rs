//! Views of whatever bytes: they are refused, or read without a panic, and what is understood can be said again. The
//! deep search is the fuzz target `packet_views`, which does the same.

mod look;

use look::look_at;
use packet::ipv4;
use proptest::collection::vec;
use proptest::prelude::*;

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
