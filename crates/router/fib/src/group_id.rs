//! The identifier of a next-hop group.

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

    /// Of a table's entry, which the writer made of a group, or of none.
    #[inline]
    pub(crate) fn from_entry(entry: u16) -> Option<GroupId> {
        NonZeroU16::new(entry & GROUPS_MAX).map(GroupId)
    }
}
