//! Connections that must use lanes (`--require-lane`).
//!
//! Such a connection tries to meet its other end from the beginning, in each transfer, which uses TCP until it has.
//! That a peer will never meet shows only by its silence: a transfer is refused once the connection has not met its
//! other end within `PATIENCE_NS` of its first transfer. The peer agrees with its own transfers, which may be as rare
//! as those of this end: of the time between two of them at most `IDLE_NS_MAX` counts. A peer that has not accepted
//! the connection, or not received what was sent, could not agree, and gets the same time once more. A connection that
//! other processes hold too, or whose peer has ended its stream, is not refused.

use crate::connection::Connection;
use crate::kernel::Tcp;
use crate::young::Occasion;
use meeting::diag::{self, LookUp};
use meeting::{Endpoint, Reason};
use rustix::io::Errno;
use socket::process::clock::now_ns;
use socket::process::locked::Locked;
use socket::process::settings::settings;
use socket::process::warning::warn_user;
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// Time from the first transfer to the meeting.
const PATIENCE_NS: u64 = 1_000_000_000;
/// What counts at most of the time between two transfers: a peer has had four of its own before it is refused.
const IDLE_NS_MAX: u64 = PATIENCE_NS / 4;

/// A connection that has not met its other end.
struct Unmet {
    connection: &'static Connection,
    /// It is not excluded by a setting or an option.
    may_meet: bool,
    /// When its last transfer was; `None` before the first.
    last_ns: Option<u64>,
    /// The time since the first transfer that counts.
    waited_ns: u64,
}

impl Unmet {
    /// Notes a transfer, and returns whether the peer should have agreed by now.
    fn note_transfer(&mut self) -> bool {
        let now = now_ns();
        let idle_ns = self.last_ns.replace(now).map_or(0, |last_ns| now.saturating_sub(last_ns));
        self.waited_ns += idle_ns.min(IDLE_NS_MAX);
        self.waited_ns > PATIENCE_NS
    }
}

static UNMET: Locked<Vec<Unmet>> = Locked::new(Vec::new());

/// Begins to meet the other end of a new connection, if it may meet it.
pub fn begin(fd: RawFd, connection: &'static Connection, may_meet: bool) {
    UNMET.with(|unmet| {
        unmet.retain(|it| !std::ptr::eq(it.connection, connection));
        unmet.push(Unmet { connection, may_meet, last_ns: None, waited_ns: 0 });
    });
    if may_meet {
        connection.meet(Tcp(fd), Occasion::Meet);
    }
}

/// Proceeds with the meeting before a transfer, if lanes are required.
///
/// # Errors
/// `CONNRESET` for a connection whose other end has not met it in time. It is reset, and a line on standard error says
/// so.
#[inline]
pub fn check(fd: RawFd, connection: &'static Connection) -> Result<(), Errno> {
    if settings().require_lane { check_required(fd, connection) } else { Ok(()) }
}

#[cold]
fn check_required(fd: RawFd, connection: &'static Connection) -> Result<(), Errno> {
    let found = UNMET.with(|unmet| {
        let found = unmet.iter_mut().find(|it| std::ptr::eq(it.connection, connection))?;
        Some((found.may_meet, found.note_transfer()))
    });
    let Some((may_meet, is_late)) = found else { return Ok(()) };
    if may_meet && !connection.has_met() {
        connection.meet(Tcp(fd), Occasion::Meet);
    }
    if is_late && may_meet && !connection.has_met() && has_peer_not_looked(fd, connection) {
        note_transfer_anew(connection);
        return Ok(());
    }
    let is_over = !may_meet || (is_late && !Tcp(fd).has_ended());
    if connection.has_met() || connection.is_shared() || is_over {
        UNMET.with(|unmet| unmet.retain(|it| !std::ptr::eq(it.connection, connection)));
    }
    if connection.has_met() || connection.is_shared() || !is_over {
        Ok(())
    } else {
        Err(refuse(fd, may_meet, connection.failure()))
    }
}

/// Returns whether the peer has not accepted the connection, or not received what was sent: it could not agree to meet.
fn has_peer_not_looked(fd: RawFd, connection: &Connection) -> bool {
    let Ok(endpoint) = Endpoint::of(Tcp(fd).borrow(), connection.role()) else { return false };
    match diag::look_up_peer(&endpoint) {
        LookUp::Found(peer) => peer.is_connected() && (peer.inode == 0 || peer.unread_bytes > 0),
        LookUp::Unavailable | LookUp::Nothing => false,
    }
}

/// Gives the peer the whole time once more.
fn note_transfer_anew(connection: &'static Connection) {
    UNMET.with(|unmet| {
        for it in unmet.iter_mut().filter(|it| std::ptr::eq(it.connection, connection)) {
            it.waited_ns = 0;
        }
    });
}

/// Resets a connection, and returns the error of the transfer.
fn refuse(fd: RawFd, may_meet: bool, failure: Option<Reason>) -> Errno {
    let tcp = Tcp(fd);
    let peer = rustix::net::getpeername(tcp.borrow()).ok().flatten();
    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
    let peer = peer.map_or_else(|| "?".to_owned(), |peer| peer.to_string());
    let why = match failure {
        Some(reason) if may_meet => reason.to_string(),
        None if may_meet => "the other side did not agree within a second".to_owned(),
        _ => "a setting or a socket option keeps it on kernel TCP".to_owned(),
    };
    warn_user(&format_args!("connection with {peer}: no lane: {why}; refused by --require-lane"));
    let _ = rustix::net::sockopt::set_socket_linger(tcp.borrow(), Some(std::time::Duration::ZERO));
    let _ = rustix::net::shutdown(tcp.borrow(), rustix::net::Shutdown::Both);
    Errno::CONNRESET
}
