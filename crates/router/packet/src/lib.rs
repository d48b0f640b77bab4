//! Views and builders of the protocols that a router handles on Ethernet, one file per protocol.
//!
//! A view (`ethernet::Frame`, `ipv4::Packet` and so on) borrows or owns the bytes of a packet. `new_checked` validates
//! all length fields once; after that no accessor panics, whatever the bytes contain. A view does not verify checksums
//! by itself: call `verify_checksum`.
//!
//! A builder is a plain struct, `Repr`, with `parse` and `emit`; the slow path uses it. The fast path modifies packets
//! in place through the setters of the views, none of which can invalidate a checked view.
#![forbid(unsafe_code)]

pub mod arp;
pub mod checksum;
mod error;
pub mod ethernet;
mod ethertype;
pub mod flow;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
pub mod mld;
pub mod ndisc;
mod octets;
mod protocol;
pub mod segmentation;
pub mod tcp;
pub mod udp;
pub mod vlan;

pub use error::Error;
pub use protocol::Protocol;
