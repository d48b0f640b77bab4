//! TLP prefixes: double words before a header (Base Specification 5.0, section 2.2.10).

use std::fmt;

/// A TLP prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    /// Type, five bits: the highest is set in end-to-end prefixes and clear in local ones.
    pub kind: u8,
    /// Contents.
    pub content: [u8; 3],
}

/// Most prefixes before one header: the specification allows four end-to-end prefixes, and as many local ones are
/// accepted.
pub const PREFIXES_MAX: usize = 8;

/// Format of a prefix, in the highest three bits of its first byte.
const FMT_PREFIX: u8 = 0b100 << 5;
const END_TO_END: u8 = 0x10;

impl Prefix {
    /// MR-IOV: multi-root I/O virtualization; a local prefix.
    pub const MR_IOV: u8 = 0x00;
    /// Extended TPH: the upper byte of the steering tag.
    pub const EXTENDED_TPH: u8 = 0x10;
    /// PASID: process address space ID of the request.
    pub const PASID: u8 = 0x11;
    /// IDE: integrity and data encryption.
    pub const IDE: u8 = 0x12;

    /// Returns whether `first` is the first byte of a prefix.
    pub(super) fn starts_with(first: u8) -> bool {
        first & 0xe0 == FMT_PREFIX
    }

    /// Parses four bytes; `None` if they are not a prefix.
    pub fn from_bytes(bytes: [u8; 4]) -> Option<Self> {
        let [first, content @ ..] = bytes;
        Self::starts_with(first).then_some(Self { kind: first & 0x1f, content })
    }

    /// Returns the bytes to send.
    pub fn to_bytes(self) -> [u8; 4] {
        let [a, b, c] = self.content;
        [FMT_PREFIX | self.kind & 0x1f, a, b, c]
    }

    /// Returns whether it is an end-to-end prefix, rather than one local to a link.
    pub fn is_end_to_end(self) -> bool {
        self.kind & END_TO_END != 0
    }

    /// Returns the process address space ID of a PASID prefix, twenty bits.
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
