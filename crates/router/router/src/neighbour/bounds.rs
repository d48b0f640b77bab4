//! The bounds of a port's neighbours: whatever hosts on one port send, neighbours of other ports keep their room, as do
//! those of the same port that have answered.

use super::state::NeighbourState;
use super::table::Entry;
use crate::Time;
use crate::config::Limits;
use crate::rate::TokenBucket;

/// The share of the table that all ports divide among themselves. Another third is for neighbours that routes pin, and
/// the rest for numbers that are not reusable yet.
const SHARE_OF_PORTS: usize = 3;
/// The share of a port's neighbours that may be incomplete, so that a scan of unused addresses leaves room for hosts.
const SHARE_INCOMPLETE: usize = 4;
/// The share of a port's neighbours that may be unconfirmed: stated by messages, and not verified yet.
const SHARE_UNCONFIRMED: usize = 8;

/// The bounds of each port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortBounds {
    /// Neighbours that no route pins.
    pub(super) neighbours_max: usize,
    /// Those of them in state incomplete.
    pub(super) incomplete_max: usize,
    /// Those of them that are not confirmed, but have a MAC address.
    pub(super) unconfirmed_max: usize,
    /// Packets queued for address resolution.
    pub(super) pending_packets_max: usize,
}

impl PortBounds {
    pub(super) fn new(limits: &Limits, ports: usize) -> PortBounds {
        let share = usize::from(limits.neighbours_max) / SHARE_OF_PORTS / ports;
        let neighbours_max = usize::from(limits.neighbours_of_port_max).min(share);
        PortBounds {
            neighbours_max,
            incomplete_max: neighbours_max / SHARE_INCOMPLETE,
            unconfirmed_max: neighbours_max / SHARE_UNCONFIRMED,
            pending_packets_max: (limits.pending_packets_max / ports).max(limits.pending_packets_of_neighbour_max),
        }
    }
}

/// Numbers of a port's neighbours, and the rate at which it learns new ones.
#[derive(Debug)]
pub(super) struct PortNeighbours {
    pub(super) unpinned: usize,
    pub(super) incomplete: usize,
    pub(super) unconfirmed: usize,
    pub(super) pending: usize,
    pub(super) learned: TokenBucket,
}

impl PortNeighbours {
    pub(super) fn new(limits: &Limits) -> PortNeighbours {
        let learned = TokenBucket::new(limits.learned, Time::ZERO);
        PortNeighbours { unpinned: 0, incomplete: 0, unconfirmed: 0, pending: 0, learned }
    }

    pub(super) fn count(&mut self, entry: &Entry) {
        let [unpinned, incomplete, unconfirmed] = classes_of(entry);
        self.unpinned += usize::from(unpinned);
        self.incomplete += usize::from(incomplete);
        self.unconfirmed += usize::from(unconfirmed);
    }

    pub(super) fn uncount(&mut self, entry: &Entry) {
        let [unpinned, incomplete, unconfirmed] = classes_of(entry);
        self.unpinned -= usize::from(unpinned);
        self.incomplete -= usize::from(incomplete);
        self.unconfirmed -= usize::from(unconfirmed);
    }
}

/// Returns whether an entry is unpinned, incomplete and unconfirmed. Routes pin only what an administrator or a routing
/// daemon wants.
fn classes_of(entry: &Entry) -> [bool; 3] {
    let is_unpinned = entry.pins == 0;
    let is_incomplete = is_unpinned && entry.state == NeighbourState::Incomplete;
    [is_unpinned, is_incomplete, is_unpinned && entry.state.has_mac() && !entry.is_confirmed]
}
