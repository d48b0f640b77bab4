//! A router node as a process.
#![forbid(unsafe_code)]

pub mod interconnect;
