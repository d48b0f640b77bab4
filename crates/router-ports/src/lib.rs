//! What a router is plugged into: Ethernet ports of several kinds, and the kernel's routes, addresses and neighbours.
//!
//! Whatever is opened here is opened in the calling thread's network namespace, and stays in it.
// The kernel is asked by calls and rings that only C describes: packet rings, BPF, `ioctl`.
#![allow(unsafe_code)]

mod interface;
mod namespace;
pub mod netlink;

pub use interface::InterfaceIndex;
pub use namespace::Namespace;
