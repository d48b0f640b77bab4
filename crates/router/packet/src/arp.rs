//! ARP for IPv4 over Ethernet (RFC 826, RFC 5227).

use std::net::Ipv4Addr;

use crate::Error;
use crate::error::at_least;
use crate::ethernet::{EtherType, MacAddress};
use crate::octets::{array_at, put, u16_at};

/// Length of a packet in bytes.
pub const PACKET_BYTES: usize = 28;

const HARDWARE_ETHERNET: u16 = 1;

/// The operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Asks for the MAC address of the target protocol address.
    Request,
    /// States that the sender protocol address is at the sender MAC address.
    Reply,
}

/// An ARP packet for IPv4 over Ethernet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Rejects other hardware and protocol types, and operations other than request and reply.
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

    /// Returns the operation.
    pub fn operation(&self) -> Operation {
        if u16_at(self.bytes.as_ref(), 6) == 1 { Operation::Request } else { Operation::Reply }
    }

    /// Returns the sender MAC address.
    pub fn sender_mac(&self) -> MacAddress {
        MacAddress(array_at(self.bytes.as_ref(), 8))
    }

    /// Returns the sender protocol address; 0.0.0.0 in an address probe (RFC 5227).
    pub fn sender(&self) -> Ipv4Addr {
        Ipv4Addr::from(array_at::<4>(self.bytes.as_ref(), 14))
    }

    /// Returns the target MAC address, which has no meaning in a request.
    pub fn target_mac(&self) -> MacAddress {
        MacAddress(array_at(self.bytes.as_ref(), 18))
    }

    /// Returns the target protocol address: the one requested, or that of the requester in a reply.
    pub fn target(&self) -> Ipv4Addr {
        Ipv4Addr::from(array_at::<4>(self.bytes.as_ref(), 24))
    }
}

/// The fields of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Operation.
    pub operation: Operation,
    /// Sender MAC address.
    pub sender_mac: MacAddress,
    /// Sender protocol address.
    pub sender: Ipv4Addr,
    /// Target MAC address; zero in a request.
    pub target_mac: MacAddress,
    /// Target protocol address.
    pub target: Ipv4Addr,
}

impl Repr {
    /// Reads the fields of `packet`.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Repr {
        Repr {
            operation: packet.operation(),
            sender_mac: packet.sender_mac(),
            sender: packet.sender(),
            target_mac: packet.target_mac(),
            target: packet.target(),
        }
    }

    /// Writes [`PACKET_BYTES`] to the front of `bytes`. Panics if `bytes` is shorter.
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
