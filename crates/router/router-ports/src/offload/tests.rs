use packet::{ethernet, tcp, udp};
use proptest::prelude::*;

use super::*;

const HOSTS_V4: [[u8; 4]; 2] = [[10, 0, 0, 1], [10, 0, 0, 2]];
const HOSTS_V6: [[u8; 16]; 2] = [[0xfd; 16], [0xfe; 16]];

/// A TCP or UDP frame with a partial checksum, and the header that describes it.
struct OffloadedFrame {
    frame: Vec<u8>,
    header: [u8; VIRTIO_HEADER_BYTES],
    transport: usize,
    field: usize,
}

fn pseudo(is_v6: bool, protocol: Protocol, bytes: usize) -> Sum {
    match is_v6 {
        true => {
            let [source, destination] = HOSTS_V6.map(Into::into);
            Sum::new().add_pseudo_v6(source, destination, protocol, bytes as u32)
        }
        false => {
            let [source, destination] = HOSTS_V4.map(Into::into);
            Sum::new().add_pseudo_v4(source, destination, protocol, bytes as u16)
        }
    }
}

/// Creates a frame; without segmentation if `segment_bytes` is 0.
fn offloaded(is_v6: bool, is_udp: bool, flags: u8, payload: &[u8], segment_bytes: u16) -> OffloadedFrame {
    let ethertype: u16 = if is_v6 { 0x86dd } else { 0x0800 };
    let mut frame = [&[2u8; 12][..], &ethertype.to_be_bytes()].concat();
    let protocol = if is_udp { Protocol::UDP } else { Protocol::TCP };
    let upper_bytes = payload.len() + if is_udp { 8 } else { 20 };
    if is_v6 {
        frame.extend([0x60, 0, 0, 0]);
        frame.extend((upper_bytes as u16).to_be_bytes());
        frame.extend([protocol.0, 64]);
        frame.extend(HOSTS_V6.as_flattened());
    } else {
        frame.extend([0x45, 0]);
        frame.extend((upper_bytes as u16 + 20).to_be_bytes());
        frame.extend([0xff, 0xff, 0x40, 0, 64, protocol.0, 0, 0]);
        frame.extend(HOSTS_V4.as_flattened());
    }
    let transport = frame.len();
    frame.extend([0, 80, 0, 81]);
    if is_udp {
        frame.extend((upper_bytes as u16).to_be_bytes());
        frame.extend([0, 0]);
    } else {
        frame.extend([0xff, 0xff, 0xff, 0, 0, 0, 0, 1, 0x50, flags, 1, 0, 0, 0, 0, 0]);
    }
    frame.extend(payload);
    if !is_v6 {
        ipv4::Packet::new_checked(&mut frame[14..]).unwrap().fill_checksum();
    }
    let field = if is_udp { 6 } else { 16 };
    let sum = pseudo(is_v6, protocol, upper_bytes).folded();
    frame[transport + field..transport + field + 2].copy_from_slice(&sum.to_be_bytes());
    let mut header = [0; VIRTIO_HEADER_BYTES];
    header[0] = FLAG_NEEDS_CHECKSUM;
    header[1] = match (segment_bytes, is_udp, is_v6) {
        (0, ..) => GSO_NONE,
        (_, true, _) => GSO_UDP,
        (_, false, true) => GSO_TCP_V6 | GSO_FLAG_ECN,
        (_, false, false) => GSO_TCP_V4,
    };
    header[4..6].copy_from_slice(&segment_bytes.to_ne_bytes());
    header[6..8].copy_from_slice(&(transport as u16).to_ne_bytes());
    header[8..10].copy_from_slice(&(field as u16).to_ne_bytes());
    OffloadedFrame { frame, header, transport, field }
}

fn segment_all(header: VirtioHeader, frame: &[u8]) -> Vec<Vec<u8>> {
    let mut segments = header.segments(frame).unwrap();
    let mut all = Vec::new();
    while let Some(bytes) = segments.next_bytes() {
        let mut part = vec![0; bytes];
        segments.write_next(frame, &mut part).unwrap();
        all.push(part);
    }
    all
}

