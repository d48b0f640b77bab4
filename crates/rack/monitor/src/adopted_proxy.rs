//! A proxy that a previous monitor has started.

use std::os::fd::OwnedFd;

use control::Channel;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A proxy that has outlived the monitor that started it.
pub struct AdoptedProxy {
    pub pid: Pid,
    /// A process descriptor, which is readable once the process has ended.
    pub process: OwnedFd,
    pub channel: Channel,
}

impl AdoptedProxy {
    /// Returns the process at the other endpoint of `channel`.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn of_channel(channel: Channel) -> Result<Self, Errno> {
        let pid = rustix::net::sockopt::socket_peercred(&channel)?.pid;
        Ok(Self { pid, process: pidfd_open(pid, PidfdFlags::empty())?, channel })
    }
}
