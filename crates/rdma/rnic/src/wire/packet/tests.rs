use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::wire::{Operation, Service, UDP_PORT};

const DATAGRAM: Encapsulation = Encapsulation {
    addresses: IpAddresses::V4 {
        source: Ipv4Addr::new(10, 0, 0, 1),
        destination: Ipv4Addr::new(10, 0, 0, 2),
        identification: 0,
        dont_fragment: true,
    },
    source_port: 0xc000,
    destination_port: UDP_PORT,
};

fn emitted(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0xee; header.packet_bytes()];
    let payload_at = header.emit(&mut packet).unwrap();
    packet[payload_at..payload_at + payload.len()].copy_from_slice(payload);
    header.seal(&mut packet, Some(&DATAGRAM));
    packet
}

fn plain(operation: Operation, payload_bytes: u32) -> Header {
    Header { payload_bytes, ..Header::bare(Service::Rc, operation, QpNumber(0x12_3456), Psn::new(0x00ab_cdef)) }
}

/// Field by field, as IBA 9.2 draws the headers.
#[test]
fn a_write_with_immediate_is_encoded_as_in_the_infiniband_specification() {
    let header = Header {
        ack_request: true,
        solicited: true,
        reth: Some(Reth { address: 0x0102_0304_0506_0708, key: RKey(0x1112_1314), bytes: 5 }),
        immediate: Some(Immediate::Data(0x2122_2324)),
        ..plain(Operation::WriteOnly, 5)
    };
    let packet = emitted(&header, b"hello");
    #[rustfmt::skip]
    let expected = [
        11, 0x80 | 0x40 | 3 << 4, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef,
        1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 5,
        0x21, 0x22, 0x23, 0x24,
        b'h', b'e', b'l', b'l', b'o', 0, 0, 0,
    ];
    assert_eq!(packet[..expected.len()], expected);
    assert_eq!(packet.len(), expected.len() + ICRC_BYTES);
}

#[test]
fn the_extension_is_encoded_as_documented() {
    let header = Header {
        aeth: Some(Aeth { syndrome: Syndrome::Ack { credit_code: 31 }, msn: 0x0a_0b0c }),
        placement: Some(PlacementHeader { message: 1, packet: 2, sent: 3 }),
        sack: Some(SelectiveAck {
            expected: Psn::new(0x11_1111),
            newest: Psn::new(0x22_2222),
            arrived: 1 << 127 | 1,
            marked: 0x3333,
            echo: 0x4444,
        }),
        ..plain(Operation::Acknowledge, 0)
    };
    let packet = emitted(&header, &[]);
    #[rustfmt::skip]
    let expected = [
        17, 0x41, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0x03, 0xab, 0xcd, 0xef,
        0x1f, 0x0a, 0x0b, 0x0c,
        0, 0, 1, 0, 0, 2, 0, 3,
        0x11, 0x11, 0x11, 0x22, 0x22, 0x22, 0x33, 0x33, 0x44, 0x44, 0, 0,
        0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
    ];
    assert_eq!(packet[..expected.len()], expected);
}

/// The packets whose captured checksums are tested in `icrc`.
#[test]
fn captured_packets_are_decoded() {
    let mut notification = [0; 32];
    notification[..9].copy_from_slice(&[0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18, 0]);
    let packet = Packet::new_checked(&notification).unwrap();
    let expected = Header {
        congestion_echo: true,
        destination: QpNumber(0x118),
        psn: Psn::new(0),
        ..plain(Operation::CongestionNotification, 0)
    };
    assert_eq!(*packet.header(), expected);
    let send = [
        0x24, 0x60, 0xff, 0xff, 0x00, 0x00, 0x00, 0xd3, 0x00, 0xcf, 0x17, 0x10, 0x46, 0x30, 0x81, 0x8b, 0xe2, 0x89,
        0x35, 0xd9, 0x0e, 0x9a, 0x95, 0x50, 0x54, 0x01, 0xbe, 0x88, 0x5e, 0x50, 0x00, 0x00, 0x78, 0xf3, 0x53, 0xf3,
    ];
    let packet = Packet::new_checked(&send).unwrap();
    let header = packet.header();
    assert_eq!((header.service, header.operation), (Service::Uc, Operation::SendOnly));
    assert_eq!((header.destination.0, header.psn.get()), (211, 13_571_856));
    assert_eq!(packet.payload(), &send[12..30]);
    let address = Ipv4Addr::new(192, 168, 0, 7);
    let addresses =
        IpAddresses::V4 { source: address, destination: address, identification: 1144, dont_fragment: true };
    let datagram = Encapsulation { addresses, source_port: 49_152, destination_port: UDP_PORT };
    assert!(packet.is_intact(&datagram));
    assert!(!packet.is_intact(&DATAGRAM));
}

