//! How a node opens a device.

use super::error::DeviceProblem;
use super::format::NodeSlot;
use super::layout::DeviceLayout;

/// What a node knows of the rack before it opens the device.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// Slot of this node.
    pub own_slot: NodeSlot,
    /// Number of nodes of the rack.
    pub nodes: u8,
    /// Bytes of each window; `None`: windows as large as the device has room for.
    pub window_bytes: Option<usize>,
    /// Bytes at the start of each window that links use and training zeroes; `None`: the whole window. The rest of a
    /// window is managed by the proxies.
    pub link_bytes: Option<usize>,
    /// Number of doorbells that this node needs, where the device has doorbells.
    pub vectors: usize,
    /// Whether a process that takes over the device also keeps this node's connection to the ivshmem server, where
    /// there is one. The node then counts as gone only after both processes have exited.
    pub shares_connection: bool,
    /// Whether to write a new header, whatever the device holds. Only when no node of the rack is up.
    pub overwrite: bool,
}

impl DeviceConfig {
    /// The default configuration: windows as large as the device has room for, one doorbell.
    pub fn new(own_slot: NodeSlot, nodes: u8) -> Self {
        Self {
            own_slot,
            nodes,
            window_bytes: None,
            link_bytes: None,
            vectors: 1,
            shares_connection: false,
            overwrite: false,
        }
    }

    pub(super) fn layout(&self, device_bytes: u64) -> Result<DeviceLayout, DeviceProblem> {
        let layout = match self.window_bytes {
            Some(window_bytes) => DeviceLayout::new(self.nodes, window_bytes)?,
            None => DeviceLayout::largest(self.nodes, device_bytes)?,
        };
        if self.own_slot.0 >= self.nodes {
            return Err(DeviceProblem::Slot { own: self.own_slot.index(), nodes: self.nodes });
        }
        layout.check_room(device_bytes)?;
        Ok(layout)
    }
}
