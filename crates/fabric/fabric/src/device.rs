//! Memory that all nodes of a rack share, divided into a window and a control block for each ordered pair of nodes.
//!
//! The memory is BAR 2 of an ivshmem device ([`Device::open_pci`]), the memory that an ivshmem server hands out
//! ([`Device::connect_server`]), or a file ([`Device::open_file`]). Each node opens it with its own [`DeviceConfig`],
//! which comes from the rack file. Sizes and offsets are computed from the configuration and never read from the
//! memory, whose header is only compared. Links come up in any order, and again after a node has been away
//! ([`Training`](crate::Training)).
//!
//! ```
//! use fabric::device::{Device, DeviceConfig, NodeSlot};
//! use fabric::{Link, Outbound, Inbound, train_both};
//!
//! let file = tempfile::NamedTempFile::new()?;
//! file.as_file().set_len(1 << 20)?;
//! let node = |slot| Device::open_file(file.path(), &DeviceConfig::new(NodeSlot(slot), 2));
//! let (a, b) = (node(0)?, node(1)?);
//! let (mut to_b, mut to_a) = (a.link(NodeSlot(1)), b.link(NodeSlot(0)));
//! assert!(train_both(&mut to_b, &mut to_a));
//! to_b.outbound().write(0, b"hello");
//! let mut bytes = [0; 5];
//! to_a.inbound().read(0, &mut bytes);
//! assert_eq!(&bytes, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **What a hostile node can do.** Every node maps all of the memory, so each node can overwrite all of it; hardware
//! isolation is not assumed. A node that writes garbage into its own windows, its own control blocks and the header
//! takes down its own links and no others: no node uses a value from there as an offset, a length or a pointer.
//!
//! **Which process does what.** A node's monitor opens the device, trains its links, sends heartbeats
//! ([`Device::heartbeat`]) and polls ([`Device::poll`]). Its proxy takes over the device ([`Device::hand_over`]), and
//! sends the heartbeats while there is no monitor. The proxy uses the windows and doorbells of the epoch that the
//! monitor names, as long as [`Device::is_peer_ready`] says that the peer is in that epoch too.

mod backing_file;
mod config;
mod doorbell;
mod error;
mod file;
mod format;
mod handover;
mod header;
mod interrupts;
mod layout;
mod link;
mod memory;
mod opened;
mod pci;
mod server;
mod server_connection;
mod state;
mod vfio;

pub use config::DeviceConfig;
pub use doorbell::{DeviceDoorbell, Vector, VectorDoorbell};
pub use error::{DeviceError, DeviceProblem};
pub use format::{NODES_MAX, NodeSlot, VECTORS_MAX, VERSION};
pub use layout::DeviceLayout;
pub use link::DeviceLink;
pub use memory::{Caching, DeviceInbound, DeviceMemory, DeviceOutbound, DeviceScratchpad};
pub use pci::PciAccess;
pub use state::{Device, DeviceEvent};
