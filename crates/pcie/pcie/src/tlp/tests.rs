//! Round trips of packets, packets from the figures of the specification, and arbitrary bytes.

use proptest::prelude::*;

use super::*;
use crate::link::AddressWidth;

fn commons(hints: bool) -> impl Strategy<Value = CommonFields> {
    let hint = prop::option::of(0..4_u8).prop_map(move |hint| hint.filter(|_| hints));
    (0..8_u8, 0..8_u8, 0..4_u8, hint, any::<bool>(), any::<bool>()).prop_map(
        |(traffic_class, attributes, address_type, processing_hint, is_poisoned, has_ecrc)| CommonFields {
            traffic_class,
            attributes,
            address_type,
            processing_hint,
            is_poisoned,
            has_ecrc,
        },
    )
}

fn ids() -> impl Strategy<Value = DeviceId> {
    any::<u16>().prop_map(DeviceId)
}

fn widths() -> impl Strategy<Value = AddressWidth> {
    prop_oneof![Just(AddressWidth::Bits32), Just(AddressWidth::Bits64)]
}

const READ_WRITE: [MemoryOp; 2] = [MemoryOp::Read, MemoryOp::Write];

/// Reads and writes within a page, with byte enables allowed for the length.
fn transfers() -> impl Strategy<Value = Repr> {
    (0..2_usize, any::<u64>(), 0..1024_u32, 1..=1024_u32, widths(), ids(), 0..1024_u16, commons(true)).prop_map(
        |(op, page, first_dw, length_dw, width, requester, tag, common)| {
            let page = if width == AddressWidth::Bits32 { page & 0xffff_f000 } else { page & !0xfff };
            let length_dw = length_dw.min(1024 - first_dw);
            Repr::Memory(MemoryRequest {
                op: READ_WRITE[op],
                address: page + u64::from(first_dw * DW_BYTES),
                width,
                length_dw,
                first_byte_enable: 0b1110,
                last_byte_enable: if length_dw == 1 { 0 } else { 0b0011 },
                requester,
                tag,
                common,
            })
        },
    )
}

fn atomics() -> impl Strategy<Value = Repr> {
    const OPS: [MemoryOp; 3] = [MemoryOp::FetchAdd, MemoryOp::Swap, MemoryOp::CompareAndSwap];
    (0..3_usize, any::<u32>(), any::<bool>(), ids(), 0..1024_u16, commons(true)).prop_map(
        |(op, slot, is_wide, requester, tag, common)| {
            let operand_dw = if is_wide { 2 } else { 1 };
            let operands = if OPS[op] == MemoryOp::CompareAndSwap { 2 } else { 1 };
            Repr::Memory(MemoryRequest {
                op: OPS[op],
                address: u64::from(slot) * 16,
                width: AddressWidth::Bits64,
                length_dw: operand_dw * operands,
                first_byte_enable: 0,
                last_byte_enable: 0,
                requester,
                tag,
                common,
            })
        },
    )
}

fn configs() -> impl Strategy<Value = Repr> {
    (any::<bool>(), any::<bool>(), ids(), 0..1024_u16, 0..16_u8, ids(), 0..1024_u16, commons(false)).prop_map(
        |(is_write, is_type_1, target, register, first_byte_enable, requester, tag, common)| {
            let register = register * 4;
            Repr::Config(ConfigRequest {
                is_write,
                is_type_1,
                target,
                register,
                first_byte_enable,
                requester,
                tag,
                common,
            })
        },
    )
}

fn ios() -> impl Strategy<Value = Repr> {
    (any::<bool>(), any::<u32>(), 0..16_u8, ids(), 0..1024_u16, commons(false)).prop_map(
        |(is_write, address, first_byte_enable, requester, tag, common)| {
            Repr::Io(IoRequest { is_write, address: address & !3, first_byte_enable, requester, tag, common })
        },
    )
}

fn completions() -> impl Strategy<Value = Repr> {
    const STATUSES: [CompletionStatus; 4] = [
        CompletionStatus::Successful,
        CompletionStatus::UnsupportedRequest,
        CompletionStatus::ConfigurationRetry,
        CompletionStatus::CompleterAbort,
    ];
    (ids(), ids(), 0..1024_u16, 0..4_usize, 1..=4096_u16, 0..128_u8, 0..=1024_u32, commons(false)).prop_map(
        |(completer, requester, tag, status, byte_count, lower_address, length_dw, common)| {
            let status = STATUSES[status];
            Repr::Completion(Completion {
                completer,
                requester,
                tag,
                status,
                byte_count,
                lower_address,
                length_dw,
                common,
            })
        },
    )
}

