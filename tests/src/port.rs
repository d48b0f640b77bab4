//! Free ports, and servers that listen on them.

use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::{PATIENCE, Process};

/// Between choosing a port and listening on it another program may take it: then the next one is tried.
const TRIES_MAX: u32 = 5;
/// Where servers get their ports: below what Linux gives to sockets that ask for any port, so that no connection and no
/// program that listens anywhere takes the port between the choice and the server's `listen`.
const PORTS: std::ops::Range<u16> = 10_000..32_768;
/// Far more than there can be ports taken in a row.
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

/// A port that was free a moment ago, another one each time, and that no other run of tests is given as long as this
/// process lives. Where the search begins depends on the process, so that runs at once rarely meet.
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

/// Takes a port from all other runs: an abstract name belongs to one socket of a network namespace, as a port does, and
/// goes with its process.
fn reserve(port: u16) -> bool {
    let name = format!("crosslane-test-port-{port}");
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    // Held until the process ends.
    UnixListener::bind_addr(&address).map(std::mem::forget).is_ok()
}

/// Starts the server that `command` describes for a port, and waits until it listens.
#[track_caller]
pub fn start_server(command: impl Fn(u16) -> Command) -> Server {
    let mut complaints = String::new();
    for _ in 0..TRIES_MAX {
        let port = free_port();
        let process = Process::start(&mut command(port));
        if listens_in_time(&process, port) {
            return Server { process, port };
        }
        complaints = process.wait(PATIENCE).to_string();
    }
    panic!("no server after {TRIES_MAX} tries; the last: {complaints}");
}

/// False when the process ended; panics when it lives and does not listen.
#[track_caller]
fn listens_in_time(process: &Process, port: u16) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !is_listening(port) {
        if !process.is_running() {
            return false;
        }
        assert!(Instant::now() < deadline, "{} does not listen on {port}\n{}", process.name(), process.stderr());
        std::thread::sleep(Duration::from_millis(5));
    }
    process.is_running()
}

/// Whether anything listens on a TCP port. A look, not a connect: an accelerated server would see a stranger.
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
    fn a_port_that_another_run_was_given_is_not_given_again() {
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
        // A program that a test beside this one starts holds the listener too, until it has become that program.
        let deadline = Instant::now() + PATIENCE;
        while is_listening(port) {
            assert!(Instant::now() < deadline, "port {port} is closed and still seen as listened on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
