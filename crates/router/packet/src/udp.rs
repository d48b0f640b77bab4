//! UDP datagrams (RFC 768).

use crate::Error;
use crate::checksum::Sum;
use crate::error::at_least;
use crate::octets::{put, u16_at};

/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 8;

/// A datagram whose length field has been validated.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Validates the length field against the header and the bytes that are there.
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        let raw = bytes.as_ref();
        at_least("UDP", raw.len(), HEADER_BYTES)?;
        let total = usize::from(u16_at(raw, 4));
        if total < HEADER_BYTES {
            return Err(Error::TotalLength { protocol: "UDP", bytes: total, bytes_min: HEADER_BYTES });
        }
        at_least("UDP", raw.len(), total)?;
        Ok(Packet { bytes })
    }

    /// Returns the source port.
    #[inline]
    pub fn source_port(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 0)
    }

    /// Returns the destination port.
    #[inline]
    pub fn destination_port(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 2)
    }

    /// Returns the length of header and payload in bytes.
    #[inline]
    pub fn total_bytes(&self) -> usize {
        usize::from(u16_at(self.bytes.as_ref(), 4))
    }

    /// Returns the checksum field; zero means that the sender computed no checksum.
    pub fn checksum(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 6)
    }

    /// Returns whether the checksum is correct, given the sum of the pseudo-header. A datagram without a checksum
    /// passes; over IPv6 the caller must reject it (RFC 8200, section 8.1).
    pub fn verify_checksum(&self, pseudo: Sum) -> bool {
        self.checksum() == 0 || pseudo.add_bytes(&self.bytes.as_ref()[..self.total_bytes()]).folded() == 0xffff
    }

    /// Returns the payload.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..self.total_bytes()]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Computes and stores the checksum, given the sum of the pseudo-header.
    pub fn fill_checksum(&mut self, pseudo: Sum) {
        put(self.bytes.as_mut(), 6, &[0, 0]);
        let checksum = pseudo.add_bytes(&self.bytes.as_ref()[..self.total_bytes()]).udp_checksum();
        put(self.bytes.as_mut(), 6, &checksum.to_be_bytes());
    }
}
