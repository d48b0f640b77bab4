//! The [`Interconnect`] trait, and the types that its users and its implementations share.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use fabric::timed::LinkTiming;
use router::batch::{Parcel, Policy, PolicyError};
use router::{NodeId, Pool};
use sim::{Span, Time};
use thiserror::Error;

/// What carries packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TransportKind {
    /// Rings in memory that both nodes share: nodes of one machine.
    Lanes,
    /// The same, as late as over a modelled link.
    Windows(LinkTiming),
    /// The RDMA transport (unreliable connections, SEND and RECV) over lanes.
    RnicLanes,
    /// The same over UDP, from this address; port 0 lets the kernel choose one.
    RnicUdp(SocketAddr),
}

/// How an interconnect is to work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InterconnectSettings {
    /// How packets are put together.
    pub policy: Policy,
    /// Packets that wait for one node, at most; what comes beyond is dropped and counted.
    pub queue_packets: usize,
    /// Whether packets go over a third node where the direct link is hot.
    pub balances: bool,
    /// How long a flow must have been silent before it changes its way back.
    pub flowlet_gap: Span,
}

impl Default for InterconnectSettings {
    /// Adaptive batches, a thousand packets in each queue, detours; a flow goes back after 20 ms of silence: a node
    /// that passes packets on may have to wait for its processor.
    fn default() -> InterconnectSettings {
        InterconnectSettings {
            policy: Policy::adaptive(),
            queue_packets: 1024,
            balances: true,
            flowlet_gap: Span::from_ps(20_000_000_000),
        }
    }
}

/// What two ends of a connection tell each other: plain values, to be encoded as the control plane likes. Those of a
/// peer are checked when they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionParams {
    /// Known to both ends alone. Over UDP it is what the other end has to put after each message.
    pub secret: u64,
    /// The queue pair of who says it, where there is one.
    pub queue_pair: u32,
    /// The number of its first packet.
    pub packet_sequence: u32,
    /// Where it is, over UDP.
    pub address: Option<SocketAddr>,
}

/// What one node offers another.
#[derive(Debug)]
pub struct Offer {
    /// Plain values.
    pub params: ConnectionParams,
    /// What both share, in this order: at most [`DESCRIPTORS_MAX`].
    pub descriptors: Vec<OwnedFd>,
}

/// The most descriptors of an [`Offer`].
pub const DESCRIPTORS_MAX: usize = 3;

