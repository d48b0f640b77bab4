//! What other crates use, by what they want and not by what it is made of.

/// The own side of a window between processes under one kernel.
pub use crate::MemoryInbound as ProcessInbound;
/// The peer's side of a window between processes under one kernel.
pub use crate::MemoryOutbound as ProcessOutbound;
/// A link between threads of one process.
pub use crate::heap::HeapLink as ThreadLink;
/// A link between processes under one kernel.
pub use crate::shm::ShmLink as ProcessLink;
