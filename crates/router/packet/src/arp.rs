//! ARP for IPv4 over Ethernet (RFC 826, RFC 5227).

use std::net::Ipv4Addr;

use crate::Error;
use crate::error::at_least;
use crate::ethernet::{EtherType, MacAddress};
use crate::octets::{array_at, put, u16_at};

/// Bytes of a packet.
pub const PACKET_BYTES: usize = 28;

const HARDWARE_ETHERNET: u16 = 1;

/// What a packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Who has the target's protocol address?
    Request,
    /// The sender has.
    Reply,
}

/// A packet of ARP for IPv4 over Ethernet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Refuses other hardware and protocols, and other operations than request and reply.
    pub fn new_checked(bytes: T) -> Result<Packet<T>, Error> {
        let raw = bytes.as_ref();
        at_least("ARP", raw.len(), PACKET_BYTES)?;
        let expect = |at: usize, expected: u16| match u16_at(raw, at) {
            found if found == expected => Ok(()),
            found => Err(Error::Version { protocol: "ARP", found, expected }),
        };
        expect(0, HARDWARE_ETHERNET)?;
        expect(2, EtherType::IPV4.0)?;
        expect(4, 0x0604)?;
        match u16_at(raw, 6) {
            1 | 2 => Ok(Packet { bytes }),
            _ => Err(Error::Kind { protocol: "ARP", kind: raw[7] }),
        }
    }

    /// What it is for.
    pub fn operation(&self) -> Operation {
        if u16_at(self.bytes.as_ref(), 6) == 1 { Operation::Request } else { Operation::Reply }
    }

    /// The sender's hardware address.
    pub fn sender_mac(&self) -> MacAddress {
        MacAddress(array_at(self.bytes.as_ref(), 8))
    }

    /// The sender's address; 0.0.0.0 where it asks whether it may have the target's.
    pub fn sender(&self) -> Ipv4Addr {
        Ipv4Addr::from(array_at::<4>(self.bytes.as_ref(), 14))
    }

    /// The target's hardware address; means nothing in a request.
    pub fn target_mac(&self) -> MacAddress {
        MacAddress(array_at(self.bytes.as_ref(), 18))
    }

    /// The address that is asked for, or to whom the reply is.
    pub fn target(&self) -> Ipv4Addr {
        Ipv4Addr::from(array_at::<4>(self.bytes.as_ref(), 24))
    }
}

/// A packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// What it is for.
    pub operation: Operation,
    /// The sender's hardware address.
    pub sender_mac: MacAddress,
    /// The sender's address.
    pub sender: Ipv4Addr,
    /// The target's hardware address; zero in a request.
    pub target_mac: MacAddress,
    /// The address that is asked for, or to whom the reply is.
    pub target: Ipv4Addr,
}

impl Repr {
    /// As the packet has it.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Repr {
        Repr {
            operation: packet.operation(),
            sender_mac: packet.sender_mac(),
            sender: packet.sender(),
            target_mac: packet.target_mac(),
            target: packet.target(),
        }
    }

    /// Writes [`PACKET_BYTES`] to the front of `bytes`; fewer are a bug of the caller's.
    pub fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 0, &HARDWARE_ETHERNET.to_be_bytes());
        put(bytes, 2, &EtherType::IPV4.0.to_be_bytes());
        put(bytes, 4, &[6, 4]);
        put(bytes, 6, &[0, if self.operation == Operation::Request { 1 } else { 2 }]);
        put(bytes, 8, &self.sender_mac.0);
        put(bytes, 14, &self.sender.octets());
        put(bytes, 18, &self.target_mac.0);
        put(bytes, 24, &self.target.octets());
    }
}
