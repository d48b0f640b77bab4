//! The interface of message transports under a mesh.

use std::os::fd::BorrowedFd;

use router::NodeId;
use router::batch::MessageTransfer;
use router::batch::message::{Header, Item, Message, MessageError, OCCUPANCY_MAX, Source};
use thiserror::Error;

use super::interface::{ConnectionParams, InterconnectError, Offer};

/// Why the messages of a peer are ignored from now on.
#[derive(Debug, Error)]
pub(super) enum CarrierError {
    /// The peer sent an invalid message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The peer violated the protocol of its lane.
    #[error(transparent)]
    Lane(#[from] lane::Corrupt),
    /// The RDMA connection failed.
    #[error("{0}")]
    Transport(String),
}

/// Flow control limits for one peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FlowLimits {
    /// Maximum length of a message in bytes.
    pub message_bytes_max: usize,
    /// Packets in flight to a peer that keeps up: sent, and not acknowledged yet.
    pub ahead_packets: u32,
    /// Maximum number of messages in flight.
    pub messages_max: usize,
    /// How messages leave the process.
    pub transfer: MessageTransfer,
    /// The initial latency model, see [`router::batch::Latency::new`].
    pub latency_ns: [f64; 3],
    /// Maximum number of bytes in flight.
    pub bytes_max: u64,
    /// Whether acknowledgements are part of messages; otherwise [`Carrier::poll_ack`] reads them.
    pub acks_in_messages: bool,
}

/// A cumulative acknowledgement, with the occupancy of the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ack {
    /// Number of packets received, mod 2^32.
    pub number: u32,
    /// Occupancy, see [`Header::occupancy`].
    pub occupancy: u8,
}

impl Ack {
    /// Encodes the acknowledgement as a word in shared memory.
    pub fn to_word(self) -> u64 {
        u64::from(self.occupancy) << 32 | u64::from(self.number)
    }

    /// Decodes a word that a peer has written; any value is valid.
    pub fn from_word(word: u64) -> Ack {
        Ack { number: word as u32, occupancy: ((word >> 32) as u8).min(OCCUPANCY_MAX) }
    }
}

/// Receives messages.
pub(super) trait MessageSink {
    /// Processes a message of a peer and its bytes.
    fn receive(&mut self, from: NodeId, message: &Message, source: &(impl Source + ?Sized))
    -> Result<(), MessageError>;
}

/// The packets of a message to be sent.
pub(super) trait Packets<'a>: ExactSizeIterator<Item = Item<'a>> + Clone {}
impl<'a, T: ExactSizeIterator<Item = Item<'a>> + Clone> Packets<'a> for T {}

/// Carries messages between this node and its peers: complete, in order, and at most once.
pub(super) trait Carrier: Send {
    /// Returns the flow control limits.
    fn limits(&self) -> FlowLimits;

    /// See [`super::Interconnect::offer`].
    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError>;

    /// See [`super::Interconnect::accept`].
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError>;

    /// See [`super::Interconnect::finish`].
    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<(), InterconnectError>;

    /// Removes a peer.
    fn remove_peer(&mut self, node: NodeId);

    /// Removes all peers and starts again.
    fn restart(&mut self) -> Result<(), InterconnectError>;

    /// Performs periodic work. Returns whether there was any.
    fn poll(&mut self) -> bool;

    /// Returns the length of the longest message that is sent to a peer without loss of room: at most
    /// [`FlowLimits::message_bytes_max`].
    fn part_bytes_max(&self, to: NodeId) -> usize {
        let _ = to;
        self.limits().message_bytes_max
    }

    /// Sends a message with as many of the packets as fit. There is at least one packet, and each fits a message by
    /// itself. Returns the number of packets sent: 0 when there is no room now.
    fn send<'a>(&mut self, to: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, CarrierError>;

    /// Sends a message without packets. Returns whether there was room.
    fn send_ack(&mut self, to: NodeId, header: &Header) -> Result<bool, CarrierError>;

    /// Transmits what was sent to a peer, and wakes it if it sleeps.
    fn flush(&mut self, to: NodeId);

    /// Receives the next message. Returns whether there was one, or the peer that caused an error.
    fn receive(&mut self, sink: &mut impl MessageSink) -> Result<bool, (NodeId, CarrierError)>;

    /// Returns the number of messages that failed authentication since the peer was connected.
    fn forged(&self, node: NodeId) -> u64 {
        let _ = node;
        0
    }

    /// Reads the acknowledgement of a peer, if it is not part of messages.
    fn poll_ack(&mut self, node: NodeId) -> Option<Ack>;

    /// Writes the acknowledgement for a peer, if it is not part of messages.
    fn write_ack(&mut self, node: NodeId, ack: Ack);

    /// See [`super::Interconnect::wait_fds`].
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// See [`super::Interconnect::prepare_wait`].
    fn prepare_wait(&mut self) -> bool;

    /// See [`super::Interconnect::finish_wait`].
    fn finish_wait(&mut self);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_word_round_trips_and_its_occupancy_is_clamped() {
        let ack = Ack { number: 0xffff_fffe, occupancy: 7 };
        assert_eq!(Ack::from_word(ack.to_word()), ack);
        assert_eq!(Ack::from_word(u64::MAX), Ack { number: u32::MAX, occupancy: OCCUPANCY_MAX });
    }
}
