//! Access to memory that another party can write at any time.
//!
//! The workspace accesses such memory only through these items:
//!
//! * [`Region`]: a bounds-checked span of such memory. Words are accessed by atomic operations, bytes by opaque copies.
//!   A region never returns a reference to the memory, so the compiler assumes nothing about its contents.
//! * [`Mapping`]: a `mmap`ed file that stays mapped as long as a region of it lives.
//! * `LineControl`: writes back and invalidates cache lines, where two machines share memory without coherence.
//! * [`Registers`]: the registers of a device. Each access is one access of 32 bits.
//! * [`ticks`]: the processor's time-stamp counter.
//! * [`sync`]: the atomics, which a model checker can replace (`--cfg loom`).
//!
//! A value must be copied once, then checked, then used. A region makes the copy; the reader must check it.

#![allow(unsafe_code)] // This crate exists to contain it.

mod cache_line;
mod fences;
#[cfg(not(loom))]
mod line_control;
#[cfg(not(loom))]
mod line_instruction;
mod mapping;
#[cfg(loom)]
mod model;
#[cfg(not(loom))]
mod region;
mod registers;
pub mod sync;
mod ticks;

pub use cache_line::CACHE_LINE_BYTES;
pub use fences::{load_fence, store_fence};
#[cfg(not(loom))]
pub use line_control::LineControl;
#[cfg(not(loom))]
pub use line_instruction::LineInstruction;
pub use mapping::{Alignment, Mapping};
#[cfg(loom)]
pub use model::Region;
#[cfg(not(loom))]
pub use region::Region;
pub use registers::Registers;
pub use ticks::{TICKS_PER_MICROSECOND, TICKS_PER_MILLISECOND, ticks};
