//! Benchmarks of the router: forwarding tables, forwarding core, Ethernet, TCP streams and interconnects.

mod clock;
pub mod core;
pub mod ethernet;
pub mod fib;
pub mod interconnect;
pub mod mlrsearch;
mod processor;
pub mod published;
pub mod report;
pub mod search;
pub mod statistics;
pub mod streams;
pub mod table;
