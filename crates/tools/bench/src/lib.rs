//! Benchmarks of this machine: `crosslane bench sockets`, `overhead`, `windows` and `rnic`, and `crosslane demo`.
//!
//! An ordinary C program (`probes/`) is compiled once and run as two processes over kernel TCP, AF_UNIX and Crosslane,
//! in alternating rounds. Next to each sample the floor is measured: the time of the same operation on this machine
//! without a socket. The probes time each operation separately and print histograms; this crate starts them, merges,
//! compares and prints. The Crosslane column is the same probe under `crosslane run --require-lane`. `bench rnic` runs
//! in this process, because RDMA NICs are a library.

mod floors;
mod launch;
mod old_glibc;
mod probe;
mod process;
mod progress;

pub mod demo;
pub mod overhead;
pub mod rnic;
pub mod sockets;
pub mod windows;

pub use progress::Progress;
