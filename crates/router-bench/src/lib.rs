//! Benchmarks of the router.

pub mod core;
pub mod ethernet;
pub mod fib;
pub mod interconnect;
pub mod published;
pub mod report;
pub mod statistics;
