//! Kernel interfaces: their numbers, names, and what they are.

use std::fmt;

/// The kernel's number of an interface; it never means another interface in the same network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceIndex(pub u32);

impl fmt::Display for InterfaceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.0)
    }
}
