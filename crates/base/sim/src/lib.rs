//! Building blocks of discrete-event simulators:
//!
//! * [`Time`] and [`Span`]: virtual time and durations, in picoseconds.
//! * [`EventQueue`]: a future event list. Events of the same time leave it in the order in which they were scheduled,
//!   so that every run is reproducible.
//! * [`Random`]: a stream of random numbers for each component, derived from one seed. Adding a component, or a draw in
//!   one component, changes no other stream.
//! * [`sweep()`]: runs many simulations in parallel and returns their results in the order of the inputs.
//!
//! This crate reads no real clock, and no crate that builds on it may read one.

mod queue;
mod random;
mod sweep;
mod time;

pub use queue::EventQueue;
pub use random::Random;
pub use sweep::{sweep, with_seeds};
pub use time::{Span, Time};
