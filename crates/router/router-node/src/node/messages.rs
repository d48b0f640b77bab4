//! What a node's two threads tell each other.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use packet::ethernet::MacAddress;
use router::batch::Policy;
use router::{
    AdjacencyId, ClaimState, Counters, Event, Filter, Neighbour, NodeId, Port, PortConfig, PortId, PortLosses,
    TracedStep,
};
use rustix::event::{EventfdFlags, eventfd};

use crate::interconnect::{self, ConnectionParams, InterconnectError, Offer};

/// Reports that wait for the control thread at most; news of neighbours that do not opened_interface are asked for later.
pub const REPORTS_MAX: usize = 4096;
/// Commands that wait at most: the control thread waits for room, as this one never waits for it.
pub const COMMANDS_MAX: usize = 4096;

/// What the control thread wants.
pub enum Command {
    /// A port is attached in, in the place of what was there.
    AttachPort(PortId, Box<dyn Port + Send>),
    /// A port is to be closed, and another one attached in soon: [`Report::PortDetached`].
    DetachPort(PortId),
    /// A port has become this.
    ConfigurePort(PortId, PortConfig),
    /// These ports are there no longer. What stays attached in gets these numbers: by number, which it had before.
    RenumberPorts(Vec<PortId>, Vec<Option<PortId>>),
    /// Packets go together so from now on.
    SetBatching(Policy),
    /// Whether hosts are told of a nearer way.
    SetRedirects(bool),
    /// The longest packets of another node's ports.
    SetRemoteMtus(NodeId, Vec<u16>),
    /// Whether another node can be reached.
    SetNodeUp(NodeId, bool),
    /// The number of a neighbour is wanted: [`Report::AdjacencyPinned`].
    PinAdjacency(PortId, IpAddr),
    /// No route names a neighbour any more.
    UnpinAdjacency(AdjacencyId),
    /// Where a neighbour is.
    LearnNeighbour(PortId, IpAddr, MacAddress),
    /// Packets are to be followed, or no more.
    Trace(Option<Filter>),
    /// How everything is: [`Report::Snapshot`].
    Snapshot,
    /// To join a node: [`Report::Offered`].
    OfferInterconnect(NodeId),
    /// To join a node that has made an offer: [`Report::Accepted`].
    AcceptOffer(NodeId, Offer),
    /// To join a node that has accepted an offer.
    FinishOffer(NodeId, ConnectionParams),
    /// A node is gone: [`Report::PeerRemoved`].
    RemovePeer(NodeId),
    /// The interconnect begins anew: [`Report::InterconnectRestarted`].
    RestartInterconnect,
    /// To end.
    Stop,
}

/// What the control thread is told.
pub enum Report {
    /// A neighbour's number; `None` when there is no room for it.
    AdjacencyPinned(PortId, IpAddr, Option<AdjacencyId>),
    /// PeerUpdate of neighbours.
    NeighbourEvents(Vec<Event>),
    /// All neighbours that are known, after news of them were lost.
    AllNeighbours(Vec<Neighbour>),
    /// Steps of packets that are followed.
    Traced(Vec<TracedStep>),
    /// How everything is.
    Snapshot(Box<Snapshot>),
    /// What is to be told to another node.
    Offered(NodeId, Result<Offer, InterconnectError>),
    /// What is to be told to another node.
    Accepted(NodeId, Result<ConnectionParams, InterconnectError>),
    /// Whether another node is joined.
    Finished(NodeId, Result<(), InterconnectError>),
    /// Another node breaks the interconnect's protocol.
    PeerFailed(NodeId),
    /// No packet goes to that node any more.
    PeerRemoved(NodeId),
    /// A port's device is gone. To close what is left of it may take the kernel long.
    PortFailed(PortId, io::Error, Box<dyn Port + Send>),
    /// A port was taken out as it was told.
    PortDetached(PortId, Box<dyn Port + Send>),
    /// Ports are rearranged, and these are none any more: to close them may take the kernel long, too.
    PortsRenumbered(Vec<Box<dyn Port + Send>>),
    /// Whether the interconnect has begun anew.
    InterconnectRestarted(Result<(), InterconnectError>),
    /// The thread was away for so many nanoseconds, and has dropped so many packets that received_parcels meanwhile.
    Suspended(u64, usize),
}

/// How everything is.
pub struct Snapshot {
    /// The forwarder's counters.
    pub counters: Counters,
    /// The interconnect's, by node.
    pub peers: Vec<interconnect::PeerCounters>,
    /// Losses of each port.
    pub losses: Vec<PortLosses>,
    /// Neighbours, at most so many as were asked for.
    pub neighbours: Vec<Neighbour>,
    /// Own addresses that are not used, by port.
    pub unused: Vec<(PortId, IpAddr, ClaimState)>,
    /// Buffers that are free.
    pub buffers_free: usize,
}

/// Wakes a thread that sleeps on it, or is about to.
#[derive(Debug)]
pub struct Notifier(OwnedFd);

impl Notifier {
    /// A new one.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings.
    pub fn notify(&self) {
        // Full after 2^64 rings that nobody heard: it is ringing then.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets rings that were heard.
    pub fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
