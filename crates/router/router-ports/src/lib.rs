//! What a router is plugged into: Ethernet ports of several kinds, and the kernel's routes, addresses and neighbours.
//!
//! Whatever is opened here is opened in the calling thread's network namespace, and stays in it.
// The kernel is asked by calls and rings that only C describes: packet rings, BPF, `ioctl`.
#![allow(unsafe_code)]

#[cfg(test)]
mod crossing;
pub mod ethernet;
mod interface;
mod mapping;
mod namespace;
pub mod netlink;
mod offload;
mod packet_socket;
mod pcap;
mod sysctl;
mod system;
mod tap;
mod xdp;

pub use interface::{Interface, InterfaceError, InterfaceIndex, offloads_off};
pub use namespace::Namespace;
pub use packet_socket::PacketSocket;
pub use pcap::{PcapError, PcapPort};
pub use sysctl::Sysctls;
pub use tap::{Tap, TapError, Tun};
pub use xdp::{LocalAddresses, XdpError, XdpPort};
