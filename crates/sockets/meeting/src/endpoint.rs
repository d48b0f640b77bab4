//! What does not change of an endpoint's TCP socket while it is connected.

use std::os::fd::BorrowedFd;

use crate::counts::Role;
use crate::reason::Reason;
use crate::system::{option, option_bytes};
use crate::tuple::Tuple;

/// The identity of one endpoint of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Both addresses.
    pub tuple: Tuple,
    /// How the socket was connected.
    pub role: Role,
    /// `SO_COOKIE` (`linux/sock_diag.h`): unique among the sockets of the kernel since it was started.
    pub cookie: u64,
    /// `SO_NETNS_COOKIE` (Linux 5.14) of the socket's network namespace, or 0 if the kernel does not tell.
    pub netns_cookie: u64,
}

impl Endpoint {
    /// Examines a connected socket, in seven system calls. Whether the program makes the socket unfit later, by
    /// `TCP_REPAIR` or `TCP_ULP`, is for the caller to know.
    ///
    /// # Errors
    /// [`Reason::NotTcp`] (also for MPTCP and SMC, which answer `TCP_INFO` too), [`Reason::State`],
    /// [`Reason::SelfConnected`], [`Reason::Repair`], [`Reason::Ulp`].
    pub fn of(socket: BorrowedFd<'_>, role: Role) -> Result<Self, Reason> {
        let protocol = option(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL).map(i32::from_ne_bytes);
        if protocol != Some(libc::IPPROTO_TCP) {
            return Err(Reason::NotTcp);
        }
        let tuple = Tuple::of(socket)?;
        if tuple.local == tuple.peer {
            return Err(Reason::SelfConnected);
        }
        if option(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR).map(i32::from_ne_bytes) != Some(0) {
            return Err(Reason::Repair);
        }
        // The name of the upper layer protocol; its length is 0 without one.
        if option_bytes(socket, libc::IPPROTO_TCP, libc::TCP_ULP, &mut [0; 16]).is_ok_and(|length| length > 0) {
            return Err(Reason::Ulp);
        }
        let cookie = option(socket, libc::SOL_SOCKET, libc::SO_COOKIE).map(u64::from_ne_bytes);
        let cookie = cookie.ok_or(Reason::System)?;
        Ok(Self { tuple, role, cookie, netns_cookie: netns_cookie(socket) })
    }
}

/// Returns the cookie of a socket's network namespace, or 0 if the kernel does not tell.
pub(crate) fn netns_cookie(socket: BorrowedFd<'_>) -> u64 {
    option(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE).map_or(0, u64::from_ne_bytes)
}
