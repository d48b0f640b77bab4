//! Data link layer packets (DLLPs): acknowledgements, flow control and power management (Base Specification 5.0,
//! section 3.4).

use thiserror::Error;

use super::crc;
use super::repr::{Credits, FlowClass};

/// Size of a DLLP with its checksum.
pub const BYTES: usize = 6;

/// A data link layer packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dllp {
    /// All TLPs up to this sequence number have arrived.
    Ack(u16),
    /// All TLPs up to this sequence number have arrived; those after it must be replayed.
    Nak(u16),
    /// Flow control credits of a class.
    FlowControl(FlowControl),
    /// A power management message.
    PowerManagement(PowerManagement),
    /// Data link features.
    Feature {
        /// Supported features, 23 bits; bit 0 is scaled flow control.
        supported: u32,
        /// Whether the peer's features were received.
        is_acknowledged: bool,
    },
    /// Three vendor-defined bytes.
    Vendor([u8; 3]),
    /// No operation.
    Nop,
}

/// The kind of a flow control packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowPhase {
    /// InitFC1.
    Init1,
    /// InitFC2.
    Init2,
    /// UpdateFC.
    Update,
}

/// Credits of a class granted since the link came up, modulo the fields' width. During initialization 0 means infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowControl {
    /// The kind of packet.
    pub phase: FlowPhase,
    /// The class of the credits.
    pub class: FlowClass,
    /// The virtual channel, 0 to 7.
    pub channel: u8,
    /// Header credits modulo 256, data credits modulo 4096, both before scaling.
    pub credits: Credits,
    /// Scale of header and of data credits: 0 not scaled, 1 by 1, 2 by 4, 3 by 16.
    pub scales: (u8, u8),
}

/// A power management message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PowerManagement {
    /// PM_Enter_L1.
    EnterL1,
    /// PM_Enter_L23.
    EnterL23,
    /// PM_Active_State_Request_L1.
    RequestL1,
    /// PM_Request_Ack.
    RequestAck,
}

/// Why bytes are not a data link layer packet.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum DllpError {
    /// The length is wrong.
    #[error("{0} bytes are not a data link layer packet; it has {BYTES}, checksum included")]
    Length(usize),
    /// The checksum is wrong.
    #[error("checksum {found:#06x} is wrong; the bytes before it have {expected:#06x}")]
    Checksum {
        /// As received.
        found: u16,
        /// As calculated.
        expected: u16,
    },
    /// The type is unknown.
    #[error("type {0:#04x} of a data link layer packet is unknown")]
    Type(u8),
}

const POWER: [(u8, PowerManagement); 4] = [
    (0x20, PowerManagement::EnterL1),
    (0x21, PowerManagement::EnterL23),
    (0x23, PowerManagement::RequestL1),
    (0x24, PowerManagement::RequestAck),
];
const PHASES: [(u8, FlowPhase); 3] = [(0b01, FlowPhase::Init1), (0b11, FlowPhase::Init2), (0b10, FlowPhase::Update)];
const CLASSES: [FlowClass; 3] = [FlowClass::Posted, FlowClass::NonPosted, FlowClass::Completion];

impl Dllp {
    /// Returns the bytes to send, including the checksum.
    pub fn emit(self) -> [u8; BYTES] {
        let word = self.word();
        let [a, b, c, d] = word;
        let [low, high] = crc::dllp(word);
        [a, b, c, d, low, high]
    }

    /// Parses received bytes.
    ///
    /// # Errors
    /// When their number or checksum is wrong, or their type is unknown.
    pub fn parse(bytes: &[u8]) -> Result<Self, DllpError> {
        let &[a, b, c, d, low, high] = bytes else { return Err(DllpError::Length(bytes.len())) };
        let (found, expected) = ([low, high], crc::dllp([a, b, c, d]));
        if found != expected {
            let (found, expected) = (u16::from_le_bytes(found), u16::from_le_bytes(expected));
            return Err(DllpError::Checksum { found, expected });
        }
        Self::from_word([a, b, c, d]).ok_or(DllpError::Type(a))
    }

    fn word(self) -> [u8; 4] {
        let sequence = |kind, number: u16| [kind, 0, (number >> 8) as u8 & 0x0f, number as u8];
        match self {
            Self::Ack(number) => sequence(0x00, number),
            Self::Nak(number) => sequence(0x10, number),
            Self::FlowControl(flow) => flow.word(),
            Self::PowerManagement(power) => {
                [POWER.iter().find(|(_, known)| *known == power).map_or(0, |(kind, _)| *kind), 0, 0, 0]
            }
            Self::Feature { supported, is_acknowledged } => {
                let [_, a, b, c] = (supported & 0x7f_ffff).to_be_bytes();
                [0x02, a | u8::from(is_acknowledged) << 7, b, c]
            }
            Self::Vendor([a, b, c]) => [0x30, a, b, c],
            Self::Nop => [0x31, 0, 0, 0],
        }
    }

