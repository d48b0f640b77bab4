//! Double words that stand before a header (base specification 5.0, section 2.2.10).

use std::fmt;

/// A prefix: what it is, and three bytes of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    /// Five bits: the fifth is set in end-to-end prefixes and clear in those of one link.
    pub kind: u8,
    /// Its content.
    pub content: [u8; 3],
}

/// Prefixes before one header at most: end-to-end ones are limited to four, and a link's are taken to be no more.
pub const PREFIXES_MAX: usize = 8;

const FMT_PREFIX: u8 = 0b100 << 5;
const END_TO_END: u8 = 0x10;

impl Prefix {
    /// A prefix for multi-root virtualization, of one link.
    pub const MR_IOV: u8 = 0x00;
    /// TPH: steering tag's upper byte.
    pub const EXTENDED_TPH: u8 = 0x10;
    /// PASID: the address space of the request.
    pub const PASID: u8 = 0x11;
    /// IDE: integrity and encryption.
    pub const IDE: u8 = 0x12;

    /// The prefix in four bytes, if they are one.
    pub fn from_bytes(bytes: [u8; 4]) -> Option<Self> {
        let [first, content @ ..] = bytes;
        (first & 0xe0 == FMT_PREFIX).then_some(Self { kind: first & 0x1f, content })
    }

    /// The bytes to send.
    pub fn to_bytes(self) -> [u8; 4] {
        let [a, b, c] = self.content;
        [FMT_PREFIX | self.kind & 0x1f, a, b, c]
    }

    /// Whether it travels to the other end, rather than over one link.
    pub fn is_end_to_end(self) -> bool {
        self.kind & END_TO_END != 0
    }

    /// The address space that a PASID prefix names: twenty bits.
    pub fn pasid(self) -> Option<u32> {
        let [a, b, c] = self.content;
        (self.kind == Self::PASID).then(|| u32::from_be_bytes([0, a & 0x0f, b, c]))
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.kind, self.pasid()) {
            (_, Some(pasid)) => write!(formatter, "PASID {pasid:#x}"),
            (Self::MR_IOV, _) => formatter.write_str("MR-IOV"),
            (Self::EXTENDED_TPH, _) => write!(formatter, "extended TPH, steering tag high {:#04x}", self.content[0]),
            (Self::IDE, _) => formatter.write_str("IDE"),
            (0x0e | 0x0f | 0x1e | 0x1f, _) => formatter.write_str("vendor defined"),
            (kind, _) => write!(formatter, "reserved {kind:#04x}"),
        }
    }
}
