//! Questions about kernel sockets.

use crate::options::OptionRecord;
use crate::rendezvous::address;
use crate::rendezvous::directory::netns_cookie;
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, RawFd};

/// `fcntl(2)`: the signal of a descriptor that is to raise one.
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;

/// `getsockname(2)` of a TCP socket.
pub(crate) fn local_address(fd: RawFd) -> Result<SocketAddr, Errno> {
    // SAFETY: the program's descriptor, in a call about it.
    let name = rustix::net::getsockname(unsafe { BorrowedFd::borrow_raw(fd) })?;
    SocketAddr::try_from(name)
}

/// Whether a security module denies the calling thread a TCP connect to this port: a Landlock domain, or a policy of
/// names. A lane is made by no TCP connect, so the modules are asked by one that can never begin: TCP connects to no
/// multicast address (`ENETUNREACH`), sends nothing there and leaves the socket as it was, but the kernel asks its
/// modules first, of the socket and the port. A domain may have been inherited, which nothing tells: so each connect
/// asks.
///
/// # Errors
/// What an earlier connect of the socket has to say: asking takes it.
pub(crate) fn is_connect_denied(fd: RawFd, is_v6: bool, port: u16) -> Result<bool, Errno> {
    const ALL_HOSTS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(224, 0, 0, 1)), 0);
    const ALL_NODES: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)), 0);
    let mut unreachable = if is_v6 { ALL_NODES } else { ALL_HOSTS };
    unreachable.set_port(port);
    // SAFETY: the program's descriptor, which it is connecting.
    match rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &unreachable) {
        Err(error @ (Errno::CONNREFUSED | Errno::CONNABORTED | Errno::CONNRESET | Errno::TIMEDOUT)) => Err(error),
        answer => Ok(matches!(answer, Err(Errno::ACCESS | Errno::PERM))),
    }
}

/// The cookie of the network namespace that a socket was made in, which is the one that it reaches.
pub(crate) fn netns_of(fd: RawFd) -> u64 {
    // SAFETY: the program's descriptor, in a call about it.
    netns_cookie(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// `IPV6_V6ONLY`.
pub(crate) fn is_v6only(fd: RawFd) -> bool {
    // SAFETY: the program's descriptor, in a call about it.
    rustix::net::sockopt::ipv6_v6only(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(false)
}

/// `SO_REUSEPORT`.
pub(crate) fn reuses_port(fd: RawFd) -> bool {
    // SAFETY: the program's descriptor, in a call about it.
    rustix::net::sockopt::socket_reuseport(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(false)
}

/// Whether a socket whose options are `options` is to do what lanes cannot: then it stays with the kernel.
pub(crate) fn needs_kernel_tcp(fd: RawFd, options: &OptionRecord) -> bool {
    // SAFETY: the program's descriptor, in a call about it.
    let modes = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) });
    let raises_signals = modes.is_ok_and(|modes| modes.bits() as i32 & libc::O_ASYNC != 0);
    raises_signals || options.needs_kernel_tcp()
}

/// `accept4(2)` in the kernel, with the peer's address.
pub(crate) fn accept_with_peer(fd: RawFd, flags: i32) -> Result<(RawFd, Option<SocketAddr>), Errno> {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut len_bytes = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: the storage is writable for the length given.
    let accepted = unsafe {
        crate::process::system::call!(libc::SYS_accept4, fd, storage.as_mut_ptr(), &raw mut len_bytes, flags)
    };
    if accepted < 0 {
        return Err(crate::process::system::error_of(accepted));
    }
    // SAFETY: zeroed, then filled by the kernel for at most the length it reports.
    let peer = unsafe { address::read_sockaddr(storage.as_ptr().cast(), len_bytes) };
    Ok((accepted as RawFd, peer.ok()))
}

/// Notes on the hidden listener which mode the program wants for its own: the kernel keeps it through `exec` and
/// `SCM_RIGHTS`, as it would keep the mode. (A priority means nothing to an AF_UNIX socket.)
pub(crate) fn remember_mode(lane_fd: RawFd, is_nonblocking: bool) {
    let priority = i32::from(is_nonblocking);
    let len_bytes = size_of::<i32>();
    // SAFETY: the value is readable; a closed descriptor is answered with an error.
    unsafe {
        crate::process::system::call!(
            libc::SYS_setsockopt,
            lane_fd,
            libc::SOL_SOCKET,
            libc::SO_PRIORITY,
            &raw const priority,
            len_bytes,
        )
    };
}

/// What [`remember_mode`] noted.
pub(crate) fn remembered_mode(lane_fd: RawFd) -> bool {
    let mut priority = 0_i32;
    let mut len_bytes = size_of::<i32>() as libc::socklen_t;
    let (value, len) = (&raw mut priority, &raw mut len_bytes);
    // SAFETY: both are writable; a closed descriptor is answered with an error.
    unsafe {
        crate::process::system::call!(libc::SYS_getsockopt, lane_fd, libc::SOL_SOCKET, libc::SO_PRIORITY, value, len)
    };
    priority == 1
}

/// Notes on the program's listener whether it is this library alone that has put it in non-blocking mode: for another
/// process that listens on the same socket. (The signal of a descriptor that raises none means nothing.)
pub(crate) fn mark_mode(fd: RawFd, is_ours: bool) {
    // SAFETY: takes a number; a closed descriptor is answered with an error.
    unsafe { crate::process::system::call!(libc::SYS_fcntl, fd, F_SETSIG, if is_ours { libc::SIGIO } else { 0 }) };
}

/// What [`mark_mode`] noted, here or elsewhere.
pub(crate) fn is_mode_ours(fd: RawFd) -> bool {
    // SAFETY: takes no pointer; a closed descriptor is answered with an error.
    unsafe { crate::process::system::call!(libc::SYS_fcntl, fd, F_GETSIG, 0) == libc::SIGIO as isize }
}

/// Whether a descriptor is a TCP listener bound to `address`.
pub(crate) fn listens_on(fd: RawFd, address: SocketAddr) -> bool {
    // SAFETY: only asks; a closed number is answered with an error.
    let listens = rustix::net::sockopt::socket_acceptconn(unsafe { BorrowedFd::borrow_raw(fd) });
    listens == Ok(true) && local_address(fd).is_ok_and(|local| address::canonical(local) == address::canonical(address))
}