/// Why nodes could not be joined, or an interconnect not be made.
#[derive(Debug, Error)]
pub enum InterconnectError {
    /// Shared memory.
    #[error(transparent)]
    Memory(#[from] fabric::shm::ShmError),
    /// A modelled link that cannot be.
    #[error(transparent)]
    Timing(#[from] fabric::timed::TimedError),
    /// The RDMA transport, or its wire.
    #[error(transparent)]
    Nic(#[from] rnic_live::LiveError),
    /// A policy that cannot be.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// What a peer offered makes no sense.
    #[error("node {node}: {what} of {found} in its offer; it must be {expected}")]
    InvalidOffer {
        /// Which node.
        node: u8,
        /// What of the offer.
        what: &'static str,
        /// What was found.
        found: String,
        /// What could be.
        expected: &'static str,
    },
    /// No place for this peer.
    #[error("node {node} {what}; {remedy}")]
    Node {
        /// Which node.
        node: u8,
        /// What is wrong.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// The kernel refused.
    #[error("{call}: {error}")]
    System {
        /// What was attempted.
        call: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
}

/// Packets between this node and one other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounters {
    /// Packets that left for it.
    pub sent_packets: u64,
    /// Messages that they went in.
    pub sent_messages: u64,
    /// Packets that came from it.
    pub received_packets: u64,
    /// Messages that they came in.
    pub received_messages: u64,
    /// Packets that went to it over a third node: counted where they came in.
    pub detoured_packets: u64,
    /// Packets that came from it and were passed on to a third node.
    pub relayed_packets: u64,
    /// Packets dropped because too many waited already.
    pub drop_full: u64,
    /// Packets dropped because it was not there, or no more.
    pub drop_absent: u64,
    /// Packets dropped because they are longer than a message.
    pub drop_long: u64,
    /// Packets from it that found no buffer here.
    pub drop_no_buffer: u64,
    /// Packets that it sent and that never came.
    pub lost_packets: u64,
    /// Messages that pretended to be its own, since it was joined last.
    pub forged_messages: u64,
}

/// Whether a node can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nobody joined it.
    Absent,
    /// An offer was made and not yet answered.
    Offered,
    /// Packets go and come.
    Up,
    /// It broke the protocol: nothing of it is heard any more. It can leave and be joined again.
    Broken,
}

/// What carries packets between this node and its peers. One thread has it at a time, and nothing in it waits.
pub trait Interconnect: Send {
    /// Begins to join a node.
    ///
    /// # Errors
    /// When it is joined already, or what both would share cannot be made.
    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError>;

    /// Joins a node that made an offer; what it says goes back to it.
    ///
    /// # Errors
    /// When it is joined already, or what it offers makes no sense.
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError>;

    /// Joins a node that accepted an offer.
    ///
    /// # Errors
    /// When there was no offer, or what it says makes no sense.
    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<(), InterconnectError>;

    /// Forgets a node, and drops what waits for it.
    fn remove_peer(&mut self, pool: &mut Pool, node: NodeId);

    /// Leaves all nodes and begins anew, as does the time that it is given from now on: 64 bits of picoseconds last for
    /// 213 days.
    ///
    /// # Errors
    /// When it cannot be made once more.
    fn restart(&mut self, pool: &mut Pool) -> Result<(), InterconnectError>;

    /// Whether a node can be reached.
    fn state(&self, node: NodeId) -> PeerState;

    /// Packets are put together so from now on, those that wait too.
    ///
    /// # Panics
    /// On a policy that cannot be.
    fn set_policy(&mut self, policy: Policy);

    /// A round of this node's loop begins; whether there was something to do in the one that ends, be it for others or
    /// not. By that adaptive batches tell how busy the node is.
    fn begin_round(&mut self, now: Time, was_busy: bool);

    /// Takes all of `parcels`, in their order, for another node. Those that there is no room for are dropped and
    /// counted.
    fn send(&mut self, now: Time, pool: &mut Pool, to: NodeId, parcels: &mut Vec<Parcel>);

    /// Sends what is to go now, appends packets for this node that have come, at most `packets_max`, to `arrived`, and
    /// passes on those for others. Says whether anything happened. What [`Hop`](router::Hop)s name here may not exist:
    /// peers say it.
    fn poll(&mut self, now: Time, pool: &mut Pool, arrived: &mut Vec<Parcel>, packets_max: usize) -> bool;

    /// When the next turn is to be at the latest, though nothing comes; nothing when nothing waits for time to pass.
    fn deadline(&self) -> Option<Time>;

    /// What becomes readable when there is something to do. It changes when nodes join and leave.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Before sleeping on [`Interconnect::wait_fds`]: asks all peers to wake this node; false when there is something to
    /// do already. [`Interconnect::finish_wait`] follows in either case.
    fn prepare_wait(&mut self) -> bool;

    /// After sleeping: peers need wake this node no more.
    fn finish_wait(&mut self);

    /// What was counted of a node since it was joined first.
    fn counters(&self, node: NodeId) -> PeerCounters;
}

pub(super) fn random_u64() -> Result<u64, InterconnectError> {
    let mut bytes = [0; 8];
    // So few bytes come whole, once the kernel has any.
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    filled.map_err(|errno| InterconnectError::System { call: "getrandom", error: errno.into() })?;
    Ok(u64::from_le_bytes(bytes).max(1))
}

pub(super) fn invalid_offer(
    node: NodeId,
    what: &'static str,
    found: impl ToString,
    expected: &'static str,
) -> InterconnectError {
    InterconnectError::InvalidOffer { node: node.0, what, found: found.to_string(), expected }
}
