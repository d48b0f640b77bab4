//! Options of a socket that only the kernel can honour, however they were set: before the socket was connected, on the
//! listener that has accepted it, or by a program that does not load this library.

use crate::kernel::Tcp;
use socket::process::system::raw_syscall;
use std::os::fd::RawFd;

// `asm-generic/socket.h`, `linux/tcp.h`.
const SO_MAX_PACING_RATE: i32 = 47;
const TCP_TX_DELAY: i32 = 37;

/// The options, with the value that a lane implies.
const OPTIONS: [(i32, i32, i32); 9] = [
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF, -1),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, 0),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING, 0),
    (libc::SOL_SOCKET, SO_MAX_PACING_RATE, -1),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY, 0),
    (libc::IPPROTO_TCP, libc::TCP_INQ, 0),
    (libc::IPPROTO_TCP, TCP_TX_DELAY, 0),
];

/// Returns whether a socket has an option, a filter or a mode that a lane does not have. Takes about a microsecond.
pub fn needs_kernel(fd: RawFd) -> bool {
    raises_signals(fd)
        || has_filter(fd)
        || OPTIONS.iter().any(|(level, name, usual)| number(fd, *level, *name).is_some_and(|value| value != *usual))
}

/// Returns whether the socket raises a signal when bytes arrive (`O_ASYNC`).
fn raises_signals(fd: RawFd) -> bool {
    let flags = rustix::fs::fcntl_getfl(Tcp(fd).borrow());
    flags.is_ok_and(|flags| flags.bits() & libc::O_ASYNC as u32 != 0)
}

/// Returns whether a socket filter decides which bytes arrive.
fn has_filter(fd: RawFd) -> bool {
    let mut instructions: libc::socklen_t = 0;
    // SAFETY: a length of 0 asks for the number of instructions, and nothing else is written.
    let result = unsafe { query(fd, (libc::SOL_SOCKET, libc::SO_GET_FILTER), std::ptr::null_mut(), &mut instructions) };
    result >= 0 && instructions > 0
}

/// Returns the value of an option that is a number; `None` if the kernel does not know it.
fn number(fd: RawFd, level: i32, name: i32) -> Option<i32> {
    let (mut value, mut len_bytes) = (0_i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the value is a local of this length.
    let result = unsafe { query(fd, (level, name), &raw mut value, &mut len_bytes) };
    (result >= 0 && len_bytes as usize == size_of::<i32>()).then_some(value)
}

/// # Safety
/// `value` is writable for `len_bytes` bytes.
unsafe fn query(fd: RawFd, (level, name): (i32, i32), value: *mut i32, len_bytes: &mut libc::socklen_t) -> isize {
    let len_bytes = std::ptr::from_mut(len_bytes).expose_provenance();
    let arguments = [fd as usize, level as usize, name as usize, value.expose_provenance(), len_bytes];
    // SAFETY: the length is a local of the caller, and the value is writable for it by this function's contract.
    unsafe { raw_syscall(libc::SYS_getsockopt, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn set(fd: RawFd, level: i32, name: i32, value: i32) {
        let value = value.to_ne_bytes();
        let arguments = [fd as usize, level as usize, name as usize, value.as_ptr().expose_provenance(), value.len()];
        // SAFETY: the value is a local of this length.
        assert!(unsafe { raw_syscall(libc::SYS_setsockopt, arguments) } >= 0, "{level} {name}");
    }

    #[test]
    fn usual_connections_are_fit() {
        let (client, server) = connected();
        client.set_nodelay(true).unwrap();
        assert!(!needs_kernel(client.as_raw_fd()) && !needs_kernel(server.as_raw_fd()));
    }

    #[test]
    fn each_option_of_the_kernel_alone_is_found() {
        for (level, name, usual) in OPTIONS {
            let (client, _server) = connected();
            let value = match name {
                SO_MAX_PACING_RATE => 1 << 20,
                _ => usual + 1,
            };
            set(client.as_raw_fd(), level, name, value);
            assert!(needs_kernel(client.as_raw_fd()), "{level} {name}");
        }
    }

    #[test]
    fn a_socket_that_raises_signals_is_found() {
        let (client, _server) = connected();
        rustix::io::ioctl_fionbio(&client, false).unwrap();
        let flags = rustix::fs::fcntl_getfl(&client).unwrap();
        rustix::fs::fcntl_setfl(&client, flags | rustix::fs::OFlags::from_bits_retain(libc::O_ASYNC as u32)).unwrap();
        assert!(needs_kernel(client.as_raw_fd()));
    }
}
