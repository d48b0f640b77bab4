//! What carries packets between the nodes of a cluster.
//!
//! A node has one [`Interconnect`], of one kind for all its peers. Its forwarding thread hands over parcels with
//! [`Interconnect::send`], and gives it turns. The control threads of two nodes join them in three steps, over whatever
//! connects them, with descriptors where the kind asks for some (`SCM_RIGHTS`):
//!
//! ```text
//!   node a                                     node b
//!   offer(b) ──── Offer: params, descriptors ──► accept(a, offer)
//!   finish(b, params) ◄────── ConnectionParams ─────────────
//! ```
//!
//! A node that died is taken out with [`Interconnect::remove_peer`]; another one by the same number begins anew. None of the
//! others ever waits for it.

mod carrier;
mod interface;
mod medium;
mod memory;
mod mesh;
mod mesh_peer;
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

/// An interconnect of this kind, for this node, with no peers yet.
///
/// # Errors
/// When there can be no such interconnect.
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
