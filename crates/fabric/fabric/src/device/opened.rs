//! What each way of opening a device returns.

use super::interrupts::Interrupts;
use super::memory::Caching;
use super::server_connection::ServerConnection;
use std::os::fd::OwnedFd;

/// The memory of a device before it is mapped, and the resources that belong to it.
pub(super) struct OpenedMemory {
    /// Name as the user gave it.
    pub name: String,
    pub caching: Caching,
    pub descriptor: OwnedFd,
    pub offset_bytes: u64,
    pub len_bytes: u64,
    /// Why programs cannot map parts of the memory, where the opener knows a reason. A process that takes over the
    /// device is not told.
    pub lease_obstacle: Option<String>,
    pub interrupts: Interrupts,
    /// File and offset of `interrupts.registers`, for another process to map.
    pub registers: Option<(OwnedFd, u64)>,
    pub server: Option<ServerConnection>,
    /// Descriptors that stay open as long as the device.
    pub kept_open: Vec<OwnedFd>,
}
