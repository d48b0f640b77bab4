//! Benchmarks of the router.
