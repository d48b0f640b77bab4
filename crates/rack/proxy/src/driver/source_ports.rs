//! The ports from which the proxy connects to the servers of its node: no two connections have the same one, because
//! the port tells programs which client stands behind a connection.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with, sockopt};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// The first port: below are those of servers.
const FIRST: u16 = 4096;
const WORDS: usize = (1 << 16) / 64;

/// The ports of the proxy's address.
#[derive(Debug)]
pub(super) struct SourcePorts {
    address: Ipv4Addr,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    used: Vec<u64>,
    next: u16,
}

/// A port of a connection, free again when it is dropped.
#[derive(Debug)]
pub(super) struct SourcePort {
    ports: Arc<SourcePorts>,
    pub(super) port: u16,
}

impl Drop for SourcePort {
    fn drop(&mut self) {
        let mut state = self.ports.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.used[usize::from(self.port) / 64] &= !(1 << (self.port % 64));
    }
}

impl SourcePorts {
    pub(super) fn new(address: Ipv4Addr) -> Arc<Self> {
        Arc::new(Self { address, state: Mutex::new(State { used: vec![0; WORDS], next: FIRST }) })
    }

    /// Returns a port that no connection has: one that was free for as long as possible, so that the kernel has
    /// forgotten its last connection.
    fn take(self: &Arc<Self>) -> Option<SourcePort> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in FIRST..=u16::MAX {
            let port = state.next;
            state.next = if port == u16::MAX { FIRST } else { port + 1 };
            let (word, bit) = (usize::from(port) / 64, 1_u64 << (port % 64));
            if state.used[word] & bit == 0 {
                state.used[word] |= bit;
                drop(state);
                return Some(SourcePort { ports: Arc::clone(self), port });
            }
        }
        None
    }

    /// Reserves the port of a connection of an earlier proxy.
    pub(super) fn reserve(self: &Arc<Self>, port: u16) -> Option<SourcePort> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (word, bit) = (usize::from(port) / 64, 1_u64 << (port % 64));
        if state.used[word] & bit != 0 {
            return None;
        }
        state.used[word] |= bit;
        Some(SourcePort { ports: Arc::clone(self), port })
    }

    /// Returns a non-blocking TCP socket for a connection to an address of this machine, bound to a port of its own: at
    /// the proxy's address, or for IPv6 at `::1`, from which no program connects to a node's address.
    ///
    /// # Errors
    /// The error of the kernel; `ADDRNOTAVAIL` if all ports are in use.
    pub(super) fn bind(self: &Arc<Self>, destination: IpAddr) -> Result<(OwnedFd, SourcePort), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, source) = match destination {
            IpAddr::V4(_) => (AddressFamily::INET, IpAddr::from(self.address)),
            IpAddr::V6(_) => (AddressFamily::INET6, Ipv6Addr::LOCALHOST.into()),
        };
        let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        // The last connection of the port may still be in TIME_WAIT.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        for _ in FIRST..=u16::MAX {
            let port = self.take().ok_or(Errno::ADDRNOTAVAIL)?;
            match bind(&socket, &SocketAddr::new(source, port.port)) {
                // A listener has it.
                Err(Errno::ADDRINUSE) => {}
                bound => return bound.map(|()| (socket, port)),
            }
        }
        Err(Errno::ADDRNOTAVAIL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_has_a_port_of_its_own_until_it_ends() {
        let ports = SourcePorts::new(Ipv4Addr::new(127, 78, 250, 250));
        let (_first, port) = ports.bind(Ipv4Addr::LOCALHOST.into()).expect("a port");
        let (_second, other) = ports.bind(Ipv4Addr::LOCALHOST.into()).expect("a port");
        assert_ne!(port.port, other.port);
        ports.state.lock().expect("no panic").next = port.port;
        assert_ne!(ports.take().expect("a port").port, port.port);
        let free = port.port;
        drop(port);
        ports.state.lock().expect("no panic").next = free;
        assert_eq!(ports.take().expect("a port").port, free);
    }
}
