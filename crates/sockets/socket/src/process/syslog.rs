//! Lines for the system's log, which journald or another daemon receives at `/dev/log`. Sending one never blocks: a
//! line for which the daemon has no room is lost.

use std::fmt;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::descriptor::hidden::close;
use crate::process::settings::settings;

const PATH: &str = "/dev/log";
/// Facility `authpriv`, severity `notice` (RFC 3164, section 4.1.1).
const PRIORITY: u32 = 10 << 3 | 5;

/// Sends a line to the system's log, in three system calls.
pub fn log(line: &fmt::Arguments<'_>) {
    if settings().off {
        return;
    }
    let pid = rustix::process::getpid().as_raw_nonzero();
    let text = format!("<{PRIORITY}>crosslane[{pid}]: {line}");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None) else { return };
    if let Ok(address) = SocketAddrUnix::new(PATH) {
        let _ = rustix::net::sendto(&socket, text.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL, &address);
    }
    close(socket);
}
