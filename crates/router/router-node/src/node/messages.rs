//! The messages between the two threads of a node.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use packet::ethernet::MacAddress;
use router::batch::Policy;
use router::{
    AdjacencyId, ClaimState, Counters, Event, Filter, Neighbour, NodeId, Port, PortConfig, PortId, PortLosses,
    TracedStep, TransitPath,
};
use rustix::event::{EventfdFlags, eventfd};

use super::capture::Capture;
use crate::interconnect::{self, ConnectionParams, InterconnectError, Offer};

/// Capacity of the report channel. Neighbour events that do not fit are replaced by a full listing later.
pub const REPORTS_MAX: usize = 4096;
/// Capacity of the command channel. The control thread waits for room; the forwarding thread never does.
pub const COMMANDS_MAX: usize = 4096;

/// A command of the control thread.
pub enum Command {
    /// Attaches a port, and replaces the one with the same number.
    AttachPort(PortId, Box<dyn Port + Send>),
    /// Detaches a port so that it can be reopened; answered by [`Report::PortDetached`].
    DetachPort(PortId),
    /// Sets the configuration of a port.
    ConfigurePort(PortId, PortConfig),
    /// Removes ports, and renumbers the others: for each new number, the former one. Answered by
    /// [`Report::PortsRenumbered`].
    RenumberPorts(Vec<PortId>, Vec<Option<PortId>>),
    /// Sets the batching policy.
    SetBatching(Policy),
    /// Sets whether redirects are sent.
    SetRedirects(bool),
    /// Sets who forwards transit packets; answered by [`Report::TransitSet`].
    SetTransit(TransitPath),
    /// Sets the MTUs of another node's ports.
    SetRemoteMtus(NodeId, Vec<u16>),
    /// Sets whether another node is reachable.
    SetNodeUp(NodeId, bool),
    /// Requests an adjacency; answered by [`Report::AdjacencyPinned`].
    PinAdjacency(PortId, IpAddr),
    /// Releases an adjacency that no route uses.
    UnpinAdjacency(AdjacencyId),
    /// Sets the hardware address of a neighbour.
    LearnNeighbour(PortId, IpAddr, MacAddress),
    /// Starts or stops tracing.
    Trace(Option<Filter>),
    /// Starts a capture, unless there are too many.
    Capture(Box<Capture>),
    /// Requests counters and state; answered by [`Report::Snapshot`].
    Snapshot,
    /// Begins to connect the interconnect to a node; answered by [`Report::Offered`].
    OfferInterconnect(NodeId),
    /// Accepts the offer of a node; answered by [`Report::Accepted`].
    AcceptOffer(NodeId, Offer),
    /// Completes the connection to a node that has accepted; answered by [`Report::Finished`].
    FinishOffer(NodeId, ConnectionParams),
    /// Removes a node that was lost; answered by [`Report::PeerRemoved`].
    RemovePeer(NodeId),
    /// Restarts the interconnect; answered by [`Report::InterconnectRestarted`].
    RestartInterconnect,
    /// Ends the thread.
    Stop,
}

/// A report of the forwarding thread.
pub enum Report {
    /// A pinned adjacency; `None` when the neighbour table is full.
    AdjacencyPinned(PortId, IpAddr, Option<AdjacencyId>),
    /// Who forwards transit packets from now on.
    TransitSet(TransitPath),
    /// Events of neighbours.
    NeighbourEvents(Vec<Event>),
    /// All known neighbours, after events were lost.
    AllNeighbours(Vec<Neighbour>),
    /// Steps of traced packets.
    Traced(Vec<TracedStep>),
    /// Counters and state.
    Snapshot(Box<Snapshot>),
    /// The offer to send to a node.
    Offered(NodeId, Result<Offer, InterconnectError>),
    /// The parameters to send to a node that made an offer.
    Accepted(NodeId, Result<ConnectionParams, InterconnectError>),
    /// Whether the interconnect is connected to a node.
    Finished(NodeId, Result<(), InterconnectError>),
    /// Another node violates the protocol of the interconnect.
    PeerFailed(NodeId),
    /// Another node does not answer over the interconnect.
    PeerUnanswered(NodeId),
    /// Another node that was connected has answered over the interconnect.
    PeerAnswered(NodeId),
    /// No packet is sent to the node any more.
    PeerRemoved(NodeId),
    /// The device of a port is gone. Dropping the port may block in the kernel.
    PortFailed(PortId, io::Error, Box<dyn Port + Send>),
    /// A port was detached on command.
    PortDetached(PortId, Box<dyn Port + Send>),
    /// Ports were renumbered; these were removed. Dropping them may block in the kernel.
    PortsRenumbered(Vec<Box<dyn Port + Send>>),
    /// Whether the interconnect was restarted.
    InterconnectRestarted(Result<(), InterconnectError>),
    /// The process was suspended for some nanoseconds; the number of packets dropped because of that.
    Suspended(u64, usize),
}

/// Counters and state of the forwarding thread.
pub struct Snapshot {
    /// The forwarder's counters.
    pub counters: Counters,
    /// Counters of the interconnect by node.
    pub peers: Vec<interconnect::PeerCounters>,
    /// Losses by port.
    pub losses: Vec<PortLosses>,
    /// Neighbours, as many as a status lists.
    pub neighbours: Vec<Neighbour>,
    /// Addresses of the node that are not in use, by port.
    pub unused: Vec<(PortId, IpAddr, ClaimState)>,
    /// Free buffers.
    pub buffers_free: usize,
}

/// Wakes the other thread while it blocks, or before it does: an eventfd.
#[derive(Debug)]
pub struct Notifier(OwnedFd);

impl Notifier {
    /// Creates an eventfd.
    ///
    /// # Errors
    /// Returns the error of the kernel.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the descriptor readable.
    pub fn notify(&self) {
        // The write fails only when the counter is at its maximum: then the descriptor is readable.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next [`Notifier::notify`].
    pub fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
