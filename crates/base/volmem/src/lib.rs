//! Access to memory that another party can write at any time.
//!
//! Six things live here and nowhere else:
//!
//! * [`Region`]: a bounds-checked span of such memory. Words are reached by atomic operations, bytes by opaque copies;
//!   no reference to the memory is ever handed out, so the compiler may assume nothing about its contents.
//! * [`Mapping`]: a `mmap`ed file that stays mapped for as long as a region of it lives.
//! * `LineControl`: writes cache lines back and drops them, where two machines share memory without coherence.
//! * [`Registers`]: the registers of a device, each access one of 32 bits, and the fences that its memory needs.
//! * [`ticks`]: the processor's counter of time.
//! * [`sync`]: the one place atomics come from, so that a model checker can replace them (`--cfg loom`).
//!
//! What is read must be copied once, then checked, then used. A region makes the copy; checking is the reader's duty.

#![allow(unsafe_code)] // This crate exists to contain it.

mod fences;
#[cfg(not(loom))]
mod lines;
mod mapping;
#[cfg(loom)]
mod model;
#[cfg(not(loom))]
mod region;
mod registers;
pub mod sync;
mod ticks;

pub use fences::{load_fence, store_fence};
#[cfg(not(loom))]
pub use lines::{LineControl, LineInstruction};
pub use mapping::{Alignment, Mapping};
#[cfg(loom)]
pub use model::Region;
#[cfg(not(loom))]
pub use region::Region;
pub use registers::Registers;
pub use ticks::{TICKS_PER_MICROSECOND, TICKS_PER_MILLISECOND, ticks};

/// Bytes of a cache line, the unit in which cores and links exchange memory.
pub const CACHE_LINE_BYTES: usize = 64;
