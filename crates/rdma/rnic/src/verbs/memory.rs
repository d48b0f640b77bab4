//! Protection domains, memory regions and memory windows: which bytes a key gives to whom (IBA 10.6).
//!
//! A key consists of a 24-bit index into a table and an 8-bit generation that changes with each use of the slot. A slot
//! whose 256 generations are used up is never used again, so that a revoked key never becomes valid again. There are
//! 2^32 keys in total; when they are used up, registration fails. Windows of type 2 are the exception that the verbs
//! require: their owner chooses the 8 bits, and may choose again a value that it chose before on that window.

mod error;
mod region;
mod table;
#[cfg(test)]
mod tests;

pub use error::MemoryError;
pub use region::{BindInfo, ProtectionContext, ProtectionDomain, RegionKeys, Registration, WindowKind};
pub use table::MemoryTable;
