//! What carries messages, under a mesh: four ways, one interface.

use std::os::fd::BorrowedFd;

use router::batch::message::{Header, Message, MessageError, Source};
use router::{Hop, NodeId};
use thiserror::Error;

use super::{InterconnectError, Offer, Terms};

/// Why nothing of a peer can be heard any more.
#[derive(Debug, Error)]
pub(super) enum Fault {
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
pub(super) struct Limits {
    /// Bytes of a message.
    pub message_bytes_max: usize,
    /// So many packets may be under way, and not yet said to be taken in, of a peer that is not behind.
    pub ahead_packets: u32,
    /// Messages under way.
    pub messages_max: usize,
    /// What messages take before it is learnt, see [`router::batch::Latency::new`].
    pub latency_ns: [f64; 3],
    /// Bytes under way.
    pub bytes_max: u64,
    /// What a peer has taken in is said in its messages; else [`Carrier::taken`] knows.
    pub tells_by_messages: bool,
}

/// Takes in what came.
pub(super) trait Intake {
    /// A message of a peer, and its bytes.
    fn take(&mut self, from: NodeId, message: &Message, source: &(impl Source + ?Sized)) -> Result<(), MessageError>;
}

/// Packets of a message to be.
pub(super) trait Packets<'a>: ExactSizeIterator<Item = (Hop, &'a [u8])> + Clone {}
impl<'a, T: ExactSizeIterator<Item = (Hop, &'a [u8])> + Clone> Packets<'a> for T {}

/// Carries messages between this node and its peers: whole, in order, each once at most.
pub(super) trait Carrier: Send {
    /// How much may be under way.
    fn limits(&self) -> Limits;

    /// See [`super::Interconnect::offer`].
    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError>;

    /// See [`super::Interconnect::accept`].
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<Terms, InterconnectError>;

    /// See [`super::Interconnect::finish`].
    fn finish(&mut self, node: NodeId, terms: &Terms) -> Result<(), InterconnectError>;

    /// Forgets a peer.
    fn leave(&mut self, node: NodeId);

    /// Begins anew, without peers.
    fn renew(&mut self) -> Result<(), InterconnectError>;

    /// Does what is to be done from time to time. Says whether there was anything.
    fn turn(&mut self) -> bool;

    /// Sends a message of the first of these packets, of which there is at least one, and which all fit a message by
    /// themselves. Says how many: none when there is no room now.
    fn send<'a>(&mut self, to: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, Fault>;

    /// Sends a message without packets, where there is room now; says whether there was.
    fn tell(&mut self, to: NodeId, header: &Header) -> Result<bool, Fault>;

    /// Lets go what was sent to a peer, and wakes it if it sleeps.
    fn flush(&mut self, to: NodeId);

    /// The next message that came; says whether there was one. A fault says whose.
    fn receive(&mut self, intake: &mut impl Intake) -> Result<bool, (NodeId, Fault)>;

    /// Messages that pretended to be a peer's, since it was joined.
    fn forged(&self, node: NodeId) -> u64 {
        let _ = node;
        0
    }

    /// What a peer says that it has taken in, where it need not send a message to say so.
    fn taken(&mut self, node: NodeId) -> Option<u32>;

    /// Says to a peer what this node has taken in, where that takes no message.
    fn say_taken(&mut self, node: NodeId, taken: u32);

    /// See [`super::Interconnect::wakes`].
    fn wakes(&self) -> Vec<BorrowedFd<'_>>;

    /// See [`super::Interconnect::may_sleep`].
    fn may_sleep(&mut self) -> bool;

    /// See [`super::Interconnect::woke`].
    fn woke(&mut self);
}
