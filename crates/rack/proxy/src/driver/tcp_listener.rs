//! The TCP listeners by which programs of this node reach those of other nodes.

use super::shared::Shared;
use meeting::{Role, Tuple, diag};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, bind, ipproto, listen, socket_with, sockopt};
use socket::process::clock::now_ns;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use stream::connection::Relay;

/// A TCP listener that stands in for a listener of another node.
#[derive(Debug)]
pub(super) struct TcpListener {
    socket: OwnedFd,
    /// Any user of this machine may connect, and the library does not know it.
    is_published: bool,
}

/// A program that has connected to such a listener.
#[derive(Debug)]
pub(super) struct TcpClient {
    pub(super) relay: Relay,
    /// Seen from the program, between the two nodes.
    pub(super) tuple: Tuple,
    pub(super) cookie: u64,
    pub(super) since_ns: u64,
}

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl TcpListener {
    /// Listens at an address of this machine.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(super) fn listen(address: SocketAddr, backlog: i32, is_published: bool) -> Result<Self, Errno> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, FLAGS, Some(ipproto::TCP))?;
        if is_published {
            sockopt::set_socket_reuseaddr(&socket, true)?;
            // The operator may give the address to this machine later.
            match address {
                SocketAddr::V4(_) => sockopt::set_ip_freebind(&socket, true)?,
                SocketAddr::V6(_) => sockopt::set_ipv6_freebind(&socket, true)?,
            }
        }
        bind(&socket, &address)?;
        listen(&socket, backlog)?;
        Ok(Self { socket, is_published })
    }

    /// Returns the port at which it listens.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(super) fn port(&self) -> Result<u16, Errno> {
        let address = rustix::net::getsockname(&self.socket)?;
        SocketAddr::try_from(address).map(|address| address.port()).map_err(|_| Errno::AFNOSUPPORT)
    }

    /// Accepts the next program that may connect, and closes the connections of others. Returns `None` if no program
    /// has connected.
    pub(super) fn accept(&self, shared: &Shared, destination: SocketAddr) -> Option<TcpClient> {
        loop {
            let socket = match accept_with(&self.socket, FLAGS) {
                Ok(socket) => socket,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(_) => return None,
            };
            if let Some((source, cookie)) = self.examine(socket.as_fd(), shared) {
                let tuple = Tuple { local: source, peer: destination };
                let relay = match self.is_published {
                    true => Relay::on_tcp(socket, Role::Accepted, shared.meeting_key()),
                    false => Relay::new(socket, Role::Accepted, shared.meeting_key()),
                };
                return Some(TcpClient { relay, tuple, cookie, since_ns: now_ns() });
            }
            // Not in good order: the program must not take it for a server that has closed.
            let _ = sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO));
        }
    }

    /// Returns the client's address as the other node is to see it, and the cookie of its socket. `None` for a program
    /// of another user.
    fn examine(&self, socket: BorrowedFd<'_>, shared: &Shared) -> Option<(SocketAddr, u64)> {
        let [local, peer] = addresses_of(socket)?;
        let client = diag::look_up(Tuple::new(peer, local));
        let is_own = client.is_some_and(|client| client.is_connected() && client.uid == own_uid());
        if !is_own && !self.is_published {
            return None;
        }
        let node = shared.address(shared.setup.own_slot)?;
        // The kernel has chosen the source address of a program that has bound to none.
        let is_chosen = peer.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST) || peer.ip() == local.ip() || self.is_published;
        let source = if is_chosen { SocketAddr::new(node, peer.port()) } else { peer };
        Some((source, client.map_or(0, |client| client.cookie)))
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the user of this process.
pub(super) fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn addresses_of(socket: BorrowedFd<'_>) -> Option<[SocketAddr; 2]> {
    let canonical = |address| {
        let address = SocketAddr::try_from(address).ok()?;
        Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
    };
    let local = canonical(rustix::net::getsockname(socket).ok()?)?;
    let peer = canonical(rustix::net::getpeername(socket).ok()??)?;
    Some([local, peer])
}
