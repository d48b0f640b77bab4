//! The exchange of packets between the nodes of a cluster.
//!
//! A node has one [`Interconnect`], of the same kind for all its peers. Its forwarding thread passes parcels to
//! [`Interconnect::send`], and polls it. The control threads of two nodes connect them in three steps, over their
//! control session, with descriptors (`SCM_RIGHTS`) where the kind needs them:
//!
//! ```text
//!   node a                                     node b
//!   offer(b) ──── Offer: parameters, descriptors ────► accept(a, offer)
//!   finish(b, parameters) ◄── ConnectionParams ──────
//! ```
//!
//! A node that died is removed with [`Interconnect::remove_peer`]; a new node with the same number can then be
//! connected. No node ever waits for another.

mod carrier;
mod interface;
mod medium;
mod memory;
mod mesh;
mod mesh_peer;
mod parts;
mod peer_wire;
mod rnic;
#[cfg(test)]
mod tests;
pub mod virtual_time;

use rnic_live::{LaneIo, LiveError, UdpIo};
use router::NodeId;

pub use interface::{
    ConnectionParams, DESCRIPTORS_MAX, Interconnect, InterconnectError, InterconnectSettings, Offer, PeerCounters,
    PeerState, TransportKind,
};
use medium::{Direct, Modelled};
use memory::MemoryCarrier;
use mesh::Mesh;
use rnic::RnicCarrier;

/// Opens an interconnect of this kind for this node, without peers.
///
/// # Errors
/// Returns why the interconnect cannot be opened.
pub fn open(
    own: NodeId,
    kind: TransportKind,
    settings: &InterconnectSettings,
) -> Result<Box<dyn Interconnect>, InterconnectError> {
    settings.policy.check()?;
    Ok(match kind {
        TransportKind::Lanes => Box::new(Mesh::new(own, *settings, MemoryCarrier::new(Direct))?),
        TransportKind::Windows(timing) => Box::new(Mesh::new(own, *settings, MemoryCarrier::new(Modelled(timing)))?),
        TransportKind::RnicLanes => Box::new(Mesh::new(own, *settings, RnicCarrier::new(LaneIo::new())?)?),
        TransportKind::RnicUdp(address) => {
            let wire = UdpIo::bind(address).map_err(LiveError::from)?;
            Box::new(Mesh::new(own, *settings, RnicCarrier::new(wire)?)?)
        }
    })
}
