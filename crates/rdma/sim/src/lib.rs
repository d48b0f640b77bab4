//! What every simulator of the project stands on:
//!
//! * [`Time`] and [`Span`]: virtual time in picoseconds, and lengths of it.
//! * [`EventQueue`]: what happens next; ties go to what was scheduled first, so that a run is the same every time.
//! * [`Random`]: a stream of random numbers for each component, from one seed: another component, or another draw in
//!   one, changes no other stream.
//! * [`sweep`]: many runs at a time, their results in the order of what was asked.
//!
//! Nothing here reads a real clock, and nothing that stands on it may.

mod queue;
mod random;
mod sweep;
mod time;

pub use queue::EventQueue;
pub use random::Random;
pub use sweep::{sweep, with_seeds};
pub use time::{Span, Time};
