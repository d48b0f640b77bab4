//! Stream sockets that are kernel TCP connections from connect to close, and whose bytes move to lanes in shared memory
//! once they are busy. This crate replaces the connections of `socket`, from which it takes what does not concern
//! connections.
//!
//! * [`table`]: what the library knows about each descriptor; [`young`]: connections that have not proved busy.
//! * [`holders`], [`sharing`]: connections that several processes hold since a fork.
//! * [`lifecycle`], [`process`]: what the program's calls mean for connections: duplicates, ends, children, filters.
//! * `identity`, `fitness`: which connections may meet their other end; [`requirement`]: those that must.
//! * [`connection`]; [`poll`], [`select`](mod@select) and [`epoll`]: waits for what lanes carry; [`statistics`].
//! * [`connection::Relay`]: an end of a connection in a process that relays its bytes.
//! * [`remote`]: connections to other nodes, by the proxy of this node.
//! * [`pipe`]: the program's pipes in `splice`.
//! * [`guarded`]: locks that signal handlers may find held.

// The crate handles raw descriptors, buffers of C callers, and objects that C programs share between threads.
#![allow(unsafe_code)]

pub mod connection;
pub mod epoll;

mod fitness;
pub mod flags;
pub mod guarded;
pub mod holders;
mod identity;
mod kernel;
pub mod lifecycle;
mod order;
pub mod pipe;
pub mod poll;
pub mod process;
pub mod remote;
pub mod requirement;
pub mod select;
pub mod sharing;
mod short_list;
pub mod spans;
pub mod statistics;
pub mod table;
pub mod young;
