//! Asking the monitor for a listener of another node.

use rustix::io::Errno;
use socket::descriptor::hidden::close;
use socket::process::blocking;
use socket::process::clock::now_ns;
use socket::rack::location;
use socket::rack::monitor::{self, ListenerResponse, RESPONSE_WAIT_NS};
use stats_page::FallbackReason;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

/// Milliseconds between attempts while too many programs ask at once.
const RETRY_MS: i32 = 1;

/// Asks the monitor to let the proxy stand in for a listener of another node, and waits for its answer: for the
/// rack's `query_ns` at most, or until the monitor is known not to answer.
///
/// # Errors
/// Why there is no listener that could be used.
pub fn ask(destination: SocketAddr) -> Result<(), FallbackReason> {
    let rack = location::rack_dir(rustix::process::geteuid().as_raw());
    if !monitor::has_monitor(&rack) {
        return Err(FallbackReason::LinkDown);
    }
    let deadline_ns = now_ns().saturating_add(RESPONSE_WAIT_NS);
    let query = loop {
        match monitor::send_query(&rack, destination)? {
            Some(query) => break query,
            None if now_ns() >= deadline_ns => return Err(FallbackReason::LinkDown),
            None => _ = blocking::poll_for(-1, 0, RETRY_MS),
        }
    };
    let answer = loop {
        if let Some(answer) = monitor::receive_response(std::os::fd::AsFd::as_fd(&query)) {
            break Some(answer);
        }
        let left_ns = deadline_ns.saturating_sub(now_ns());
        if left_ns == 0 {
            break None;
        }
        wait_readable(query.as_raw_fd(), left_ns);
    };
    close(query);
    match answer {
        Some(ListenerResponse::Ready { .. }) => Ok(()),
        Some(ListenerResponse::Unavailable(reason)) => Err(reason),
        None => Err(FallbackReason::LinkDown),
    }
}

fn wait_readable(fd: i32, limit_ns: u64) {
    let limit_ms = i32::try_from(limit_ns.div_ceil(1_000_000)).unwrap_or(i32::MAX);
    blocking::poll_for(fd, libc::POLLIN, limit_ms);
}

/// Returns the reason that a refusal of the proxy stands for.
pub fn reason_of(errno: Errno) -> FallbackReason {
    match errno {
        Errno::CONNREFUSED => FallbackReason::NoListener,
        Errno::ACCESS => FallbackReason::AccessDenied,
        Errno::NETUNREACH => FallbackReason::LinkDown,
        Errno::ADDRINUSE => FallbackReason::PortInUse,
        _ => FallbackReason::HandshakeFailed,
    }
}
