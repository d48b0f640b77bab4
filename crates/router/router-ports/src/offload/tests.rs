use packet::ethernet;
use proptest::prelude::*;

use super::*;

const HOSTS_V4: [[u8; 4]; 2] = [[10, 0, 0, 1], [10, 0, 0, 2]];
const HOSTS_V6: [[u8; 16]; 2] = [[0xfd; 16], [0xfe; 16]];

/// A frame of TCP or UDP whose checksum is as a sender leaves it to hardware, with the note that says so.
struct Big {
    frame: Vec<u8>,
    note: [u8; NOTE_BYTES],
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

/// `piece_bytes` of 0 is no request to cut.
fn big(is_v6: bool, is_udp: bool, flags: u8, payload: &[u8], piece_bytes: u16) -> Big {
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
    let mut note = [0; NOTE_BYTES];
    note[0] = FLAG_CHECKSUM_OPEN;
    note[1] = match (piece_bytes, is_udp, is_v6) {
        (0, ..) => CUT_NOT,
        (_, true, _) => CUT_UDP,
        (_, false, true) => CUT_TCP_V6 | CUT_FLAG_CONGESTION,
        (_, false, false) => CUT_TCP_V4,
    };
    note[4..6].copy_from_slice(&piece_bytes.to_ne_bytes());
    note[6..8].copy_from_slice(&(transport as u16).to_ne_bytes());
    note[8..10].copy_from_slice(&(field as u16).to_ne_bytes());
    Big { frame, note, transport, field }
}

fn cut(note: Note, frame: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces = note.pieces(frame).unwrap();
    let mut all = Vec::new();
    while let Some(bytes) = pieces.next_bytes(frame) {
        let mut piece = vec![0; bytes];
        pieces.take(frame, &mut piece).unwrap();
        all.push(piece);
    }
    all
}

/// Behind the IP header, which is right; and the sum of its pseudo-header.
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
    fn a_stream_that_was_cut_is_the_same_stream(
        is_v6: bool,
        flags: u8,
        has_tag: bool,
        payload in proptest::collection::vec(any::<u8>(), 2..4000),
        piece_bytes in 1..1500u16,
    ) {
        let big = big(is_v6, false, flags, &payload, piece_bytes);
        let (mut frame, room) = (big.frame, if has_tag { 4 } else { 0 });
        if has_tag {
            let mut tagged = vec![0; frame.len() + 4];
            put_tag(&frame, [0x81, 0, 0, 9], &mut tagged).unwrap();
            frame = tagged;
        }
        let note = Note::read(&big.note, room).unwrap();
        prop_assert!(note.is_to_be_cut());
        let pieces = cut(note, &frame);
        prop_assert_eq!(pieces.len(), payload.len().div_ceil(usize::from(piece_bytes)));
        let mut received = Vec::<u8>::new();
        for (number, piece) in pieces.iter().enumerate() {
            let (segment, pseudo) = checked_upper(piece, 14 + room, is_v6, Protocol::TCP);
            let segment = tcp::Packet::new_checked(&segment[..]).unwrap();
            prop_assert!(segment.verify_checksum(pseudo));
            prop_assert_eq!(segment.sequence(), 0xffff_ff00u32.wrapping_add(received.len() as u32));
            received.extend(segment.payload());
            let (is_first, is_last) = (number == 0, number == pieces.len() - 1);
            let ends = tcp::Flags::FIN.0 | tcp::Flags::PSH.0;
            let dropped = if is_last { 0 } else { ends } | if is_first { 0 } else { tcp::Flags::CWR.0 };
            prop_assert_eq!(segment.flags().0, flags & !dropped);
            if !is_v6 {
                let packet = ipv4::Packet::new_checked(&piece[14 + room..]).unwrap();
                prop_assert_eq!(packet.identification(), 0xffffu16.wrapping_add(number as u16));
            }
        }
        prop_assert_eq!(received, payload);
    }

    #[test]
    fn datagrams_that_were_cut_are_whole_datagrams(
        is_v6: bool,
        payload in proptest::collection::vec(any::<u8>(), 2..3000),
        piece_bytes in 1..1400u16,
    ) {
        let big = big(is_v6, true, 0, &payload, piece_bytes);
        let pieces = cut(Note::read(&big.note, 0).unwrap(), &big.frame);
        let mut received = Vec::<u8>::new();
        for piece in &pieces {
            let (datagram, pseudo) = checked_upper(piece, 14, is_v6, Protocol::UDP);
            let datagram = udp::Packet::new_checked(&datagram[..]).unwrap();
            prop_assert!(datagram.verify_checksum(pseudo) && datagram.checksum() != 0);
            received.extend(datagram.payload());
        }
        prop_assert_eq!(received, payload);
    }

    #[test]
    fn an_open_checksum_is_completed_with_and_without_a_note_and_a_finished_one_is_left(
        is_v6: bool,
        is_udp: bool,
        payload in proptest::collection::vec(any::<u8>(), 0..200),
        padding in 0..8usize,
    ) {
        let big = big(is_v6, is_udp, 0x10, &payload, 0);
        let mut noted = big.frame.clone();
        Note::read(&big.note, 0).unwrap().complete(&mut noted).unwrap();
        let protocol = if is_udp { Protocol::UDP } else { Protocol::TCP };
        let (upper, pseudo) = checked_upper(&noted, 14, is_v6, protocol);
        prop_assert_eq!(pseudo.add_bytes(&upper).folded(), 0xffff);
        let mut unnoted = big.frame.clone();
        // What fills a short frame up is not covered.
        unnoted.extend(vec![0xa5; padding]);
        complete_unnoted(&mut unnoted);
        prop_assert_eq!(&unnoted[..noted.len()], &noted[..]);
        complete_unnoted(&mut unnoted);
        prop_assert_eq!(&unnoted[..noted.len()], &noted[..]);
        // One that is wrong in another way was not left open: it stays wrong, and its receiver finds out.
        let mut wrong = noted.clone();
        wrong[big.transport + big.field] ^= 0x40;
        let before = wrong.clone();
        complete_unnoted(&mut wrong);
        prop_assert!(wrong == before || before == big.frame);
    }

    #[test]
    fn no_frame_and_no_note_is_too_bad_to_be_refused(
        mut frame in proptest::collection::vec(any::<u8>(), 0..200),
        note: [u8; NOTE_BYTES],
        is_small in proptest::bool::weighted(0.9),
        ethertype in prop_oneof![Just(0x0800u16), Just(0x86dd), Just(0x8100), any::<u16>()],
    ) {
        let mut note = note;
        if is_small {
            (note[0], note[1]) = (1, note[1] % 8);
            (note[5], note[7], note[9]) = (0, 0, 0);
        }
        if frame.len() >= 16 {
            frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
            frame[14] = if ethertype == 0x0800 { 0x45 } else { 0x60 };
        }
        complete_unnoted(&mut frame.clone());
        if let Ok(note) = Note::read(&note, 0) {
            let _ = note.complete(&mut frame.clone());
            if let Ok(mut pieces) = note.pieces(&frame) {
                while let Some(bytes) = pieces.next_bytes(&frame) {
                    if pieces.take(&frame, &mut vec![0; bytes]).is_err() {
                        break;
                    }
                }
            }
        }
        let mut to = vec![0; frame.len() + 4];
        prop_assert_eq!(put_tag(&frame, [0; 4], &mut to).is_ok(), frame.len() >= ethernet::HEADER_BYTES - 2);
    }
}
