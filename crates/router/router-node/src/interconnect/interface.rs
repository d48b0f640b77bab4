//! The [`Interconnect`] trait, and the types that its users and its implementations share.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use fabric::shm::ShmDescriptors;
use fabric::timed::LinkTiming;
use router::batch::{Parcel, Policy, PolicyError};
use router::{NodeId, Pool};
use serde::{Deserialize, Serialize};
use sim::{Span, Time};
use thiserror::Error;

/// The transport of packets between nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TransportKind {
    /// Rings in shared memory, for nodes of one machine.
    Lanes,
    /// Rings in shared memory with the latency and bandwidth of a modelled link.
    Windows(LinkTiming),
    /// The RDMA transport (unreliable connections, SEND and RECV) over lanes.
    RnicLanes,
    /// The RDMA transport over UDP, bound to this address; port 0 lets the kernel choose one.
    RnicUdp(SocketAddr),
}

/// Settings of an interconnect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InterconnectSettings {
    /// How packets are batched.
    pub policy: Policy,
    /// Maximum number of packets queued for one node; further packets are dropped and counted.
    pub queue_packets: usize,
    /// Whether packets take a detour over a third node while the direct link is congested.
    pub balances: bool,
    /// How long a flow must be idle before it leaves a detour.
    pub flowlet_gap: Span,
    /// How long a peer whose acknowledgements are messages may leave this node's messages unanswered, in time that this
    /// node has run; `None` for any time.
    pub unanswered_max: Option<Span>,
}

impl Default for InterconnectSettings {
    /// Adaptive batches, queues of 1024 packets, detours, and no limit on answers. The flowlet gap is 20 ms, as a
    /// relaying node may have to wait for a CPU.
    fn default() -> InterconnectSettings {
        InterconnectSettings {
            policy: Policy::adaptive(),
            queue_packets: 1024,
            balances: true,
            flowlet_gap: Span::from_ps(20_000_000_000),
            unanswered_max: None,
        }
    }
}

/// Connection parameters that two nodes exchange over their control session, where the order of the fields is part of
/// the protocol. Those of a peer are checked when they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionParams {
    /// Known to the two nodes only. Over UDP, the token that the peer appends to each message.
    pub secret: u64,
    /// The sender's queue pair, with the RDMA transport.
    pub queue_pair: u32,
    /// The packet sequence number (PSN) of its first packet.
    pub packet_sequence: u32,
    /// Its address, over UDP.
    pub address: Option<SocketAddr>,
}

/// An offer to connect to another node.
#[derive(Debug)]
pub struct Offer {
    /// The parameters of this endpoint.
    pub params: ConnectionParams,
    /// Shared memory and doorbells, in this order: at most [`DESCRIPTORS_MAX`].
    pub descriptors: Vec<OwnedFd>,
}

/// Maximum number of descriptors in an [`Offer`].
pub const DESCRIPTORS_MAX: usize = 3;

