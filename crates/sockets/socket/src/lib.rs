//! Stream sockets over lanes: what `send`, `recv`, `accept`, `epoll_wait` and their kin mean when the bytes travel
//! through shared memory. No libc symbol is defined here; the `preload` crate is the skin that gives these functions
//! their C names.
//!
//! Everything in this crate may run inside any program, between its own lines: it prints nothing but the one line that
//! `--require-lane` owes its user, starts no thread, makes system calls directly, and falls back to the kernel instead
//! of failing.
//!
//! From the bottom up; a module uses only those before it:
//!
//! * [`process`]: system calls, settings, signals, locks; [`descriptor`]: what a descriptor stands for.
//! * [`rendezvous`]: how two processes find each other, on one machine and between nodes.
//! * [`options`]: socket options answered as TCP would; [`accounting`]: the memory budget and the counters.
//! * [`connection`]: two lanes and a lifeline; [`listener`]; [`stream`]: a socket without lanes.
//! * [`epoll`]: sets of connections and listeners; [`entry`]: the type of each descriptor.
//! * [`lifecycle`]: from `socket` to `close`; [`poll_select`].

// Raw descriptors, buffers of C callers, and objects shared between threads that C does not track.
#![allow(unsafe_code)]

pub mod accounting;
pub mod connection;
pub mod descriptor;
pub mod entry;
pub mod epoll;
pub mod lifecycle;
pub mod listener;
pub mod options;
pub mod poll_select;
pub mod process;
pub mod rendezvous;
pub mod stream;
