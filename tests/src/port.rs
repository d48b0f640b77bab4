//! Free ports and servers that listen on them.

use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Process, WAIT_MAX};

/// Another program may bind a port after it was chosen; then the next one is tried.
const TRIES_MAX: u32 = 5;
/// Ports of servers: below Linux' ephemeral ports, so that no connection and no program that binds port 0 takes the
/// port between the choice and the server's `listen`.
const PORTS: std::ops::Range<u16> = 10_000..32_768;
/// Far more than the number of consecutive ports that can be in use.
const PORTS_TRIED_MAX: u32 = 1000;
/// `st` of a listener in /proc/net/tcp.
const STATE_LISTEN: &str = "0A";

/// A running server and the port it listens on.
pub struct Server {
    /// Its process.
    pub process: Process,
    /// Its port.
    pub port: u16,
}

/// A port that was free a moment ago, a different one each time, and that no other test run gets while this process is
/// alive. The start of the search depends on the process, so concurrent runs rarely collide.
pub fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(7919);
    for _ in 0..PORTS_TRIED_MAX {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + (begin.wrapping_add(call) % PORTS.len() as u32) as u16;
        if reserve(port) && TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
    panic!("none of {PORTS_TRIED_MAX} ports is free");
}

/// Reserves a port among all test runs by an abstract socket name, which, like a port, belongs to one socket of a
/// network namespace and is released when the process ends.
fn reserve(port: u16) -> bool {
    let name = format!("crosslane-test-port-{port}");
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    // Held until the process ends.
    UnixListener::bind_addr(&address).map(std::mem::forget).is_ok()
}

/// Starts the server that `command` describes for a port, and waits until it listens.
#[track_caller]
pub fn start_server(command: impl Fn(u16) -> Command) -> Server {
    let mut last_output = String::new();
    for _ in 0..TRIES_MAX {
        let port = free_port();
        let process = Process::start(&mut command(port));
        crate::wait_until(&format!("listener of {}", process.name()), || is_listening(port) || !process.is_running());
        if process.is_running() {
            return Server { process, port };
        }
        last_output = process.wait(WAIT_MAX).to_string();
    }
    panic!("no server after {TRIES_MAX} tries; the last: {last_output}");
}

/// Whether a socket listens on a TCP port. Reads /proc, because an accelerated server would see a connect.
pub fn is_listening(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let text = fs::read_to_string(table).unwrap_or_default();
        text.lines().skip(1).any(|line| is_listener(line, port))
    })
}

fn is_listener(line: &str, port: u16) -> bool {
    let mut words = line.split_whitespace().skip(1);
    let local = words.next().unwrap_or_default();
    let state = words.nth(1).unwrap_or_default();
    state == STATE_LISTEN && local.ends_with(&format!(":{port:04X}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_reserved_by_another_run_is_not_used() {
        let port = free_port();
        assert!(!reserve(port));
        assert_ne!(free_port(), port);
    }

    #[test]
    fn a_listener_is_seen_and_a_free_port_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listening(port));
        drop(listener);
        // A child that another test forks meanwhile holds the listener too, until its exec.
        crate::wait_until("port without a listener", || !is_listening(port));
    }
}
