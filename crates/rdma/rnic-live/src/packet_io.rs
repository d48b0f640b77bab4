//! The interface to whatever sends and receives packets.

use std::time::Duration;

use rnic::verbs::NicAddress;
use rnic::wire::Encapsulation;
use thiserror::Error;

/// Packet I/O that cannot continue. A lost packet is no error, because the transport recovers it.
#[derive(Debug, Error)]
pub enum PacketIoError {
    /// A system call failed.
    #[error("{call}: {error}; {remedy}")]
    System {
        /// The call and its object.
        call: String,
        /// The kernel's error.
        error: std::io::Error,
        /// The remedy.
        remedy: &'static str,
    },
    /// The peer is unknown.
    #[error("there is no peer {0}; add it before connecting a queue pair to it")]
    Peer(u32),
    /// The address cannot be used.
    #[error("address '{address}' {what}; {remedy}")]
    Address {
        /// The address given.
        address: String,
        /// What is wrong with it.
        what: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// The windows of a link are too small for lanes.
    #[error("a link with windows of {found} bytes; lanes need {needed}")]
    Window {
        /// Size of the link's windows.
        found: usize,
        /// Smallest size that is enough.
        needed: usize,
    },
    /// A fault rate is not a probability.
    #[error("{what} of {value} is not a probability; choose 0 to 1")]
    Probability {
        /// The rate's name.
        what: &'static str,
        /// The value given.
        value: f64,
    },
}

/// A received packet. A peer wrote its bytes, so nothing in them is trusted.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedPacket<'a> {
    /// The peer that sent it, known independently of its contents.
    pub from: NicAddress,
    /// Whether a switch marked it (ECN-CE).
    pub is_marked: bool,
    /// The headers of the datagram around it, which its checksum covers; `None` if it came through memory.
    pub encapsulation: Option<Encapsulation>,
    /// Whether `encapsulation` has the IPv4 identification that the sender's checksum covers.
    pub has_identification: bool,
    /// The packet.
    pub packet: &'a [u8],
}

/// Sends and receives packets between this NIC and its peers: each whole or not at all, in any order, like UDP.
pub trait PacketIo {
    /// Returns the headers of the datagram around a packet to `to`, for its checksum; `None` if packets have no
    /// checksum.
    ///
    /// # Errors
    /// When there is no such peer.
    fn encapsulation(&self, to: NicAddress) -> Result<Option<Encapsulation>, PacketIoError>;

    /// Queues or sends a packet; it leaves at the latest with [`PacketIo::flush`]. Returns false if there is no room
    /// now.
    ///
    /// # Errors
    /// When nothing can be sent any more, or there is no such peer.
    fn send(&mut self, to: NicAddress, packet: &[u8]) -> Result<bool, PacketIoError>;

    /// Sends what is queued, as far as there is room.
    ///
    /// # Errors
    /// When nothing can be sent any more.
    fn flush(&mut self) -> Result<(), PacketIoError>;

    /// Returns the next packet from a peer. A packet from an unknown sender is dropped and counted.
    ///
    /// # Errors
    /// When nothing can be received any more.
    fn receive(&mut self) -> Result<Option<ReceivedPacket<'_>>, PacketIoError>;

    /// Blocks until a packet arrives, there is room for queued packets, or `limit` has passed. It may return early.
    ///
    /// # Errors
    /// When nothing can be received any more.
    fn wait(&mut self, limit: Option<Duration>) -> Result<(), PacketIoError>;

    /// Returns the number of packets dropped because their sender is unknown or they are invalid for this I/O.
    fn rejected(&self) -> u64;
}