#[test]
fn malformed_packets_are_refused_with_the_reason() {
    let header = Header { reth: Some(Reth { address: 0, key: RKey(0), bytes: 4 }), ..plain(Operation::WriteOnly, 4) };
    let good = emitted(&header, &[1, 2, 3, 4]);
    let corrupt = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        Packet::new_checked(&bytes).unwrap_err()
    };
    for bytes in [0, 3, 4, 15, 31] {
        let error = Packet::new_checked(&good[..bytes]).unwrap_err();
        assert!(
            matches!(error, PacketError::Truncated { found, needed } if found == bytes && needed > bytes),
            "{error}"
        );
    }
    assert_eq!(corrupt(0, 0x60), PacketError::Opcode(0x60));
    assert_eq!(corrupt(1, 0x42), PacketError::Version(2));
    assert_eq!(corrupt(2, 0x70), PacketError::Partition(0x70ff));
    let operation = Opcode::parse(good[0]).unwrap();
    assert_eq!(corrupt(1, 0x41), PacketError::Flags { flags: 0, operation });
    for flags in [1 << 3 | flag::PLACEMENT, 1 << 6, flag::RETH] {
        let mut bytes = good.clone();
        (bytes[1], bytes[8]) = (0x41, flags);
        // A WRITE of one packet always has a RETH, so the address flag is not allowed.
        assert_eq!(Packet::new_checked(&bytes).unwrap_err(), PacketError::Flags { flags, operation });
    }
    assert_eq!(Packet::new_checked(&good[..35]).unwrap_err(), PacketError::Padding { bytes: 3, padding: 0 });
    let mut empty = good[..good.len() - 4].to_vec();
    empty[1] |= 1 << 4;
    assert_eq!(Packet::new_checked(&empty).unwrap_err(), PacketError::Padding { bytes: 0, padding: 1 });
    let mut long = good.clone();
    long.resize(32 + PAYLOAD_BYTES_MAX + 4, 0);
    let error = PacketError::PayloadTooLong { found: PAYLOAD_BYTES_MAX + 4, max: PAYLOAD_BYTES_MAX };
    assert_eq!(Packet::new_checked(&long).unwrap_err(), error);
    let mut limited = good.clone();
    limited[2] = 0x7f;
    assert!(Packet::new_checked(&limited).is_ok(), "limited members of the partition may send to full members");
}

#[test]
fn reserved_syndromes_and_payload_of_acknowledgements_are_refused() {
    let ack = Some(Aeth { syndrome: Syndrome::SequenceError, msn: 1 });
    let mut bytes = emitted(&Header { aeth: ack, ..plain(Operation::Acknowledge, 0) }, &[]);
    let read = |bytes: &[u8]| Packet::new_checked(bytes).map(|packet| packet.header().aeth.map(|ack| ack.syndrome));
    let mut understood = 0;
    for syndrome in 0..=u8::MAX {
        bytes[BTH_BYTES] = syndrome;
        match read(&bytes) {
            Ok(Some(encoded)) => {
                assert_eq!(encode_syndrome(encoded), syndrome);
                understood += 1;
            }
            other => assert_eq!(other, Err(PacketError::Syndrome(syndrome))),
        }
    }
    assert_eq!(understood, 32 + 32 + 4);
    bytes.extend([0; 4]);
    assert!(matches!(read(&bytes), Err(PacketError::Syndrome(_))));
    bytes[BTH_BYTES] = 0;
    let operation = Opcode::parse(17).unwrap();
    assert_eq!(read(&bytes), Err(PacketError::PayloadUnexpected { operation, found: 4 }));
}

#[test]
fn headers_that_cannot_be_encoded_are_refused() {
    let mut room = [0; PACKET_BYTES_MAX];
    let reth = Some(Reth { address: 0, key: RKey(0), bytes: 0 });
    for (header, text) in [
        (plain(Operation::WriteFirst, 1), "Rc WriteFirst without RETH; fill it in"),
        (Header { reth, ..plain(Operation::SendOnly, 1) }, "Rc SendOnly with RETH; leave it out"),
        (plain(Operation::Acknowledge, 0), "Rc Acknowledge without AETH; fill it in"),
        (Header { service: Service::Ud, ..plain(Operation::SendOnly, 1) }, "Ud SendOnly without DETH; fill it in"),
        (Header { reth, ..plain(Operation::ReadRequest, 1) }, "Rc ReadRequest with payload; leave it out"),
        (
            Header { destination: QpNumber(1 << 24), ..plain(Operation::SendOnly, 1) },
            "destination cannot be 0x1000000; the field holds less",
        ),
        (plain(Operation::SendOnly, 4097), "payload cannot be 0x1001; the field holds less"),
        (
            Header { immediate: Some(Immediate::Data(1)), ..plain(Operation::SendFirst, 1) },
            "Rc has no SendFirst with this immediate; choose what its service has",
        ),
    ] {
        assert_eq!(header.emit(&mut room).unwrap_err().to_string(), text);
    }
    let header = plain(Operation::SendOnly, 5);
    let error = HeaderError::Room { found: 23, needed: 24 };
    assert_eq!(header.emit(&mut room[..23]), Err(error));
}

fn syndromes() -> impl Strategy<Value = Syndrome> {
    prop_oneof![
        (0..32_u8).prop_map(|credit_code| Syndrome::Ack { credit_code }),
        (0..32_u8).prop_map(|timer_code| Syndrome::ReceiverNotReady { timer_code }),
        Just(Syndrome::SequenceError),
        Just(Syndrome::InvalidRequest),
        Just(Syndrome::RemoteAccess),
        Just(Syndrome::RemoteOperation),
    ]
}

