//! The packet I/O of the RDMA transport, and how two nodes connect over each kind: lanes or UDP.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use fabric::shm::{create_link, open_link};
use rnic::verbs::{Mtu, NicAddress};
use rnic_live::{LaneIo, LiveError, PacketIo, UdpIo, WINDOW_BYTES};
use router::NodeId;
use router::batch::MessageTransfer;

use super::interface::{ConnectionParams, InterconnectError, Offer, invalid_offer, shared_memory};

/// Packet I/O with connection setup.
pub(super) trait PeerWire: PacketIo + Send {
    /// Length of the token after each message; 0 if no third party can send.
    const TOKEN_BYTES: usize;
    /// How messages leave the process.
    const TRANSFER: MessageTransfer;

    /// Returns the path MTU of the transport.
    fn mtu(&self) -> Mtu;

    /// Returns this endpoint's part of an offer. The peer's address is known at once if memory is shared.
    fn offer(&mut self, secret: u64) -> Result<Offered, InterconnectError>;

    /// Adds a peer that made an offer.
    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<NicAddress, InterconnectError>;

    /// Adds a peer that accepted an offer.
    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<NicAddress, InterconnectError>;

    /// Returns the address of this endpoint.
    fn local(&self) -> Option<SocketAddr>;

    /// Removes a peer.
    fn remove(&mut self, address: NicAddress);

    /// See [`super::Interconnect::wait_fds`].
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// See [`super::Interconnect::prepare_wait`].
    fn prepare_wait(&mut self) -> bool;

    /// See [`super::Interconnect::finish_wait`].
    fn finish_wait(&mut self);
}

/// This endpoint's part of an offer.
pub(super) struct Offered {
    pub(super) address: Option<NicAddress>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl PeerWire for LaneIo {
    const TOKEN_BYTES: usize = 0;
    const TRANSFER: MessageTransfer = MessageTransfer::Copy;

    fn mtu(&self) -> Mtu {
        Mtu::B4096
    }

    fn offer(&mut self, secret: u64) -> Result<Offered, InterconnectError> {
        let (link, parts) = create_link(WINDOW_BYTES)?;
        let address = self.add_peer(&link, secret).map_err(LiveError::from)?;
        let descriptors = vec![parts.memfd, parts.doorbell_creator, parts.doorbell_peer];
        Ok(Offered { address: Some(address), descriptors })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<NicAddress, InterconnectError> {
        let secret = offer.params.secret;
        let link = open_link(shared_memory(node, offer)?, WINDOW_BYTES)?;
        Ok(self.add_peer(&link, secret).map_err(LiveError::from)?)
    }

    fn finish(&mut self, node: NodeId, _: &ConnectionParams) -> Result<NicAddress, InterconnectError> {
        Err(invalid_offer(node, "an acceptance", "another kind", "of what was offered"))
    }

    fn local(&self) -> Option<SocketAddr> {
        None
    }

    fn remove(&mut self, address: NicAddress) {
        self.remove_peer(address);
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.wait_fds().collect()
    }

    fn prepare_wait(&mut self) -> bool {
        self.prepare_wait()
    }

    fn finish_wait(&mut self) {
        self.finish_wait();
    }
}

impl PeerWire for UdpIo {
    const TOKEN_BYTES: usize = size_of::<u64>();
    const TRANSFER: MessageTransfer = MessageTransfer::SystemCall;

    /// The largest one on one machine; between machines, the one that an Ethernet frame carries.
    fn mtu(&self) -> Mtu {
        if self.local().ip().is_loopback() { Mtu::B4096 } else { Mtu::B1024 }
    }

    fn offer(&mut self, _: u64) -> Result<Offered, InterconnectError> {
        Ok(Offered { address: None, descriptors: Vec::new() })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<NicAddress, InterconnectError> {
        self.finish(node, &offer.params)
    }

    fn finish(&mut self, node: NodeId, params: &ConnectionParams) -> Result<NicAddress, InterconnectError> {
        let Some(address) = params.address else {
            return Err(invalid_offer(node, "an address", "none", "where it receives UDP"));
        };
        Ok(self.add_peer(address).map_err(LiveError::from)?)
    }

    fn local(&self) -> Option<SocketAddr> {
        Some(self.local())
    }

    fn remove(&mut self, _: NicAddress) {}

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.wait_fd()]
    }

    fn prepare_wait(&mut self) -> bool {
        self.is_idle()
    }

    fn finish_wait(&mut self) {}
}
