//! VLAN tags (IEEE 802.1Q): four bytes between a frame's addresses and its EtherType. The views here begin behind the
//! tag's own EtherType (TPID).

use crate::Error;
use crate::error::at_least;
use crate::ethertype::EtherType;
use crate::octets::{put, u16_at};

/// Number of bytes that a tag adds to a frame.
pub const HEADER_BYTES: usize = 4;

/// The highest VLAN identifier of a frame; 4095 is reserved.
pub const ID_MAX: u16 = 4094;

/// The fields of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Priority code point, 0 to 7.
    pub priority: u8,
    /// Drop eligible indicator.
    pub drop_eligible: bool,
    /// VLAN identifier, 0 to 4095; 0 marks a priority-tagged frame without a VLAN.
    pub id: u16,
}

impl Tag {
    /// Returns the tag of 16 bits of tag control information.
    #[inline]
    pub fn from_bits(bits: u16) -> Tag {
        Tag { priority: (bits >> 13) as u8, drop_eligible: bits & 0x1000 != 0, id: bits & 0x0fff }
    }

    /// Returns the 16 bits of tag control information; values that exceed their field are truncated.
    #[inline]
    pub fn bits(self) -> u16 {
        u16::from(self.priority) << 13 | u16::from(self.drop_eligible) << 12 | self.id & 0x0fff
    }
}

/// The bytes behind a tag's TPID: the tag control information, the EtherType of the payload, and the payload.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Rejects bytes shorter than a tag.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        at_least("VLAN", bytes.as_ref().len(), HEADER_BYTES)?;
        Ok(Packet { bytes })
    }

    /// Returns the tag.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag::from_bits(u16_at(self.bytes.as_ref(), 0))
    }

    /// Returns the EtherType of the payload.
    #[inline]
    pub fn ethertype(&self) -> EtherType {
        EtherType(u16_at(self.bytes.as_ref(), 2))
    }

    /// Returns the payload.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..]
    }
}

/// Writes a tag and the EtherType of its payload to the front of `bytes`, which follow [`EtherType::VLAN`]. Panics if
/// `bytes` is shorter than [`HEADER_BYTES`].
pub fn emit(tag: Tag, ethertype: EtherType, bytes: &mut [u8]) {
    put(bytes, 0, &tag.bits().to_be_bytes());
    put(bytes, 2, &ethertype.0.to_be_bytes());
}
