//! The identifier of a next-hop group.

use std::num::NonZeroU16;

/// Maximum number of groups: a table entry has 16 bits, one of which marks that longer prefixes exist.
pub const GROUPS_MAX: u16 = (1 << 15) - 1;

/// Identifies a next-hop group: 1 to [`GROUPS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(NonZeroU16);

impl GroupId {
    /// Returns `None` for numbers outside of 1 to [`GROUPS_MAX`].
    pub fn new(id: u16) -> Option<GroupId> {
        NonZeroU16::new(id).filter(|id| id.get() <= GROUPS_MAX).map(GroupId)
    }

    /// Returns the number, 1 to [`GROUPS_MAX`].
    pub fn get(self) -> u16 {
        self.0.get()
    }

    /// Returns the group of a table entry, in which 0 means "no route".
    #[inline]
    pub(crate) fn from_entry(entry: u16) -> Option<GroupId> {
        NonZeroU16::new(entry & GROUPS_MAX).map(GroupId)
    }
}
