//! Stream sockets over lanes: what `send`, `recv`, `accept`, `epoll_wait` and their kin mean when the bytes travel
//! through shared memory. No libc symbol is defined here; the `preload` crate is the skin that gives these functions
//! their C names.
//!
//! Everything in this crate may run inside any program, between its own lines: it prints nothing but the one line that
//! `--require-lane` owes its user, starts no thread, makes system calls directly, and falls back to the kernel instead
//! of failing.
//!
//! * A [`connection::Connection`] is two lanes and a lifeline. [`segment`] lays out the memory that both ends share.
//! * [`lifecycle`] is the life of a descriptor, from `socket` to `close`; [`entry`] tells what each descriptor stands
//!   for.
//! * [`rendezvous`] brings two processes together without a daemon, and asks [`monitor`] for other nodes; [`rack`],
//!   [`hello`], [`address`] and [`descriptors`] are its parts, [`settings`] says which ports take part; [`loan`] is how
//!   programs get parts of windows; [`successor`] tells who may have them after `exec`.
//! * [`sandbox`] is what a program's own system call filter changes.
//! * [`interest`] is epoll, [`multiplex`] is poll and select; [`options`] answers for socket options as TCP would.

// Raw descriptors, buffers of C callers, and objects shared between threads that C does not track.
#![allow(unsafe_code)]

pub mod address;
pub mod background_connects;
pub mod blocking;
mod callback;
pub mod clock;
pub mod connection;
pub mod control;
pub mod descriptors;
pub mod entry;
#[cfg(test)]
mod forks;
pub mod hello;
mod home;
pub mod inspect;
pub mod interest;
pub mod lifecycle;
pub mod limit;
pub mod listener;
pub mod loan;
pub mod lock;
pub mod memory_budget;
pub mod model;
pub mod monitor;
pub mod multiplex;
pub mod name_key;
pub mod options;
pub mod pool;
pub mod process;
pub mod process_stats;
pub mod rack;
pub mod rendezvous;
pub mod sandbox;
pub mod segment;
pub mod settings;
mod shared;
pub mod signals;
pub mod socket_option;
pub mod stream;
pub mod successor;
pub mod system;
pub mod table;
pub mod threads;