fn messages() -> impl Strategy<Value = Repr> {
    (0..8_u8, any::<u8>(), 0..=1024_u32, any::<u64>(), ids(), any::<u8>(), commons(false)).prop_map(
        |(routing, code, length_dw, rest, requester, tag, common)| {
            Repr::Message(Message { routing, code, length_dw, rest, requester, tag, common })
        },
    )
}

fn reprs() -> impl Strategy<Value = Repr> {
    prop_oneof![transfers(), atomics(), configs(), ios(), completions(), messages()]
}

fn prefixes() -> impl Strategy<Value = Vec<Prefix>> {
    let prefix = (0..32_u8, any::<[u8; 3]>()).prop_map(|(kind, content)| Prefix { kind, content });
    prop::collection::vec(prefix, 0..=prefix::PREFIXES_MAX)
}

fn payload_for(repr: &Repr) -> Vec<u8> {
    (0..repr.payload_bytes()).map(|index| index as u8 ^ 0x5a).collect()
}

proptest! {
    #[test]
    fn parsing_an_emitted_packet_gives_the_same_packet(repr in reprs(), prefixes in prefixes()) {
        let payload = payload_for(&repr);
        let bytes = repr.emit(&prefixes, &payload).unwrap();
        let packet = Packet::new_checked(&bytes).unwrap();
        prop_assert_eq!(Repr::parse(&packet), Ok(repr));
        prop_assert_eq!(packet.payload(), &payload[..]);
        prop_assert_eq!(packet.prefixes().collect::<Vec<_>>(), prefixes);
        prop_assert_eq!(packet.ecrc(), repr.common().has_ecrc.then(|| packet.expected_ecrc()));
    }

    #[test]
    fn wire_bytes_are_emitted_bytes_and_framing(repr in reprs()) {
        let bytes = repr.emit(&[], &payload_for(&repr)).unwrap();
        prop_assert_eq!(bytes.len() as u32 + FRAMING_BYTES, repr.wire_bytes());
    }

    #[test]
    fn a_truncated_or_extended_packet_is_refused(repr in reprs(), cut in 1..40_usize) {
        let mut bytes = repr.emit(&[], &payload_for(&repr)).unwrap();
        let needed = bytes.len();
        let found = needed.saturating_sub(cut);
        prop_assert!(Packet::new_checked(&bytes[..found]).is_err());
        bytes.resize(needed + cut, 0);
        let is_refused = matches!(Packet::new_checked(&bytes), Err(PacketError::TooLong { .. }));
        prop_assert!(is_refused);
    }

    #[test]
    fn parsing_any_bytes_does_not_panic_and_what_parses_can_be_emitted(
        bytes in prop::collection::vec(any::<u8>(), 0..64)
    ) {
        if let Ok(packet) = Packet::new_checked(&bytes)
            && let Ok(repr) = Repr::parse(&packet)
        {
            let prefixes: Vec<Prefix> = packet.prefixes().collect();
            let again = repr.emit(&prefixes, packet.payload()).unwrap();
            let packet = Packet::new_checked(&again).unwrap();
            prop_assert_eq!(Repr::parse(&packet), Ok(repr));
        }
    }

    #[test]
    fn a_header_alone_parses_to_the_same_packet(repr in reprs()) {
        let bytes = repr.emit(&[], &payload_for(&repr)).unwrap();
        let header = Packet::header_only(&bytes[..repr.header_bytes() as usize]).unwrap();
        prop_assert_eq!(Repr::parse(&header), Ok(repr));
        prop_assert_eq!((header.payload(), header.ecrc()), (&[][..], None));
    }
}

fn parse(bytes: &[u8]) -> Result<Repr, PacketError> {
    Packet::new_checked(bytes).and_then(|packet| Repr::parse(&packet))
}

