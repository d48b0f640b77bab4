//! Protection domains, memory regions and memory windows: which bytes a key gives to whom (IBA 10.6).
//!
//! A key is 24 bits of index into a table and 8 bits that change with each use of that place. A place whose 256 values
//! are used up is never used again, so that a key that ceased to hold holds nothing ever after. There are 2^32 keys in
//! all; whoever uses them up is told so. Windows of type 2 are the one exception that verbs ask for: their owner
//! chooses the 8 bits, and may choose again what it chose before, on that window.

mod error;
mod region;
mod table;
#[cfg(test)]
mod tests;

pub use error::MemoryError;
pub use region::{BindInfo, ProtectionContext, ProtectionDomain, RegionKeys, Registration, WindowKind};
pub use table::MemoryTable;
