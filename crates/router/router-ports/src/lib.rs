//! The ports of a router: Ethernet ports of several kinds, and the kernel's routes, addresses and neighbours.
//!
//! Everything is opened in the calling thread's network namespace, and stays in it.
// Unsafe code: system calls and rings that only C describes, such as packet rings, BPF and `ioctl`.
#![allow(unsafe_code)]

pub mod ethernet;
mod filters;
pub mod free_memory;
mod interface;
mod mapping;
mod namespace;
pub mod netlink;
mod offload;
mod packet_socket;
mod pcap;
mod plain_forwarder;
mod sysctl;
mod system;
#[cfg(test)]
mod test_network;
mod tun_tap;
mod xdp;

pub use filters::FilterWatch;
pub use interface::{Interface, InterfaceError, InterfaceIndex, disable_offloads};
pub use namespace::Namespace;
pub use packet_socket::PacketSocket;
pub use pcap::{PcapError, PcapPort};
pub use plain_forwarder::PlainForwarder;
pub use sysctl::{Leftover, Sysctls};
pub use tun_tap::{TunTap, TunTapError};
pub use xdp::{LocalAddresses, XdpError, XdpPort};
