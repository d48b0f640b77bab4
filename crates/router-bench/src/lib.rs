//! Benchmarks of the router.

pub mod core;
pub mod fib;
