//! What a byte costs on this machine: `crosslane bench sockets` and `crosslane demo`.
//!
//! An ordinary C program (`probes/`) is compiled once and run as two processes over kernel TCP, AF_UNIX and Crosslane
//! in alternating rounds; beside each sample the floor is taken: what the machine takes for the same with no socket
//! at all. The probes time each operation on their own and hand over histograms; this crate starts them, merges,
//! compares and prints. It knows nothing about lanes: the Crosslane column is the same probe under `crosslane run
//! --require-lane`.

mod floors;
mod launch;
mod probe;
mod process;
mod progress;

pub mod demo;
pub mod sockets;
pub mod windows;

pub use progress::Progress;