fn numbers() -> impl Strategy<Value = u32> {
    0..=NUMBER_MAX
}

fn placements() -> impl Strategy<Value = PlacementHeader> {
    (numbers(), numbers(), any::<u16>()).prop_map(|(message, packet, sent)| PlacementHeader { message, packet, sent })
}

fn sacks() -> impl Strategy<Value = SelectiveAck> {
    (numbers(), numbers(), any::<u128>(), any::<u16>(), any::<u16>()).prop_map(
        |(expected, newest, arrived, marked, echo)| {
            let (expected, newest) = (Psn::new(expected), Psn::new(newest));
            SelectiveAck { expected, newest, arrived, marked, echo }
        },
    )
}

/// Any header that can be encoded.
fn headers() -> impl Strategy<Value = Header> {
    let opcodes: Vec<Opcode> = (0..=u8::MAX).filter_map(Opcode::parse).collect();
    let values = (0..=PAYLOAD_BYTES_MAX as u32, any::<[u64; 3]>(), any::<[u32; 3]>());
    let base = (numbers(), numbers(), any::<[bool; 4]>(), values);
    let extended = (syndromes(), numbers(), proptest::option::of(placements()), proptest::option::of(sacks()));
    (proptest::sample::select(opcodes), base, extended).prop_map(|(opcode, base, extended)| {
        let (destination, psn, [ack_request, solicited, becn, middle], (payload_bytes, wide, narrow)) = base;
        let (syndrome, number, placement, sack) = extended;
        let is_notification = opcode.is_congestion_notification();
        let key = RKey(narrow[0]);
        let has_reth = opcode.has_reth() || opcode.may_have_reth() && middle;
        let atomic = AtomicEth { address: wide[0], key, swap_or_add: wide[1], compare: wide[2] };
        let answer = AtomicEth { address: 0, key: RKey(0), compare: 0, ..atomic };
        Header {
            service: opcode.service,
            operation: opcode.operation,
            destination: QpNumber(destination),
            psn: Psn::new(psn),
            ack_request,
            solicited,
            congestion_echo: becn || is_notification,
            payload_bytes: if opcode.has_payload() { payload_bytes } else { 0 },
            reth: has_reth.then_some(Reth { address: wide[0], key, bytes: narrow[1] }),
            atomic: if opcode.has_atomic_ack() { Some(answer) } else { opcode.has_atomic().then_some(atomic) },
            immediate: match opcode.immediate_kind {
                ImmediateKind::None => None,
                ImmediateKind::Data => Some(Immediate::Data(narrow[2])),
                ImmediateKind::Invalidate => Some(Immediate::Invalidate(RKey(narrow[2]))),
            },
            aeth: opcode.has_aeth().then_some(Aeth { syndrome, msn: number }),
            datagram: (opcode.service == Service::Ud).then_some((narrow[1], QpNumber(number))),
            placement: placement.filter(|_| !is_notification),
            sack: sack.filter(|_| !is_notification),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.min(1000)))]

    #[test]
    fn a_decoded_header_equals_the_encoded_one(header in headers(), filler in any::<u8>()) {
        let payload: Vec<u8> = (0..header.payload_bytes).map(|at| (at as u8).wrapping_mul(31) ^ filler).collect();
        let bytes = emitted(&header, &payload);
        prop_assert!(header.header_bytes() <= HEADER_BYTES_MAX);
        let packet = Packet::new_checked(&bytes).unwrap();
        prop_assert_eq!(packet.header(), &header);
        prop_assert_eq!(packet.payload(), &payload[..]);
        prop_assert!(packet.is_intact(&DATAGRAM));
    }

    #[test]
    fn a_packet_with_a_flipped_bit_is_malformed_or_not_intact(
        header in headers(),
        at in any::<prop::sample::Index>(),
        bit in 0..8_u32,
    ) {
        let mut bytes = emitted(&header, &vec![0x5a; header.payload_bytes as usize]);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(packet) = Packet::new_checked(&bytes) {
            // The ICRC does not cover the byte of FECN and BECN, because switches set FECN.
            prop_assert!(at == 4 || !packet.is_intact(&DATAGRAM));
        }
    }

    #[test]
    fn any_bytes_are_refused_or_decoded_to_a_header_that_can_be_encoded(
        header in headers(),
        noise in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = emitted(&header, &vec![1; header.payload_bytes as usize]);
        for (at, byte) in noise {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let cut = cut.index(2 * bytes.len()).min(bytes.len());
        if let Ok(packet) = Packet::new_checked(&bytes[..cut]) {
            let again = emitted(packet.header(), packet.payload());
            let packet_again = Packet::new_checked(&again).unwrap();
            prop_assert_eq!(packet_again.payload(), packet.payload());
            let mut encoded = *packet.header();
            // A CNP always has BECN set.
            encoded.congestion_echo |= encoded.operation == Operation::CongestionNotification;
            prop_assert_eq!(packet_again.header(), &encoded);
        }
    }
}
