//! TCP segments (RFC 9293), as far as a router inspects them.

use crate::Error;
use crate::checksum::Sum;
use crate::error::at_least;
use crate::octets::{put, u16_at, u32_at};

/// Length in bytes of a header without options.
pub const HEADER_BYTES: usize = 20;

/// The control bits of a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// The sender has no more data.
    pub const FIN: Flags = Flags(0x01);
    /// Synchronizes sequence numbers: opens a connection.
    pub const SYN: Flags = Flags(0x02);
    /// Resets the connection.
    pub const RST: Flags = Flags(0x04);
    /// Asks the receiver to pass the data to the application.
    pub const PSH: Flags = Flags(0x08);
    /// The acknowledgement field is valid.
    pub const ACK: Flags = Flags(0x10);
    /// The urgent pointer is valid.
    pub const URG: Flags = Flags(0x20);
    /// ECN echo: congestion was experienced (RFC 3168).
    pub const ECE: Flags = Flags(0x40);
    /// Congestion window reduced (RFC 3168).
    pub const CWR: Flags = Flags(0x80);

    /// Returns whether all of `flags` are set.
    pub fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Returns these flags without `flags`.
    #[must_use]
    pub fn without(self, flags: Flags) -> Flags {
        Flags(self.0 & !flags.0)
    }
}

/// A segment whose data offset has been validated.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Validates the length of the header.
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        let raw = bytes.as_ref();
        at_least("TCP", raw.len(), HEADER_BYTES)?;
        let header_bytes = usize::from(raw[12] >> 4) * 4;
        if header_bytes < HEADER_BYTES {
            return Err(Error::HeaderLength { protocol: "TCP", bytes: header_bytes, bytes_min: HEADER_BYTES });
        }
        at_least("TCP", raw.len(), header_bytes)?;
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

    /// Returns the sequence number.
    pub fn sequence(&self) -> u32 {
        u32_at(self.bytes.as_ref(), 4)
    }

    /// Returns the length of the header in bytes, 20 to 60.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        usize::from(self.bytes.as_ref()[12] >> 4) * 4
    }

    /// Returns the control bits.
    pub fn flags(&self) -> Flags {
        Flags(self.bytes.as_ref()[13])
    }

    /// Returns the checksum field.
    pub fn checksum(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 16)
    }

    /// Returns whether the checksum is correct, given the sum of the pseudo-header.
    pub fn verify_checksum(&self, pseudo: Sum) -> bool {
        pseudo.add_bytes(self.bytes.as_ref()).folded() == 0xffff
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[self.header_bytes()..]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Sets the sequence number; does not update the checksum.
    pub fn set_sequence(&mut self, number: u32) {
        put(self.bytes.as_mut(), 4, &number.to_be_bytes());
    }

    /// Sets the control bits; does not update the checksum.
    pub fn set_flags(&mut self, flags: Flags) {
        self.bytes.as_mut()[13] = flags.0;
    }

    /// Computes and stores the checksum, given the sum of the pseudo-header.
    pub fn fill_checksum(&mut self, pseudo: Sum) {
        put(self.bytes.as_mut(), 16, &[0, 0]);
        let checksum = pseudo.add_bytes(self.bytes.as_ref()).checksum();
        put(self.bytes.as_mut(), 16, &checksum.to_be_bytes());
    }
}
