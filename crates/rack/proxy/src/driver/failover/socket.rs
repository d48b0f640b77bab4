//! TCP sockets between the proxies of two nodes.

use crate::driver::epoll_set::{EpollSet, EpollToken};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A peer from which nothing arrives for this long is considered gone.
const SILENCE_MAX: Duration = Duration::from_secs(10);
const PROBES_MAX: u32 = 5;

/// Connects to a peer without blocking, and registers the socket for an engine.
pub(super) fn connect(address: SocketAddr, index: usize, epoll: &EpollSet) -> Result<OwnedFd, Errno> {
    let socket = new_socket(address)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(errno),
    }
    register(&socket, index, epoll)?;
    Ok(socket)
}

/// Registers a socket for an engine. An accepted socket is registered for its handshake before.
pub(super) fn register(socket: &OwnedFd, index: usize, epoll: &EpollSet) -> Result<(), Errno> {
    epoll.remove(socket);
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    epoll.add(socket, EpollToken::FailoverSocket(index as u32), flags)
}

fn new_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Accepted sockets inherit all options of the listener.
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, SILENCE_MAX / 2)?;
    sockopt::set_tcp_keepintvl(&socket, SILENCE_MAX / 2 / PROBES_MAX)?;
    sockopt::set_tcp_keepcnt(&socket, PROBES_MAX)?;
    sockopt::set_tcp_user_timeout(&socket, SILENCE_MAX.as_millis() as u32)?;
    Ok(socket)
}

/// Listens at an address, and returns the port that the kernel chose if it was 0.
pub(super) fn listen(address: SocketAddr, backlog: usize) -> Result<(OwnedFd, u16), Errno> {
    let socket = new_socket(address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, backlog as i32)?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?).map_err(|_| Errno::AFNOSUPPORT)?;
    Ok((socket, bound.port()))
}

/// Returns whether an error of `connect` shows that the peer cannot connect to this node either, because it is not
/// reachable or its proxy has ended. Other errors may be packet loss, or concern this machine only.
pub(super) fn means_unreachable(errno: Errno) -> bool {
    matches!(errno, Errno::CONNREFUSED | Errno::NETUNREACH | Errno::HOSTUNREACH)
}
