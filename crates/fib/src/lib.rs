//! Forwarding tables.
//!
//! A table maps an address to a [`GroupId`]: a *next-hop group*, the set of equal ways to one destination. Tables are
//! written by one thread and read by others at the same time; what a reader is told was true at some moment of its
//! lookup.

use std::num::NonZeroU16;

/// The most groups at a time: a table's entry has 16 bits, one of which says that a longer prefix decides.
pub const GROUPS_MAX: u16 = (1 << 15) - 1;

/// A next-hop group, 1 to [`GROUPS_MAX`]. What it means is its owner's; a table only carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(NonZeroU16);

impl GroupId {
    /// `None` outside of 1 to [`GROUPS_MAX`].
    pub fn new(id: u16) -> Option<GroupId> {
        NonZeroU16::new(id).filter(|id| id.get() <= GROUPS_MAX).map(GroupId)
    }

    /// 1 to [`GROUPS_MAX`].
    pub fn get(self) -> u16 {
        self.0.get()
    }
}