#[test]
fn a_read_has_the_layout_of_the_specification() {
    // Figures 2-5, 2-13 and 2-16: MRd, 64-bit, 16 double words at 1_2345_6780, requester 05:00.1, tag 0x2a5.
    let request = MemoryRequest {
        op: MemoryOp::Read,
        address: 0x1_2345_6780,
        width: AddressWidth::Bits64,
        length_dw: 16,
        first_byte_enable: 0xf,
        last_byte_enable: 0xf,
        requester: DeviceId(0x0501),
        tag: 0x2a5,
        common: CommonFields::default(),
    };
    let bytes = Repr::Memory(request).emit(&[], &[]).unwrap();
    assert_eq!(bytes, [0x20, 0x80, 0, 16, 5, 1, 0xa5, 0xff, 0, 0, 0, 1, 0x23, 0x45, 0x67, 0x80]);
}

#[test]
fn a_completion_has_the_layout_of_the_specification() {
    let completion = Completion {
        completer: DeviceId(0x0008),
        requester: DeviceId(0x0501),
        tag: 0x1a5,
        status: CompletionStatus::Successful,
        byte_count: 4096,
        lower_address: 0x40,
        length_dw: 1024,
        common: CommonFields::default(),
    };
    let repr = Repr::Completion(completion);
    let bytes = repr.emit(&[], &vec![0; 4096]).unwrap();
    assert_eq!(bytes[..12], [0x4a, 0x08, 0, 0, 0, 8, 0, 0, 5, 1, 0xa5, 0x40]);
    assert_eq!(repr.credits(), Credits { header: 1, data: 256 });
}

#[test]
fn forbidden_values_are_neither_parsed_nor_emitted() {
    let good = MemoryRequest {
        op: MemoryOp::Read,
        address: 0x1000,
        width: AddressWidth::Bits32,
        length_dw: 4,
        first_byte_enable: 0xf,
        last_byte_enable: 0xf,
        requester: DeviceId(0),
        tag: 0,
        common: CommonFields::default(),
    };
    let refused = |request: MemoryRequest| Repr::Memory(request).emit(&[], &[]).unwrap_err();
    assert_eq!(
        refused(MemoryRequest { address: 0x1ff4, ..good }),
        PacketError::CrossesPage { address: 0x1ff4, length_dw: 4 }
    );
    assert_eq!(
        refused(MemoryRequest { last_byte_enable: 0, ..good }),
        PacketError::ByteEnables { first: 0xf, last: 0, length_dw: 4 }
    );
    assert_eq!(
        refused(MemoryRequest { address: 1 << 32, ..good }),
        PacketError::Field { field: "a 32-bit address", value: 1 << 32 }
    );
    assert_eq!(refused(MemoryRequest { length_dw: 0, ..good }), PacketError::Length(0));
    let mut crossing = Repr::Memory(good).emit(&[], &[]).unwrap();
    crossing[10] = 0x1f;
    crossing[11] = 0xf4;
    assert_eq!(parse(&crossing), Err(PacketError::CrossesPage { address: 0x1ff4, length_dw: 4 }));
}

#[test]
fn unknown_kinds_are_refused() {
    let mut bytes = [0; 12];
    bytes[0] = 0x01; // MRdLk, which new devices must not send
    assert_eq!(parse(&bytes), Err(PacketError::Kind { format: 0, kind: 1 }));
    assert_eq!(parse(&[0x80; 64]), Err(PacketError::Prefixes));
    assert_eq!(parse(&[]), Err(PacketError::Truncated { found: 0, needed: 12 }));
}

#[test]
fn wire_bytes_equal_those_of_the_published_model() {
    // Neugebauer et al. 2018, section 3: 24 bytes for MRd and MWr with 64-bit addresses, 20 for CplD.
    let read = |width, has_ecrc| {
        Repr::Memory(MemoryRequest {
            op: MemoryOp::Read,
            address: 0,
            width,
            length_dw: 16,
            first_byte_enable: 0xf,
            last_byte_enable: 0xf,
            requester: DeviceId(0),
            tag: 0,
            common: CommonFields { has_ecrc, ..CommonFields::default() },
        })
    };
    assert_eq!(read(AddressWidth::Bits64, false).wire_bytes(), 24);
    assert_eq!(read(AddressWidth::Bits32, false).wire_bytes(), 20);
    assert_eq!(read(AddressWidth::Bits64, true).wire_bytes(), 28);
}