    fn from_word([kind, a, b, c]: [u8; 4]) -> Option<Self> {
        let number = u16::from_be_bytes([b & 0x0f, c]);
        match kind {
            0x00 => Some(Self::Ack(number)),
            0x10 => Some(Self::Nak(number)),
            0x02 => Some(Self::Feature {
                supported: u32::from_be_bytes([0, a & 0x7f, b, c]),
                is_acknowledged: a & 0x80 != 0,
            }),
            0x30 => Some(Self::Vendor([a, b, c])),
            0x31 => Some(Self::Nop),
            _ => POWER
                .iter()
                .find(|(known, _)| *known == kind)
                .map(|(_, power)| Self::PowerManagement(*power))
                .or_else(|| FlowControl::from_word([kind, a, b, c]).map(Self::FlowControl)),
        }
    }
}

impl FlowControl {
    fn word(self) -> [u8; 4] {
        let phase = PHASES.iter().find(|(_, known)| *known == self.phase).map_or(0, |(bits, _)| *bits);
        let class = CLASSES.iter().position(|known| *known == self.class).unwrap_or(0) as u8;
        let (header, data) = (self.credits.header as u8, self.credits.data as u16 & 0xfff);
        let (header_scale, data_scale) = self.scales;
        [
            phase << 6 | class << 4 | self.channel & 7,
            (header_scale & 3) << 6 | header >> 2,
            (header & 3) << 6 | (data_scale & 3) << 4 | (data >> 8) as u8,
            data as u8,
        ]
    }

    fn from_word([kind, a, b, c]: [u8; 4]) -> Option<Self> {
        let (_, phase) = PHASES.iter().find(|(bits, _)| *bits == kind >> 6)?;
        let class = CLASSES.get(usize::from(kind >> 4 & 3))?;
        (kind & 0x08 == 0).then(|| Self {
            phase: *phase,
            class: *class,
            channel: kind & 7,
            credits: Credits {
                header: u32::from((a & 0x3f) << 2 | b >> 6),
                data: u32::from(u16::from_be_bytes([b & 0x0f, c])),
            },
            scales: (a >> 6, b >> 4 & 3),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flows() -> impl Strategy<Value = Dllp> {
        (0..3_usize, 0..3_usize, 0..8_u8, 0..256_u32, 0..4096_u32, 0..4_u8, 0..4_u8).prop_map(
            |(phase, class, channel, header, data, header_scale, data_scale)| {
                Dllp::FlowControl(FlowControl {
                    phase: PHASES[phase].1,
                    class: CLASSES[class],
                    channel,
                    credits: Credits { header, data },
                    scales: (header_scale, data_scale),
                })
            },
        )
    }

    fn dllps() -> impl Strategy<Value = Dllp> {
        prop_oneof![
            (0..4096_u16).prop_map(Dllp::Ack),
            (0..4096_u16).prop_map(Dllp::Nak),
            flows(),
            (0..4_usize).prop_map(|index| Dllp::PowerManagement(POWER[index].1)),
            (0..1_u32 << 23, any::<bool>())
                .prop_map(|(supported, is_acknowledged)| Dllp::Feature { supported, is_acknowledged }),
            any::<[u8; 3]>().prop_map(Dllp::Vendor),
            Just(Dllp::Nop),
        ]
    }

    proptest! {
        #[test]
        fn parsing_emitted_bytes_gives_the_same_dllp(dllp in dllps()) {
            prop_assert_eq!(Dllp::parse(&dllp.emit()), Ok(dllp));
        }

        #[test]
        fn a_flipped_bit_is_detected(dllp in dllps(), bit in 0..48_usize) {
            let mut bytes = dllp.emit();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let is_detected = matches!(Dllp::parse(&bytes), Err(DllpError::Checksum { .. }));
            prop_assert!(is_detected);
        }

        #[test]
        fn parsing_any_bytes_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..10)) {
            let _ = Dllp::parse(&bytes);
        }
    }

    #[test]
    fn emitted_bytes_have_the_layout_of_the_specification() {
        // Figures 3-6 and 3-8: type, then reserved bits, then the number in the last twelve bits.
        assert_eq!(Dllp::Ack(0xabc).emit()[..4], [0x00, 0x00, 0x0a, 0xbc]);
        assert_eq!(Dllp::Nak(1).emit()[..4], [0x10, 0x00, 0x00, 0x01]);
        let flow = FlowControl {
            phase: FlowPhase::Update,
            class: FlowClass::NonPosted,
            channel: 1,
            credits: Credits { header: 0xff, data: 0x123 },
            scales: (0, 0),
        };
        assert_eq!(Dllp::FlowControl(flow).emit()[..4], [0x91, 0x3f, 0xc1, 0x23]);
    }

    #[test]
    fn unknown_types_and_wrong_lengths_are_refused() {
        let word = [0x7f, 0, 0, 0];
        let bytes: Vec<u8> = word.into_iter().chain(crc::dllp(word)).collect();
        assert_eq!(Dllp::parse(&bytes), Err(DllpError::Type(0x7f)));
        assert_eq!(Dllp::parse(&[0; 5]), Err(DllpError::Length(5)));
    }
}