/// Why two nodes cannot be connected, or an interconnect cannot be opened.
#[derive(Debug, Error)]
pub enum InterconnectError {
    /// Shared memory.
    #[error(transparent)]
    Memory(#[from] fabric::shm::ShmError),
    /// Invalid timing of a modelled link.
    #[error(transparent)]
    Timing(#[from] fabric::timed::TimedError),
    /// The RDMA transport, or its packet I/O.
    #[error(transparent)]
    Nic(#[from] rnic_live::LiveError),
    /// Invalid batching policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// An invalid value in a peer's offer.
    #[error("node {node}: {what} of {found} in its offer; it must be {expected}")]
    InvalidOffer {
        /// The peer.
        node: u8,
        /// The parameter.
        what: &'static str,
        /// The value.
        found: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A call that is not valid for this node.
    #[error("node {node} {what}; {remedy}")]
    Node {
        /// The node.
        node: u8,
        /// The error.
        what: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// A system call failed.
    #[error("{call}: {error}")]
    System {
        /// The system call.
        call: &'static str,
        /// The error of the kernel.
        error: io::Error,
    },
}

/// Counters of the packets exchanged with one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounters {
    /// Packets sent.
    pub sent_packets: u64,
    /// Messages that carried the sent packets.
    pub sent_messages: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Messages that carried the received packets.
    pub received_messages: u64,
    /// Packets to the peer that were sent over a third node, counted at their ingress node.
    pub detoured_packets: u64,
    /// Packets of the peer that were relayed to a third node.
    pub relayed_packets: u64,
    /// Packets dropped because the queue was full.
    pub drop_full: u64,
    /// Packets dropped because the peer was not connected.
    pub drop_absent: u64,
    /// Packets dropped because they are longer than a message.
    pub drop_long: u64,
    /// Packets of the peer dropped because no buffer was free.
    pub drop_no_buffer: u64,
    /// Packets of the peer that were lost in transit.
    pub lost_packets: u64,
    /// Messages that failed authentication since the peer was last connected.
    pub forged_messages: u64,
}

/// The state of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Not connected.
    Absent,
    /// An offer was made and not answered yet.
    Offered,
    /// Connected.
    Up,
    /// The peer violated the protocol: its messages are ignored. It can be removed and connected again.
    Broken,
    /// The peer has left messages unanswered for too long, and is ignored. It can be removed and connected again.
    Unanswered,
}

/// Exchanges packets between this node and its peers. It is used by one thread, and no method blocks.
pub trait Interconnect: Send {
    /// Begins to connect to a node.
    ///
    /// # Errors
    /// Returns an error when the node is connected already, or shared memory cannot be created.
    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError>;

    /// Accepts the offer of a node. The returned parameters are sent back to it.
    ///
    /// # Errors
    /// Returns an error when the node is connected already, or the offer is invalid.
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError>;

    /// Completes the connection to a node that has accepted an offer.
    ///
    /// # Errors
    /// Returns an error when there was no offer, or the parameters are invalid.
    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<(), InterconnectError>;

    /// Removes a peer, and drops the packets queued for it.
    fn remove_peer(&mut self, pool: &mut Pool, node: NodeId);

    /// Removes all peers and restarts the clock: the time passed to later calls begins at zero again. Time in
    /// picoseconds overflows 64 bits after 213 days.
    ///
    /// # Errors
    /// Returns an error when the interconnect cannot be opened again.
    fn restart(&mut self, pool: &mut Pool) -> Result<(), InterconnectError>;

    /// Returns the state of a peer.
    fn state(&self, node: NodeId) -> PeerState;

    /// Returns whether a peer that is up has sent a message since it was connected, so that the path to it works.
    /// Shared memory always does.
    fn has_answered(&self, node: NodeId) -> bool;

    /// Sets the batching policy, also for packets that are already queued.
    ///
    /// # Panics
    /// Panics if the policy is invalid.
    fn set_policy(&mut self, policy: Policy);

    /// Records the start of an iteration of the node's loop, and whether the previous one had any work, for this
    /// interconnect or anything else. Adaptive batches derive the node's occupancy from it.
    fn begin_iteration(&mut self, now: Time, was_busy: bool);

    /// Queues all `parcels` for another node, in order. Those that exceed the queue are dropped and counted.
    fn send(&mut self, now: Time, pool: &mut Pool, to: NodeId, parcels: &mut Vec<Parcel>);

    /// Sends what is due, appends at most `packets_max` packets for this node to `arrived`, and relays those for other
    /// nodes. Returns whether there was any work. The [`Hop`](router::Hop)s come from peers and may not exist.
    fn poll(&mut self, now: Time, pool: &mut Pool, arrived: &mut Vec<Parcel>, packets_max: usize) -> bool;

    /// Returns when the next poll is due at the latest; `None` when no timer is pending.
    fn deadline(&self) -> Option<Time>;

    /// Returns the descriptors that become readable when there is work. They change as peers are added and removed.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Asks all peers to wake this node before it blocks on [`Interconnect::wait_fds`]. Returns false when there is
    /// work already. [`Interconnect::finish_wait`] follows in either case.
    fn prepare_wait(&mut self) -> bool;

    /// Tells the peers that this node is awake.
    fn finish_wait(&mut self);

    /// Returns the counters of a peer since it was first connected.
    fn counters(&self, node: NodeId) -> PeerCounters;
}

/// Returns the shared memory and doorbells of a node's offer, and checks its secret.
pub(super) fn shared_memory(node: NodeId, offer: Offer) -> Result<ShmDescriptors, InterconnectError> {
    let found = offer.descriptors.len();
    let Ok([memfd, doorbell_creator, doorbell_peer]) = <[OwnedFd; 3]>::try_from(offer.descriptors) else {
        return Err(invalid_offer(node, "a number of descriptors", found, "3: memory and two doorbells"));
    };
    if offer.params.secret == 0 {
        return Err(invalid_offer(node, "a secret", 0, "random, and not 0"));
    }
    Ok(ShmDescriptors { memfd, doorbell_creator, doorbell_peer })
}

pub(super) fn random_u64() -> Result<u64, InterconnectError> {
    let mut bytes = [0; 8];
    // `getrandom` returns up to 256 bytes completely once the pool is initialised (getrandom(2)).
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
