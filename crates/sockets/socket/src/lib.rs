//! Stream sockets over lanes: the semantics of `send`, `recv`, `accept`, `epoll_wait` and related calls for bytes that
//! travel through shared memory. This crate defines no libc symbols; the `preload` crate exports these functions under
//! their C names.
//!
//! All code in this crate may run inside any program, at any point of it. It therefore starts no thread, makes system
//! calls directly, falls back to the kernel instead of failing, and prints nothing except one line for a user who asked
//! for `--require-lane`.
//!
//! The modules from the bottom up; each uses only those before it:
//!
//! * [`process`]: system calls, settings, signals, locks; [`descriptor`]: the object behind each descriptor.
//! * [`rendezvous`]: how two processes find each other, on one machine and between nodes.
//! * [`options`]: socket options answered as TCP would; [`accounting`]: the memory budget and the counters.
//! * [`connection`]: two lanes and a lifeline; [`listener`]; [`stream`]: a socket without lanes.
//! * [`epoll`]: sets of connections and listeners; [`entry`]: the type of each descriptor.
//! * [`lifecycle`]: from `socket` to `close`; [`poll_select`].

// The crate handles raw descriptors, buffers of C callers, and objects that C programs share between threads.
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
