//! What carries messages, under a mesh: four ways, one interface.

use std::os::fd::BorrowedFd;

use router::batch::Carried;
use router::batch::message::{Header, Message, MessageError, Source, WANTS_MAX};
use router::{Hop, NodeId};
use thiserror::Error;

use super::interface::{ConnectionParams, InterconnectError, Offer};

/// Why nothing of a peer can be heard any more.
#[derive(Debug, Error)]
pub(super) enum CarrierError {
    /// It sent what is no message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// It broke the protocol of its lane.
    #[error(transparent)]
    Lane(#[from] lane::Corrupt),
    /// The transport gave the connection up.
    #[error("{0}")]
    Transport(String),
}

/// How much may be under way to one peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FlowLimits {
    /// Bytes of a message.
    pub message_bytes_max: usize,
    /// So many packets may be under way, and not yet said to be taken in, of a peer that is not behind.
    pub ahead_packets: u32,
    /// Messages under way.
    pub messages_max: usize,
    /// By what messages are carried.
    pub carried: Carried,
    /// What messages take before it is learnt, see [`router::batch::Latency::new`].
    pub latency_ns: [f64; 3],
    /// Bytes under way.
    pub bytes_max: u64,
    /// What a peer has taken in is said in its messages; else [`Carrier::taken`] knows.
    pub acks_in_messages: bool,
}

/// What a node says of what it takes in from another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ack {
    /// Packets that it has taken in, mod 2^32.
    pub taken: u32,
    /// How busy it is, see [`Header::wants`].
    pub wants: u8,
}

impl Ack {
    /// In one word of memory.
    pub fn to_word(self) -> u64 {
        u64::from(self.wants) << 32 | u64::from(self.taken)
    }

    /// From a word that a peer has written, which may be anything.
    pub fn from_word(word: u64) -> Ack {
        Ack { taken: word as u32, wants: ((word >> 32) as u8).min(WANTS_MAX) }
    }
}

/// Takes in what came.
pub(super) trait MessageSink {
    /// A message of a peer, and its bytes.
    fn receive(&mut self, from: NodeId, message: &Message, source: &(impl Source + ?Sized))
    -> Result<(), MessageError>;
}

/// Packets of a message to be.
pub(super) trait Packets<'a>: ExactSizeIterator<Item = (Hop, &'a [u8])> + Clone {}
impl<'a, T: ExactSizeIterator<Item = (Hop, &'a [u8])> + Clone> Packets<'a> for T {}

/// Carries messages between this node and its peers: whole, in order, each once at most.
pub(super) trait Carrier: Send {
    /// How much may be under way.
    fn limits(&self) -> FlowLimits;

    /// See [`super::Interconnect::offer`].
    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError>;

    /// See [`super::Interconnect::accept`].
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError>;

    /// See [`super::Interconnect::finish`].
    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<(), InterconnectError>;

    /// Forgets a peer.
    fn remove_peer(&mut self, node: NodeId);

    /// Begins anew, without peers.
    fn restart(&mut self) -> Result<(), InterconnectError>;

    /// Does what is to be done from time to time. Says whether there was anything.
    fn poll(&mut self) -> bool;

    /// Sends a message of the first of these packets, of which there is at least one, and which all fit a message by
    /// themselves. Says how many: none when there is no room now.
    fn send<'a>(&mut self, to: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, CarrierError>;

    /// Sends a message without packets, where there is room now; says whether there was.
    fn send_ack(&mut self, to: NodeId, header: &Header) -> Result<bool, CarrierError>;

    /// Lets go what was sent to a peer, and wait_fds it if it sleeps.
    fn flush(&mut self, to: NodeId);

    /// The next message that came; says whether there was one. A fault says whose.
    fn receive(&mut self, sink: &mut impl MessageSink) -> Result<bool, (NodeId, CarrierError)>;

    /// Messages that pretended to be a peer's, since it was joined.
    fn forged(&self, node: NodeId) -> u64 {
        let _ = node;
        0
    }

    /// What a peer says of what it takes in, where it need not send a message to say so.
    fn poll_ack(&mut self, node: NodeId) -> Option<Ack>;

    /// Says it to a peer, where that takes no message.
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
    fn what_is_told_comes_back_and_a_peer_cannot_say_that_it_is_busier_than_can_be() {
        let ack = Ack { taken: 0xffff_fffe, wants: 7 };
        assert_eq!(Ack::from_word(ack.to_word()), ack);
        assert_eq!(Ack::from_word(u64::MAX), Ack { taken: u32::MAX, wants: WANTS_MAX });
    }
}
