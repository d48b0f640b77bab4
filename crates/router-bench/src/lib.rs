//! Benchmarks of the router.

pub mod fib;
