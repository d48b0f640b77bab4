use proptest::prelude::*;

use super::*;

/// Returns a TCP or UDP packet with consistent lengths. Its checksums are not set.
fn packet(is_v4: bool, is_udp: bool, payload: &[u8]) -> Vec<u8> {
    let header = if is_udp { udp::HEADER_BYTES } else { tcp::HEADER_BYTES };
    let upper_bytes = (header + payload.len()) as u16;
    let protocol = if is_udp { Protocol::UDP.0 } else { Protocol::TCP.0 };
    let mut bytes = if is_v4 {
        let [high, low] = (upper_bytes + 20).to_be_bytes();
        vec![0x45, 0, high, low, 0, 7, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]
    } else {
        let [high, low] = upper_bytes.to_be_bytes();
        [&[0x60, 0, 0, 0, high, low, protocol, 64][..], &[0xfd; 32]].concat()
    };
    let [high, low] = upper_bytes.to_be_bytes();
    bytes.extend([0, 80, 0, 81]);
    match is_udp {
        true => bytes.extend([high, low, 0, 0]),
        false => bytes.extend([0xff, 0xff, 0xff, 0xf0, 0, 0, 0, 1, 0x50, 0x99, 1, 0, 0, 0, 0, 0]),
    }
    bytes.extend(payload);
    bytes
}

fn split(packet: &[u8], segment_bytes: u16) -> Option<Vec<Vec<u8>>> {
    let mut segments = Segmentation::of(packet, segment_bytes)?.split(0);
    let mut all = Vec::new();
    while let Some(bytes) = segments.next_bytes() {
        let mut segment = vec![0; bytes];
        segments.write_next(packet, &mut segment)?;
        all.push(segment);
    }
    Some(all)
}

/// Returns whether lengths and checksums of a packet are right.
fn is_valid(packet: &[u8]) -> bool {
    let Some(whole) = Segmentation::of(packet, u16::MAX) else { return false };
    let pseudo = whole.pseudo_sum(packet).unwrap();
    let is_header_valid = !whole.is_v4() || ipv4::Packet::new_checked(packet).unwrap().verify_checksum();
    is_header_valid && pseudo.add_bytes(&packet[whole.transport..]).folded() == 0xffff
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn segments_are_valid_packets_with_the_same_payload(
        is_v4: bool,
        is_udp: bool,
        payload in proptest::collection::vec(any::<u8>(), 1..3000),
        segment_bytes in 1..1500u16,
    ) {
        let packet = packet(is_v4, is_udp, &payload);
        let segmentation = Segmentation::of(&packet, segment_bytes).unwrap();
        let segments = split(&packet, segment_bytes).unwrap();
        prop_assert_eq!(segments.len(), segmentation.segments());
        let headers_bytes = segmentation.headers_bytes();
        let mut received = Vec::<u8>::new();
        for segment in &segments {
            prop_assert!(is_valid(segment), "{:02x?}", segment);
            prop_assert!(segment.len() <= headers_bytes + usize::from(segment_bytes));
            received.extend(&segment[headers_bytes..]);
        }
        prop_assert_eq!(received, payload);
    }

    #[test]
    fn a_partial_checksum_completes_to_a_valid_packet(
        is_v4: bool,
        is_udp: bool,
        payload in proptest::collection::vec(any::<u8>(), 1..200),
    ) {
        let mut packet = packet(is_v4, is_udp, &payload);
        let segmentation = Segmentation::of(&packet, 1).unwrap();
        segmentation.set_partial_checksum(&mut packet).unwrap();
        if is_v4 {
            ipv4::Packet::new_checked(&mut packet[..]).unwrap().fill_checksum();
        }
        let (start, field) = segmentation.checksum_position();
        crate::checksum::complete_partial(&mut packet, start, field, is_udp).unwrap();
        prop_assert!(is_valid(&packet));
    }

    #[test]
    fn inconsistent_headers_are_refused_and_never_read_or_written_beyond_the_packet(
        is_v4: bool,
        is_udp: bool,
        payload in proptest::collection::vec(any::<u8>(), 0..100),
        changes in proptest::collection::vec((0..80usize, any::<u8>()), 0..4),
        cut in 0..90usize,
        segment_bytes in 0..50u16,
    ) {
        let mut packet = packet(is_v4, is_udp, &payload);
        let is_changed = !changes.is_empty();
        for (at, value) in changes {
            if let Some(byte) = packet.get_mut(at) {
                *byte = value;
            }
        }
        let length = packet.len();
        packet.truncate(length - cut.saturating_sub(60).min(length));
        let segments = split(&packet, segment_bytes);
        if !is_changed {
            let is_whole = packet.len() == length && !payload.is_empty() && segment_bytes > 0;
            prop_assert_eq!(segments.is_some(), is_whole);
        }
        // What is accepted has as many bytes of payload as the packet.
        if let (Some(segments), Some(segmentation)) = (segments, Segmentation::of(&packet, segment_bytes)) {
            let payload_bytes: usize = segments.iter().map(|segment| segment.len() - segmentation.headers_bytes).sum();
            prop_assert_eq!(payload_bytes, packet.len() - segmentation.headers_bytes);
        }
    }
}

#[test]
fn fragments_and_other_protocols_are_not_segmented() {
    let whole = packet(true, false, &[1; 100]);
    for (at, value) in [(6, 0x20), (7, 1), (9, 1)] {
        let mut changed = whole.clone();
        changed[at] = value;
        assert_eq!(Segmentation::of(&changed, 50), None, "byte {at}");
    }
    let mut padded = whole.clone();
    padded.push(0);
    assert_eq!(Segmentation::of(&padded, 50), None);
    assert_eq!(Segmentation::of(&whole, 0), None);
    assert_eq!(Segmentation::of(&packet(true, false, &[]), 50), None);
    assert!(Segmentation::of(&whole, 50).is_some_and(|found| found.segments() == 2 && found.has_cwr(&whole)));
}
