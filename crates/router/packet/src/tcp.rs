//! TCP segments (RFC 9293), as far as a router looks at them.

use crate::Error;
use crate::checksum::Sum;
use crate::error::at_least;
use crate::octets::{put, u16_at, u32_at};

/// Bytes of a header without options.
pub const HEADER_BYTES: usize = 20;

/// The control bits of a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Flags = Flags(0x01);
    /// A connection begins.
    pub const SYN: Flags = Flags(0x02);
    /// A connection is reset.
    pub const RST: Flags = Flags(0x04);
    /// Data to be handed to the program.
    pub const PSH: Flags = Flags(0x08);
    /// The acknowledgement counts.
    pub const ACK: Flags = Flags(0x10);
    /// The urgent pointer counts.
    pub const URG: Flags = Flags(0x20);
    /// Congestion was experienced.
    pub const ECE: Flags = Flags(0x40);
    /// The sender has slowed down.
    pub const CWR: Flags = Flags(0x80);

    /// Whether all of `flags` are set.
    pub fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Without `flags`.
    #[must_use]
    pub fn without(self, flags: Flags) -> Flags {
        Flags(self.0 & !flags.0)
    }
}

/// A segment whose header length holds together.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks the header's length.
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

    /// The first byte's number.
    pub fn sequence(&self) -> u32 {
        u32_at(self.bytes.as_ref(), 4)
    }

    /// The number of the byte that is expected next.
    pub fn acknowledgement(&self) -> u32 {
        u32_at(self.bytes.as_ref(), 8)
    }

    /// Bytes of the header, 20 to 60.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        usize::from(self.bytes.as_ref()[12] >> 4) * 4
    }

    /// The control bits.
    pub fn flags(&self) -> Flags {
        Flags(self.bytes.as_ref()[13])
    }

    /// The window, as it stands there.
    pub fn window(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 14)
    }

    /// The checksum, as it stands there.
    pub fn checksum(&self) -> u16 {
        u16_at(self.bytes.as_ref(), 16)
    }

    /// Whether the segment sums up, `pseudo` being the sum of its pseudo-header.
    pub fn verify_checksum(&self, pseudo: Sum) -> bool {
        pseudo.add_bytes(self.bytes.as_ref()).folded() == 0xffff
    }

    /// The options' bytes.
    pub fn options(&self) -> &[u8] {
        &self.bytes.as_ref()[HEADER_BYTES..self.header_bytes()]
    }

    /// What follows the header.
    pub fn payload(&self) -> &[u8] {
        &self.bytes.as_ref()[self.header_bytes()..]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Sets the first byte's number; the checksum is the caller's.
    pub fn set_sequence(&mut self, number: u32) {
        put(self.bytes.as_mut(), 4, &number.to_be_bytes());
    }

    /// Sets the control bits; the checksum is the caller's.
    pub fn set_flags(&mut self, flags: Flags) {
        self.bytes.as_mut()[13] = flags.0;
    }

    /// Sets the checksum to what it must be, `pseudo` being the sum of the pseudo-header.
    pub fn fill_checksum(&mut self, pseudo: Sum) {
        put(self.bytes.as_mut(), 16, &[0, 0]);
        let checksum = pseudo.add_bytes(self.bytes.as_ref()).checksum();
        put(self.bytes.as_mut(), 16, &checksum.to_be_bytes());
    }
}

/// A header without options and without its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The port it comes from.
    pub source_port: u16,
    /// The port it goes to.
    pub destination_port: u16,
    /// The first byte's number.
    pub sequence: u32,
    /// The number of the byte that is expected next.
    pub acknowledgement: u32,
    /// The control bits.
    pub flags: Flags,
    /// The window.
    pub window: u16,
}

impl Repr {
    /// As the segment has it, but for its options.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Repr {
        Repr {
            source_port: packet.source_port(),
            destination_port: packet.destination_port(),
            sequence: packet.sequence(),
            acknowledgement: packet.acknowledgement(),
            flags: packet.flags(),
            window: packet.window(),
        }
    }

    /// Writes [`HEADER_BYTES`] to the front of `bytes`, all of which are the segment; its payload stands there
    /// already. Fewer bytes than the header's are a bug of the caller's.
    pub fn emit(&self, bytes: &mut [u8], pseudo: Sum) {
        put(bytes, 0, &self.source_port.to_be_bytes());
        put(bytes, 2, &self.destination_port.to_be_bytes());
        put(bytes, 4, &self.sequence.to_be_bytes());
        put(bytes, 8, &self.acknowledgement.to_be_bytes());
        put(bytes, 12, &[0x50, self.flags.0]);
        put(bytes, 14, &self.window.to_be_bytes());
        put(bytes, 16, &[0; 4]);
        let checksum = pseudo.add_bytes(bytes).checksum();
        put(bytes, 16, &checksum.to_be_bytes());
    }
}
