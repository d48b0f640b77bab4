//! Benchmarks of this machine: `crosslane bench sockets`, `overhead` and `windows`, and `crosslane demo`.
//!
//! An ordinary C program (`probes/`) is compiled once and run as two processes over kernel TCP, AF_UNIX and Crosslane,
//! in alternating rounds. Next to each sample the floor is measured: the time of the same operation on this machine
//! without a socket. The probes time each operation separately and print histograms; this crate starts them, merges,
//! compares and prints. It does not depend on lanes: the Crosslane column is the same probe under `crosslane run
//! --require-lane`.

mod floors;
mod launch;
mod old_glibc;
mod probe;
mod process;
mod progress;

pub mod demo;
pub mod overhead;
pub mod sockets;
pub mod windows;

pub use progress::Progress;
