//! `connect` to a listener of another node.

use super::query::{ask, reason_of};
use super::table::{ProxyTable, Verdict};
use super::{cookie_of, table};
use crate::kernel::Tcp;
use crate::process;
use crate::table::{self as descriptors, Entry};
use rustix::io::Errno;
use socket::accounting::process_stats::page;
use socket::process::clock::now_ns;
use socket::process::settings::settings;
use socket::process::signals::{HandlersRun, SignalCheckpoint};
use socket::process::system::{count_or_error, raw_syscall};
use socket::rack::address::canonical;
use stats_page::FallbackReason;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{BorrowedFd, RawFd};

/// Time that a blocking connect waits for the verdict of the other node.
const VERDICT_NS: u64 = 5_000_000_000;
/// Time that a non-blocking connect waits for it: nearly always it has arrived by then. Later, a refusal is a reset.
const NONBLOCKING_VERDICT_NS: u64 = 20_000_000;
/// Longest sleep, after which the end of the proxy is noticed.
const NAP_NS: u64 = 100_000_000;
/// Connects of one call: the proxy may have forgotten a listener, and a port may be in use at the other node.
const TRIES_MAX: u32 = 4;

/// How one attempt to connect by the proxy has ended.
enum Attempt {
    /// The program gets this result.
    Done(Result<(), Errno>),
    /// The other node has refused it, or has not answered.
    Refused(FallbackReason),
    /// The proxy does not listen any more.
    Stale,
}

/// Connects a socket to the proxy that stands in for a listener of another node. `by_kernel` is `connect(2)` on the
/// socket. Returns `None` if the connect is to use the address as it is: it is not that of another node, or nothing
/// listens there that windows could reach.
pub fn connect(
    fd: RawFd,
    destination: SocketAddr,
    by_kernel: impl Fn(SocketAddr) -> Result<(), Errno>,
) -> Option<Result<(), Errno>> {
    if settings().node.is_none() || settings().off || process::is_confined() {
        return None;
    }
    let to = canonical(destination);
    let table = table()?;
    let slot = table.slot_of(to.ip()).filter(|slot| *slot != table.own_slot())?;
    if settings().honours_filters || !settings().applies_to(to.port()) || !Tcp(fd).is_stream() {
        return None;
    }
    let proxy = table.proxy()?;
    if !matches!(descriptors::get(fd), Entry::None) {
        // It is connected already, or connecting: the kernel says so.
        let port = table.proxy_port(slot, to.port()).unwrap_or(to.port());
        return Some(by_kernel(in_family(proxy, port, destination)));
    }
    let mut reason = FallbackReason::HandshakeFailed;
    for _ in 0..TRIES_MAX {
        let port = match table.proxy_port(slot, to.port()).map_or_else(|| ask(to), |_| Ok(())) {
            Ok(()) => table.proxy_port(slot, to.port()),
            Err(refusal) => return refuse(destination, refusal),
        };
        let Some(port) = port else { continue };
        match attempt(fd, table, in_family(proxy, port, destination), &by_kernel) {
            Attempt::Done(result) => return Some(result),
            Attempt::Refused(FallbackReason::PortInUse) => reason = FallbackReason::PortInUse,
            Attempt::Refused(refusal) => return refuse(destination, refusal),
            Attempt::Stale => {
                if let Err(refusal) = ask(to) {
                    return refuse(destination, refusal);
                }
            }
        }
    }
    refuse(destination, reason)
}

/// Returns the proxy's address for a socket of the destination's family.
fn in_family(proxy: Ipv4Addr, port: u16, destination: SocketAddr) -> SocketAddr {
    match destination {
        SocketAddr::V4(_) => SocketAddr::new(proxy.into(), port),
        SocketAddr::V6(_) => SocketAddr::new(proxy.to_ipv6_mapped().into(), port),
    }
}

/// Returns whether the other node has refused the connection of a socket. Where `connect` has returned before, the
/// kernel knows this as a reset.
pub fn is_refused(fd: RawFd) -> bool {
    settings().node.is_some()
        && table().is_some_and(|table| matches!(table.verdict(cookie_of(Tcp(fd).borrow())), Ok(Verdict::Refused(_))))
}

fn attempt(
    fd: RawFd,
    table: &ProxyTable,
    proxy: SocketAddr,
    by_kernel: &impl Fn(SocketAddr) -> Result<(), Errno>,
) -> Attempt {
    let began = SignalCheckpoint::now();
    let connected = by_kernel(proxy);
    let limit_ns = match connected {
        Ok(()) => {
            let timeout_ns = Tcp(fd).timeout_ns(libc::SO_SNDTIMEO);
            if timeout_ns == 0 { VERDICT_NS } else { timeout_ns.min(VERDICT_NS) }
        }
        Err(Errno::INPROGRESS) => NONBLOCKING_VERDICT_NS,
        Err(Errno::CONNREFUSED) => return Attempt::Stale,
        Err(Errno::ISCONN | Errno::ALREADY | Errno::INTR | Errno::BADF) => return Attempt::Done(connected),
        // Something keeps the socket from loopback addresses: a device, an address, a sandbox.
        Err(_) => return Attempt::Refused(FallbackReason::SocketOption),
    };
    let deadline_ns = now_ns().saturating_add(limit_ns);
    loop {
        match table.verdict(cookie_of(Tcp(fd).borrow())) {
            Ok(Verdict::Accepted) => return Attempt::Done(connected),
            Ok(Verdict::Refused(errno)) => {
                dissolve(fd);
                return Attempt::Refused(reason_of(errno));
            }
            Err(word) => {
                let left_ns = deadline_ns.saturating_sub(now_ns());
                if left_ns == 0 && limit_ns < VERDICT_NS {
                    return Attempt::Done(Err(Errno::INPROGRESS));
                }
                let has_ended = socket::process::blocking::poll_now(fd, libc::POLLRDHUP) & libc::POLLERR != 0;
                if left_ns == 0 || has_ended {
                    dissolve(fd);
                    return if has_ended { Attempt::Stale } else { Attempt::Refused(FallbackReason::HandshakeFailed) };
                }
                if word.wait(left_ns.min(NAP_NS)).is_err() && matches!(began.since(), HandlersRun::Interrupting) {
                    return Attempt::Done(Err(Errno::INTR));
                }
            }
        }
    }
}

/// Makes the socket unconnected again, so that it can be connected to something else.
fn dissolve(fd: RawFd) {
    let unspecified = [0_u8; size_of::<libc::sockaddr>()];
    let arguments = [fd as usize, unspecified.as_ptr().expose_provenance(), unspecified.len()];
    // SAFETY: the address is a local of this length.
    let _ = count_or_error(unsafe { raw_syscall(libc::SYS_connect, arguments) });
    let _ = rustix::net::sockopt::socket_error(Tcp(fd).borrow());
}

/// Returns what a connect does for which windows cannot be used: it uses kernel TCP, or fails if a lane is required.
fn refuse(destination: SocketAddr, reason: FallbackReason) -> Option<Result<(), Errno>> {
    page().count_fallback(reason);
    if !settings().require_lane {
        return None;
    }
    let line =
        format!("crosslane: connect to {destination}: no lane: {}; refused by --require-lane\n", reason.explanation());
    // SAFETY: the descriptor is borrowed for one call, which fails harmlessly if standard error is closed.
    let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, line.as_bytes());
    Some(Err(Errno::CONNREFUSED))
}
