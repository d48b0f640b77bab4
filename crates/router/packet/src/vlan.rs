//! VLAN tags (IEEE 802.1Q): four bytes between a frame's addresses and its type. Seen from behind the tag's own type.

use crate::Error;
use crate::error::at_least;
use crate::ethernet::EtherType;
use crate::octets::{put, u16_at};

/// Bytes that a tag adds to a frame.
pub const HEADER_BYTES: usize = 4;

/// The highest VLAN that a frame can be of; 4095 is reserved.
pub const ID_MAX: u16 = 4094;

/// What a tag says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// 0 to 7, the *priority code point*.
    pub priority: u8,
    /// Whether the frame may be dropped before others.
    pub drop_eligible: bool,
    /// 0 to 4095; 0 is a tag without a VLAN.
    pub id: u16,
}

impl Tag {
    /// From the 16 bits on the wire, the *tag control information*.
    #[inline]
    pub fn from_bits(bits: u16) -> Tag {
        Tag { priority: (bits >> 13) as u8, drop_eligible: bits & 0x1000 != 0, id: bits & 0x0fff }
    }

    /// The 16 bits on the wire. What does not fit its field is cut off.
    #[inline]
    pub fn bits(self) -> u16 {
        u16::from(self.priority) << 13 | u16::from(self.drop_eligible) << 12 | self.id & 0x0fff
    }
}

/// What follows a tag's type: the tag, the type of what it carries, and that.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Refuses what is shorter than a tag.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        at_least("VLAN", bytes.as_ref().len(), HEADER_BYTES)?;
        Ok(Packet { bytes })
    }

    /// The tag.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag::from_bits(u16_at(self.bytes.as_ref(), 0))
    }

    /// What follows.
    #[inline]
    pub fn ethertype(&self) -> EtherType {
        EtherType(u16_at(self.bytes.as_ref(), 2))
    }

    /// What the tag is before.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..]
    }
}

/// Writes a tag and the type behind it to the front of `bytes`: what follows [`EtherType::VLAN`]. Fewer bytes than
/// [`HEADER_BYTES`] are a bug of the caller's.
pub fn emit(tag: Tag, ethertype: EtherType, bytes: &mut [u8]) {
    put(bytes, 0, &tag.bits().to_be_bytes());
    put(bytes, 2, &ethertype.0.to_be_bytes());
}
