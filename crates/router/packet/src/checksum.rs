//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::Protocol;

/// A ones' complement sum of 16-bit words, from which a checksum is computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Returns an empty sum.
    pub fn new() -> Sum {
        Sum(0)
    }

    /// Adds `bytes`, which must begin at an even offset of the covered data; an odd last byte is padded with zero.
    #[inline]
    #[must_use]
    pub fn add_bytes(self, bytes: &[u8]) -> Sum {
        let mut sum = self.0;
        // A ones' complement sum does not depend on the grouping of words: add 32 bits at a time and defer the carries
        // (RFC 1071, section 2). A packet of 64 KiB has 2^14 such words, so 64 bits never overflow.
        let (words, rest) = bytes.as_chunks::<4>();
        for word in words {
            sum += u64::from(u32::from_be_bytes(*word));
        }
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        sum += u64::from(u32::from_be_bytes(last));
        Sum(fold_once(sum))
    }

    /// Adds one word.
    #[inline]
    #[must_use]
    pub fn add_word(self, word: u16) -> Sum {
        Sum(self.0 + u64::from(word))
    }

    /// Adds the pseudo-header of UDP or TCP over IPv4 (RFC 768, RFC 9293).
    #[inline]
    #[must_use]
    pub fn add_pseudo_v4(self, source: Ipv4Addr, destination: Ipv4Addr, protocol: Protocol, bytes: u16) -> Sum {
        self.add_bytes(&source.octets())
            .add_bytes(&destination.octets())
            .add_word(u16::from(protocol.0))
            .add_word(bytes)
    }

    /// Adds the pseudo-header of an upper-layer protocol over IPv6 (RFC 8200, section 8.1).
    #[inline]
    #[must_use]
    pub fn add_pseudo_v6(self, source: Ipv6Addr, destination: Ipv6Addr, protocol: Protocol, bytes: u32) -> Sum {
        self.add_bytes(&source.octets())
            .add_bytes(&destination.octets())
            .add_bytes(&bytes.to_be_bytes())
            .add_word(u16::from(protocol.0))
    }

    /// Returns the sum folded to 16 bits. Over data that includes a correct checksum it is 0xffff.
    #[inline]
    pub fn folded(self) -> u16 {
        let sum = fold_once(self.0);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        ((sum & 0xffff) + (sum >> 16)) as u16
    }

    /// Returns the checksum: the complement of the folded sum.
    #[inline]
    pub fn checksum(self) -> u16 {
        !self.folded()
    }

    /// Returns the checksum of UDP, which sends 0xffff for 0, because 0 means "no checksum" (RFC 768).
    #[inline]
    pub fn udp_checksum(self) -> u16 {
        match self.checksum() {
            0 => 0xffff,
            checksum => checksum,
        }
    }
}

/// Adds the upper 32 bits to the lower ones; the result has at most 33 bits.
#[inline]
fn fold_once(sum: u64) -> u64 {
    (sum & 0xffff_ffff) + (sum >> 32)
}

/// Returns the checksum of `bytes`, in which the checksum field must be zero.
#[inline]
pub fn compute(bytes: &[u8]) -> u16 {
    Sum::new().add_bytes(bytes).checksum()
}

/// Returns whether the checksum that `bytes` include is correct.
#[inline]
pub fn verify(bytes: &[u8]) -> bool {
    Sum::new().add_bytes(bytes).folded() == 0xffff
}

/// Returns the checksum after one covered word changed from `old` to `new`: RFC 1624, equation 3, which unlike that of
/// RFC 1141 is also correct where the sum is zero.
#[inline]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    let sum = u32::from(!checksum) + u32::from(!old) + u32::from(new);
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// Completes a checksum that the sender left to the NIC (`CHECKSUM_PARTIAL` in Linux): the field at `start + field_at`
/// holds the sum of the pseudo-header, and everything from `start` on is added. Returns `None` and changes nothing if
/// the field lies outside of `bytes`.
pub fn complete_partial(bytes: &mut [u8], start: usize, field_at: usize, is_udp: bool) -> Option<()> {
    let covered = bytes.get_mut(start..)?;
    let sum = Sum::new().add_bytes(covered);
    let checksum = if is_udp { sum.udp_checksum() } else { sum.checksum() };
    let field = covered.get_mut(field_at..field_at.checked_add(2)?)?;
    field.copy_from_slice(&checksum.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests;
