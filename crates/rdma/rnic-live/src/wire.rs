//! What carries packets.

use std::time::Duration;

use rnic::verbs::Address;
use rnic::wire::Encapsulation;
use thiserror::Error;

/// A wire that can carry nothing more at all. Packets that are lost are no error: the transport is there for them.
#[derive(Debug, Error)]
pub enum WireError {
    /// A system call failed.
    #[error("{call}: {error}; {remedy}")]
    System {
        /// Which one, on what.
        call: String,
        /// What the kernel said.
        error: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// No such peer.
    #[error("there is no peer {0} on this wire; add it before a queue pair is connected to it")]
    Peer(u32),
    /// An address that cannot be used.
    #[error("address '{address}' {what}; {remedy}")]
    Address {
        /// As given.
        address: String,
        /// What is wrong with it.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A link that cannot be used.
    #[error("a link with windows of {found} bytes; lanes need {needed}")]
    Window {
        /// Bytes there are.
        found: usize,
        /// Bytes there must be.
        needed: usize,
    },
    /// Faults that cannot be.
    #[error("{what} of {value} is no probability; choose 0 to 1")]
    Probability {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: f64,
    },
}

/// A packet that came. Its bytes are a peer's.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// From which peer: the wire knows it, whatever the packet says.
    pub from: Address,
    /// Whether a switch marked it (ECN-CE).
    pub is_marked: bool,
    /// The datagram around it, which its checksum covers; nothing where memory carries it.
    pub datagram: Option<Encapsulation>,
    /// Whether that tells the IPv4 identification that the sender's checksum covers, too.
    pub is_identified: bool,
    /// The packet.
    pub packet: &'a [u8],
}

/// What carries packets between this NIC and its peers: whole or not at all, in any order, as UDP does.
pub trait Wire {
    /// The datagram around a packet to this peer, for its checksum; nothing where none is looked at.
    ///
    /// # Errors
    /// When there is no such peer.
    fn datagram(&self, to: Address) -> Result<Option<Encapsulation>, WireError>;

    /// Takes a packet; it leaves by [`Wire::flush`] at the latest. False when there is no room now.
    ///
    /// # Errors
    /// When nothing will ever leave, or there is no such peer.
    fn send(&mut self, to: Address, packet: &[u8]) -> Result<bool, WireError>;

    /// Lets go what was taken, as far as there is room.
    ///
    /// # Errors
    /// When nothing will ever leave.
    fn flush(&mut self) -> Result<(), WireError>;

    /// The next packet that came from a peer. What comes from anybody else is dropped and counted.
    ///
    /// # Errors
    /// When nothing will ever come.
    fn receive(&mut self) -> Result<Option<Arrival<'_>>, WireError>;

    /// Sleeps until something comes, or there is room again for what could not leave, or for so long. It may end early.
    ///
    /// # Errors
    /// When nothing will ever come.
    fn wait(&mut self, limit: Option<Duration>) -> Result<(), WireError>;

    /// Datagrams that came from nobody that this wire knows, or that made no sense on it.
    fn strangers(&self) -> u64;
}
