//! The per-process page of counters that `crosslane stat` reads.
//!
//! Each process with accelerated sockets has one file, `RACK/v1/stat/PID`, which only that process maps and all
//! processes of the same user can read. The mapping holds a lock on the file, by which readers know whether the writer
//! is running. The writer thus needs no descriptor that the program could close, and no clean-up when it is killed: the
//! next reader detects the stale page and removes it.
//!
//! Counting costs a load, an addition and a store to a cache line of the connection's own. Opening and closing a
//! connection take no lock and allocate nothing. No function of the writer fails: without a usable rack directory,
//! without memory in /dev/shm or without a free slot it continues to count, but in private memory or in the totals
//! only.
//!
//! The writer ([`StatsPage`]) only uses raw system calls and is safe to use inside a library that replaces libc's
//! symbols. The reader ([`reader`]) treats a page as untrusted bytes.
#![allow(unsafe_code)]

mod backing;
mod file;
mod layout;
mod rack;
pub mod reader;
mod switch;
mod terms;
mod variables;
mod writer;

pub use backing::{OVERLAY_MAGIC, UNPUBLISHED_NAME};
pub use file::set_directory_above;
pub use layout::{CLOSED_RECORDS, SLOTS, VERSION};
pub use rack::{KEEP_PAGES, OFF_FILE, STAT_FOLDER, rack_dir};
pub use switch::switch;
pub use terms::{DataPath, FallbackReason, Role, node_address, node_name};
pub use variables::{RULES, VARIABLES, Variable};
pub use writer::{ConnectionSlot, NewConnection, PageConfig, StatsPage, own_program_name};
