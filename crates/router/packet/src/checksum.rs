//! The Internet checksum (RFC 1071), and what a change of a word does to it (RFC 1624).

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::Protocol;

/// A sum of 16-bit words in ones' complement, as a checksum is made of.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Nothing so far.
    pub fn new() -> Sum {
        Sum(0)
    }

    /// With `bytes`, which begin at an even place; an odd last byte counts as if a zero followed it.
    #[inline]
    #[must_use]
    pub fn add_bytes(self, bytes: &[u8]) -> Sum {
        let mut sum = self.0;
        // Ones' complement does not care how words are grouped: 32 bits at a time, and carries at the end (RFC 1071,
        // section 2). A packet of 64 KiB has 2^14 of them, so 64 bits never overflow.
        let (words, rest) = bytes.as_chunks::<4>();
        for word in words {
            sum += u64::from(u32::from_be_bytes(*word));
        }
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        sum += u64::from(u32::from_be_bytes(last));
        Sum(fold_once(sum))
    }

    /// With one word.
    #[inline]
    #[must_use]
    pub fn add_word(self, word: u16) -> Sum {
        Sum(self.0 + u64::from(word))
    }

    /// With the pseudo-header of UDP or TCP over IPv4 (RFC 768, RFC 9293).
    #[inline]
    #[must_use]
    pub fn add_pseudo_v4(self, source: Ipv4Addr, destination: Ipv4Addr, protocol: Protocol, bytes: u16) -> Sum {
        self.add_bytes(&source.octets())
            .add_bytes(&destination.octets())
            .add_word(u16::from(protocol.0))
            .add_word(bytes)
    }

    /// With the pseudo-header of a protocol over IPv6 (RFC 8200, section 8.1).
    #[inline]
    #[must_use]
    pub fn add_pseudo_v6(self, source: Ipv6Addr, destination: Ipv6Addr, protocol: Protocol, bytes: u32) -> Sum {
        self.add_bytes(&source.octets())
            .add_bytes(&destination.octets())
            .add_bytes(&bytes.to_be_bytes())
            .add_word(u16::from(protocol.0))
    }

    /// The sum in 16 bits. Over bytes that include a right checksum it is 0xffff.
    #[inline]
    pub fn folded(self) -> u16 {
        let sum = fold_once(self.0);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        ((sum & 0xffff) + (sum >> 16)) as u16
    }

    /// The checksum: the folded sum's complement.
    #[inline]
    pub fn checksum(self) -> u16 {
        !self.folded()
    }

    /// The checksum of UDP, where zero says that there is none, and so stands as 0xffff.
    #[inline]
    pub fn udp_checksum(self) -> u16 {
        match self.checksum() {
            0 => 0xffff,
            checksum => checksum,
        }
    }
}

/// To 33 bits at most.
#[inline]
fn fold_once(sum: u64) -> u64 {
    (sum & 0xffff_ffff) + (sum >> 32)
}

/// The checksum of `bytes`, in which the checksum's own field is zero.
#[inline]
pub fn compute(bytes: &[u8]) -> u16 {
    Sum::new().add_bytes(bytes).checksum()
}

/// Whether `bytes`, with the checksum in them, sum up.
#[inline]
pub fn verify(bytes: &[u8]) -> bool {
    Sum::new().add_bytes(bytes).folded() == 0xffff
}

/// The checksum after one word of what it covers has changed: RFC 1624, equation 3, which unlike RFC 1141's is right
/// where the sum is zero.
#[inline]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    let sum = u32::from(!checksum) + u32::from(!old) + u32::from(new);
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// Completes a checksum that was left to a network card: the field, `field_at` after `start`, holds the sum of the
/// pseudo-header, and everything from `start` is to be added. `None`, and nothing changed, when the field lies outside.
pub fn complete_partial(bytes: &mut [u8], start: usize, field_at: usize, is_udp: bool) -> Option<()> {
    let covered = bytes.get_mut(start..)?;
    let sum = Sum::new().add_bytes(covered);
    let checksum = if is_udp { sum.udp_checksum() } else { sum.checksum() };
    let field = covered.get_mut(field_at..field_at.checked_add(2)?)?;
    field.copy_from_slice(&checksum.to_be_bytes());
    Some(())
}

#[cfg(test)]
#[path = "checksum_tests.rs"]
mod tests;
