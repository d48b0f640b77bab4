//! The lanes between two ends.

use super::layout::{self, RECEIVER_STATE_OFFSET, SENDER_STATE_OFFSET};
use super::{EndMemory, OWN_STATE_BYTES, PeerMemory};
use crate::{Receiver, Sender};
use fabric::{MemoryInbound, MemoryOutbound};
use lane::{Consumer, Layout, Producer};
use volmem::Region;

/// Returns the sender of this end's outgoing lane. `own` is memory of [`OWN_STATE_BYTES`] that only the processes which
/// hold this end map, zero for a new connection. `secret` is random, not zero, and the same for both ends of the lane.
///
/// # Panics
/// If `own` is of another size.
pub fn sender(mine: &EndMemory, peers: &PeerMemory, own: &Region, secret: u64) -> Sender {
    assert_eq!(own.len_bytes(), OWN_STATE_BYTES, "the state of an end");
    let state = own.sub(SENDER_STATE_OFFSET, Layout::PRODUCER_STATE_BYTES);
    let (outbound, inbound) = (MemoryOutbound::new(mine.region.clone()), MemoryInbound::new(peers.region.clone()));
    Producer::with_state(outbound, inbound, state, layout_in(&mine.region), secret)
}

/// Returns the receiver of this end's incoming lane, with the arguments of [`sender`].
///
/// # Panics
/// As [`sender`].
pub fn receiver(mine: &EndMemory, peers: &PeerMemory, own: &Region, secret: u64) -> Receiver {
    assert_eq!(own.len_bytes(), OWN_STATE_BYTES, "the state of an end");
    let state = own.sub(RECEIVER_STATE_OFFSET, Layout::CONSUMER_STATE_BYTES);
    let (inbound, outbound) = (MemoryInbound::new(peers.region.clone()), MemoryOutbound::new(mine.region.clone()));
    Consumer::with_state(inbound, outbound, state, layout_in(&peers.region), secret)
}

/// Returns the layout of the lane whose sender writes this memory.
fn layout_in(memory: &Region) -> Layout {
    layout::layout_in(memory.len_bytes()).expect("the size was checked when the memory was created or opened")
}
