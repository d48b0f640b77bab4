//! Queries of kernel sockets.

use crate::options::OptionRecord;
use crate::rendezvous::address;
use crate::rendezvous::directory::netns_cookie;
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, RawFd};

/// `fcntl(2)` command for the signal that `O_ASYNC` raises.
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;

/// `getsockname(2)` of a TCP socket.
pub(crate) fn local_address(fd: RawFd) -> Result<SocketAddr, Errno> {
    // SAFETY: the program's call names this descriptor and keeps it open.
    let name = rustix::net::getsockname(unsafe { BorrowedFd::borrow_raw(fd) })?;
    SocketAddr::try_from(name)
}

/// Returns whether a security module, such as Landlock or a name-based policy, denies the calling thread a TCP connect
/// to this port. A lane is made without a TCP connect; the modules are therefore consulted by a connect that cannot
/// succeed. TCP does not connect to multicast addresses: it returns `ENETUNREACH`, sends nothing and leaves the socket
/// unchanged, but only after the kernel has consulted its modules about the socket and the port. Each connect repeats
/// this, because a Landlock domain may have been inherited without notice.
///
/// # Errors
/// The pending error of an earlier connect of the socket, which this call consumes.
pub(crate) fn is_connect_denied(fd: RawFd, is_v6: bool, port: u16) -> Result<bool, Errno> {
    const ALL_HOSTS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(224, 0, 0, 1)), 0);
    const ALL_NODES: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)), 0);
    let mut unreachable = if is_v6 { ALL_NODES } else { ALL_HOSTS };
    unreachable.set_port(port);
    // SAFETY: the program's `connect` names this descriptor and keeps it open.
    match rustix::net::connect(unsafe { BorrowedFd::borrow_raw(fd) }, &unreachable) {
        Err(error @ (Errno::CONNREFUSED | Errno::CONNABORTED | Errno::CONNRESET | Errno::TIMEDOUT)) => Err(error),
        other => Ok(matches!(other, Err(Errno::ACCESS | Errno::PERM))),
    }
}

/// Returns the cookie of the network namespace in which a socket was created.
pub(crate) fn netns_of(fd: RawFd) -> u64 {
    // SAFETY: the program's call names this descriptor and keeps it open.
    netns_cookie(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns `IPV6_V6ONLY`.
pub(crate) fn is_v6only(fd: RawFd) -> bool {
    // SAFETY: the program's call names this descriptor and keeps it open.
    rustix::net::sockopt::ipv6_v6only(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(false)
}

/// Returns `SO_REUSEPORT`.
pub(crate) fn reuses_port(fd: RawFd) -> bool {
    // SAFETY: the program's call names this descriptor and keeps it open.
    rustix::net::sockopt::socket_reuseport(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(false)
}

/// Returns whether a socket has an option or mode that lanes do not support, so that it stays on kernel TCP.
pub(crate) fn needs_kernel_tcp(fd: RawFd, options: &OptionRecord) -> bool {
    // SAFETY: the program's call names this descriptor and keeps it open.
    let modes = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) });
    let raises_signals = modes.is_ok_and(|modes| modes.bits() as i32 & libc::O_ASYNC != 0);
    raises_signals || options.needs_kernel_tcp()
}

/// `accept4(2)` in the kernel; also returns the peer's address.
pub(crate) fn accept_with_peer(fd: RawFd, flags: i32) -> Result<(RawFd, Option<SocketAddr>), Errno> {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut len_bytes = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: `storage` and `len_bytes` are local variables, and the storage has the length that `len_bytes` says.
    let accepted = unsafe {
        crate::process::system::call!(libc::SYS_accept4, fd, storage.as_mut_ptr(), &raw mut len_bytes, flags)
    };
    if accepted < 0 {
        return Err(crate::process::system::error_of(accepted));
    }
    // SAFETY: `storage` was zeroed and has been filled by the kernel with at most `len_bytes` bytes.
    let peer = unsafe { address::read_sockaddr(storage.as_ptr().cast(), len_bytes) };
    Ok((accepted as RawFd, peer.ok()))
}

/// Records, as the priority of the hidden listener, which mode the program has set for its own listener. The kernel
/// keeps it through `exec` and `SCM_RIGHTS`, as it keeps a mode. The priority of an AF_UNIX socket has no other effect.
pub(crate) fn remember_mode(lane_fd: RawFd, is_nonblocking: bool) {
    let priority = i32::from(is_nonblocking);
    let len_bytes = size_of::<i32>();
    // SAFETY: `priority` is a local variable of `len_bytes`; the kernel returns an error for a closed descriptor.
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

/// Returns what [`remember_mode`] recorded.
pub(crate) fn remembered_mode(lane_fd: RawFd) -> bool {
    let mut priority = 0_i32;
    let mut len_bytes = size_of::<i32>() as libc::socklen_t;
    let (value, len) = (&raw mut priority, &raw mut len_bytes);
    // SAFETY: `value` and `len` point to local variables; the kernel returns an error for a closed descriptor.
    unsafe {
        crate::process::system::call!(libc::SYS_getsockopt, lane_fd, libc::SOL_SOCKET, libc::SO_PRIORITY, value, len)
    };
    priority == 1
}

/// Records, for other processes that listen on the same socket, whether only this library has set non-blocking mode. It
/// is stored as the signal of `O_ASYNC`, which has no effect while that mode is off.
pub(crate) fn mark_mode(fd: RawFd, is_ours: bool) {
    // SAFETY: the argument is a number; the kernel returns an error for a closed descriptor.
    unsafe { crate::process::system::call!(libc::SYS_fcntl, fd, F_SETSIG, if is_ours { libc::SIGIO } else { 0 }) };
}

/// Returns what [`mark_mode`] has recorded, in this process or another one.
pub(crate) fn is_mode_ours(fd: RawFd) -> bool {
    // SAFETY: the call takes no pointer; the kernel returns an error for a closed descriptor.
    unsafe { crate::process::system::call!(libc::SYS_fcntl, fd, F_GETSIG, 0) == libc::SIGIO as isize }
}

/// Returns whether a descriptor is a TCP listener bound to `address`.
pub(crate) fn listens_on(fd: RawFd, address: SocketAddr) -> bool {
    // SAFETY: the call only reads, and fails for a closed number.
    let listens = rustix::net::sockopt::socket_acceptconn(unsafe { BorrowedFd::borrow_raw(fd) });
    listens == Ok(true) && local_address(fd).is_ok_and(|local| address::canonical(local) == address::canonical(address))
}
