//! The per-process page of counters that `crosslane stat` reads.
//!
//! Each process with accelerated sockets has one file, `RACK/v1/stat/PID`, mapped by that process alone and read by
//! anybody of the same user. A lock on the file, held by the mapping itself, says whether its writer still lives: no
//! descriptor is kept that the program could close, and a killed program needs no clean-up of its own, because the
//! next reader recognises its page and removes it.
//!
//! Writing costs a load, an add and a store to a cache line of the connection's own. Opening and closing a connection
//! take no lock and allocate nothing. Nothing here ever fails towards the program: without a rack, without memory in
//! /dev/shm or without a free slot the counting goes on where nobody, or only the totals, can see it.
//!
//! The writer ([`StatsPage`]) uses raw system calls only and is safe to use inside a library that replaces libc's
//! symbols. The reader ([`reader`]) takes a page for what it is, bytes written by somebody else.
#![allow(unsafe_code)]

mod backing;
mod file;
mod layout;
mod rack;
pub mod reader;
mod switch;
mod terms;
mod writer;

pub use layout::SLOTS;
pub use rack::{OFF_FILE, OFF_HINT, STAT_FOLDER, rack_dir};
pub use switch::switch;
pub use terms::{DataPath, FallbackReason, Role, node_address, node_name};
pub use writer::{ConnectionSlot, NewConnection, PageConfig, StatsPage, own_program_name};
