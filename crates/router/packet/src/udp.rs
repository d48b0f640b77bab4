//! UDP datagrams (RFC 768).

use crate::Error;
use crate::checksum::Sum;
use crate::error::at_least;
use crate::octets::{put, u16_at};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 8;

/// A datagram whose length holds together.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks the length.
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

    /// The port it comes from.
    #[inline]
    pub fn source_port(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 0)
    }

    /// The port it goes to.
    #[inline]
    pub fn destination_port(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 2)
    }

    /// Bytes of header and payload.
    #[inline]
    pub fn total_bytes(&self) -> usize {
        usize::from(u16_at(self.bytes.as_ref(), 4))
    }

    /// The checksum as it stands there; zero says that there is none.
    pub fn checksum(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 6)
    }

    /// Whether the datagram sums up, `pseudo` being the sum of its pseudo-header. One without a checksum does; over
    /// IPv6 that is not allowed, and the caller's to refuse.
    pub fn verify_checksum(&self, pseudo: Sum) -> bool {
        self.checksum() == 0 || pseudo.add_bytes(&self.bytes.as_ref()[..self.total_bytes()]).folded() == 0xffff
    }

    /// What follows the header.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..self.total_bytes()]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Sets the length of header and payload, which is at least the header's and at most what there is.
    pub fn set_total_bytes(&mut self, bytes: usize) {
        let there = self.bytes.as_ref().len();
        assert!(bytes >= HEADER_BYTES && bytes <= there.min(0xffff), "a datagram of {bytes} B of {there} B");
        put(self.bytes.as_mut(), 4, &(bytes as u16).to_be_bytes());
    }

    /// Sets the checksum to what it must be, `pseudo` being the sum of the pseudo-header.
    pub fn fill_checksum(&mut self, pseudo: Sum) {
        put(self.bytes.as_mut(), 6, &[0, 0]);
        let checksum = pseudo.add_bytes(&self.bytes.as_ref()[..self.total_bytes()]).udp_checksum();
        put(self.bytes.as_mut(), 6, &checksum.to_be_bytes());
    }
}

/// A header, without its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The port it comes from.
    pub source_port: u16,
    /// The port it goes to.
    pub destination_port: u16,
    /// Bytes behind the header, at most 65,527.
    pub payload_bytes: usize,
}

impl Repr {
    /// As the datagram has it.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Repr {
        Repr {
            source_port: packet.source_port(),
            destination_port: packet.destination_port(),
            payload_bytes: packet.payload().len(),
        }
    }

    /// Writes [`HEADER_BYTES`] to the front of `bytes`, whose checksum covers the payload that stands behind them.
    /// Fewer bytes than header and payload are a bug of the caller's.
    pub fn emit(&self, bytes: &mut [u8], pseudo: Sum) {
        let total = HEADER_BYTES + self.payload_bytes;
        let length = u16::try_from(total).expect("a payload of 65,527 B at most");
        put(bytes, 0, &self.source_port.to_be_bytes());
        put(bytes, 2, &self.destination_port.to_be_bytes());
        put(bytes, 4, &length.to_be_bytes());
        put(bytes, 6, &[0, 0]);
        let checksum = pseudo.add_bytes(&bytes[..total]).udp_checksum();
        put(bytes, 6, &checksum.to_be_bytes());
    }
}
