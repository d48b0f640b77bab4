//! Names of guests.

use std::fmt;

/// A guest, by its index: the first one is `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node(pub(crate) u8);

impl Node {
    /// The first guest.
    pub const A: Self = Self(0);
    /// The second guest.
    pub const B: Self = Self(1);
    /// The third guest.
    pub const C: Self = Self(2);
}

impl fmt::Display for Node {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", char::from(b'a' + self.0))
    }
}