/// Checks the IP header, and returns the bytes after it and the sum of its pseudo-header.
fn checked_upper(frame: &[u8], network: usize, is_v6: bool, protocol: Protocol) -> (Vec<u8>, Sum) {
    let upper = if is_v6 {
        let packet = ipv6::Packet::new_checked(&frame[network..]).unwrap();
        assert_eq!(packet.total_bytes(), frame.len() - network);
        packet.payload().to_vec()
    } else {
        let packet = ipv4::Packet::new_checked(&frame[network..]).unwrap();
        assert_eq!(packet.total_bytes(), frame.len() - network);
        assert!(packet.verify_checksum());
        packet.payload().to_vec()
    };
    let sum = pseudo(is_v6, protocol, upper.len());
    (upper, sum)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_segmented_stream_is_the_same_stream(
        is_v6: bool,
        flags: u8,
        has_tag: bool,
        payload in proptest::collection::vec(any::<u8>(), 2..4000),
        segment_bytes in 1..1500u16,
    ) {
        let offloaded = offloaded(is_v6, false, flags, &payload, segment_bytes);
        let (mut frame, tag_bytes) = (offloaded.frame, if has_tag { 4 } else { 0 });
        if has_tag {
            let mut tagged = vec![0; frame.len() + 4];
            insert_tag(&frame, [0x81, 0, 0, 9], &mut tagged).unwrap();
            frame = tagged;
        }
        let header = VirtioHeader::read(&offloaded.header, tag_bytes).unwrap();
        prop_assert_eq!(header.segment_bytes(), Some(segment_bytes));
        let segments = segment_all(header, &frame);
        prop_assert_eq!(segments.len(), payload.len().div_ceil(usize::from(segment_bytes)));
        let mut received = Vec::<u8>::new();
        for (number, part) in segments.iter().enumerate() {
            let (segment, pseudo) = checked_upper(part, 14 + tag_bytes, is_v6, Protocol::TCP);
            let segment = tcp::Packet::new_checked(&segment[..]).unwrap();
            prop_assert!(segment.verify_checksum(pseudo));
            prop_assert_eq!(segment.sequence(), 0xffff_ff00u32.wrapping_add(received.len() as u32));
            received.extend(segment.payload());
            let (is_first, is_last) = (number == 0, number == segments.len() - 1);
            let end_flags = tcp::Flags::FIN.0 | tcp::Flags::PSH.0;
            let dropped = if is_last { 0 } else { end_flags } | if is_first { 0 } else { tcp::Flags::CWR.0 };
            prop_assert_eq!(segment.flags().0, flags & !dropped);
            if !is_v6 {
                let packet = ipv4::Packet::new_checked(&part[14 + tag_bytes..]).unwrap();
                prop_assert_eq!(packet.identification(), 0xffffu16.wrapping_add(number as u16));
            }
        }
        prop_assert_eq!(received, payload);
    }

    #[test]
    fn segmented_datagrams_are_valid_datagrams(
        is_v6: bool,
        payload in proptest::collection::vec(any::<u8>(), 2..3000),
        segment_bytes in 1..1400u16,
    ) {
        let offloaded = offloaded(is_v6, true, 0, &payload, segment_bytes);
        let segments = segment_all(VirtioHeader::read(&offloaded.header, 0).unwrap(), &offloaded.frame);
        let mut received = Vec::<u8>::new();
        for part in &segments {
            let (datagram, pseudo) = checked_upper(part, 14, is_v6, Protocol::UDP);
            let datagram = udp::Packet::new_checked(&datagram[..]).unwrap();
            prop_assert!(datagram.verify_checksum(pseudo) && datagram.checksum() != 0);
            received.extend(datagram.payload());
        }
        prop_assert_eq!(received, payload);
    }

    #[test]
    fn a_partial_checksum_is_completed_with_and_without_a_header_and_a_complete_one_is_kept(
        is_v6: bool,
        is_udp: bool,
        payload in proptest::collection::vec(any::<u8>(), 0..200),
        padding in 0..8usize,
    ) {
        let offloaded = offloaded(is_v6, is_udp, 0x10, &payload, 0);
        let mut announced = offloaded.frame.clone();
        VirtioHeader::read(&offloaded.header, 0).unwrap().complete(&mut announced).unwrap();
        let protocol = if is_udp { Protocol::UDP } else { Protocol::TCP };
        let (upper, pseudo) = checked_upper(&announced, 14, is_v6, protocol);
        prop_assert_eq!(pseudo.add_bytes(&upper).folded(), 0xffff);
        let mut unannounced = offloaded.frame.clone();
        // The padding of a short frame is not covered.
        unannounced.extend(vec![0xa5; padding]);
        complete_unannounced(&mut unannounced);
        prop_assert_eq!(&unannounced[..announced.len()], &announced[..]);
        complete_unannounced(&mut unannounced);
        prop_assert_eq!(&unannounced[..announced.len()], &announced[..]);
        // A checksum that is wrong for another reason stays wrong, so that the receiver detects it.
        let mut wrong = announced.clone();
        wrong[offloaded.transport + offloaded.field] ^= 0x40;
        let before = wrong.clone();
        complete_unannounced(&mut wrong);
        prop_assert!(wrong == before || before == offloaded.frame);
    }

    #[test]
    fn invalid_frames_and_headers_are_refused_without_a_panic(
        mut frame in proptest::collection::vec(any::<u8>(), 0..200),
        header: [u8; VIRTIO_HEADER_BYTES],
        is_small in proptest::bool::weighted(0.9),
        ethertype in prop_oneof![Just(0x0800u16), Just(0x86dd), Just(0x8100), any::<u16>()],
    ) {
        let mut header = header;
        if is_small {
            (header[0], header[1]) = (1, header[1] % 8);
            (header[5], header[7], header[9]) = (0, 0, 0);
        }
        if frame.len() >= 16 {
            frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
            frame[14] = if ethertype == 0x0800 { 0x45 } else { 0x60 };
        }
        complete_unannounced(&mut frame.clone());
        if let Ok(header) = VirtioHeader::read(&header, 0) {
            let _ = header.complete(&mut frame.clone());
            if let Ok(mut segments) = header.segments(&frame) {
                while let Some(bytes) = segments.next_bytes() {
                    if segments.write_next(&frame, &mut vec![0; bytes]).is_none() {
                        break;
                    }
                }
            }
        }
        let mut to = vec![0; frame.len() + 4];
        prop_assert_eq!(insert_tag(&frame, [0; 4], &mut to).is_ok(), frame.len() >= ethernet::HEADER_BYTES - 2);
    }
}
