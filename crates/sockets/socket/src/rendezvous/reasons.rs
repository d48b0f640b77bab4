//! The reasons why a connection got no lane.
//!
//! That no listener with lanes has an address is known at once. Why (the server may run as another user, in another
//! network namespace, with another version of the library, or on another machine) is determined by `crosslane explain`,
//! which may take its time; here only for a connection that is refused, of which nothing is left to explain.

use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use stats_page::FallbackReason;

use crate::descriptor::hidden::close;
use crate::rendezvous::address::{array, canonical, local_source};
use crate::rendezvous::directory::{self, Rack};

/// Returns the reason why no listener in the rack matches `destination`.
pub fn of_missing_listener(destination: SocketAddr) -> FallbackReason {
    let destination = canonical(destination);
    let scope = if let SocketAddr::V6(v6) = destination { v6.scope_id() } else { 0 };
    if local_source(destination.ip(), scope) == Ok(None) {
        return FallbackReason::RemoteAddress;
    }
    let Ok(rack) = Rack::current() else { return FallbackReason::NoListener };
    match listener_uid(destination) {
        Ok(Some(uid)) if uid != rack.uid() => FallbackReason::OtherUser,
        Ok(Some(_)) if directory::has_other_version_at(rack.path(), destination) => FallbackReason::VersionMismatch,
        Ok(None) if rack.has_other_namespace_at(destination) => FallbackReason::NamespaceDiffers,
        _ => FallbackReason::NoListener,
    }
}

/// Returns the reason why the rack of the calling process cannot be opened.
pub fn of_rack_error(errno: Errno) -> FallbackReason {
    match errno {
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC => FallbackReason::ResourceLimit,
        Errno::CANCELED => FallbackReason::SwitchedOff,
        Errno::AFNOSUPPORT | Errno::NOSYS => FallbackReason::Sandbox,
        Errno::ACCESS | Errno::PERM if directory::is_owned_by_other_user() => FallbackReason::RackOfOtherUser,
        _ => FallbackReason::RackUnavailable,
    }
}

/// Returns whether the creation of a socket or of memory failed because a filter or a security module denies it.
pub fn is_denied(errno: Errno) -> bool {
    matches!(errno, Errno::PERM | Errno::ACCESS | Errno::NOSYS)
}

// `linux/netlink.h`, `linux/sock_diag.h` and `linux/inet_diag.h`.
const HEADER_BYTES: usize = 16;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `inet_diag_req_v2`, and where its `inet_diag_sockid` begins.
const REQUEST_BYTES: usize = 56;
const REQUEST_ID_AT: usize = 8;
/// Where `idiag_src`, `idiag_dst` and `idiag_cookie` are in an `inet_diag_sockid`.
const SOURCE_AT: usize = 4;
const COOKIE_AT: usize = 40;
/// Where `idiag_state` and `idiag_uid` are in an `inet_diag_msg`.
const STATE_AT: usize = 1;
const UID_AT: usize = 64;
/// `TCP_LISTEN` of the kernel.
const STATE_LISTEN: u8 = 10;

/// Returns the owner of the TCP listener that the kernel would connect to, if there is one in this network namespace:
/// the kernel searches for that one socket (`sock_diag(7)`), however many there are.
fn listener_uid(destination: SocketAddr) -> Result<Option<u32>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(SOCK_DIAG))?;
    let mut reply = [0_u8; 512];
    let sent = rustix::net::send(&socket, &listener_request(destination), SendFlags::empty());
    // The kernel has queued its reply before the send returns, so there is nothing to wait for.
    let received = sent.and_then(|_| rustix::net::recv(&socket, &mut reply, RecvFlags::DONTWAIT));
    close(socket);
    received.map(|(length, _)| parse_listener_reply(&reply[..length]))
}

fn listener_request(destination: SocketAddr) -> [u8; HEADER_BYTES + REQUEST_BYTES] {
    let mut request = [0_u8; HEADER_BYTES + REQUEST_BYTES];
    let length = request.len() as u32;
    request[..4].copy_from_slice(&length.to_ne_bytes());
    request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    let body = &mut request[HEADER_BYTES..];
    body[0] = if destination.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    body[1] = libc::IPPROTO_TCP as u8;
    body[4..REQUEST_ID_AT].fill(0xff); // Every state.
    let id = &mut body[REQUEST_ID_AT..];
    id[..2].copy_from_slice(&destination.port().to_be_bytes());
    match destination.ip() {
        IpAddr::V4(v4) => id[SOURCE_AT..SOURCE_AT + 4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => id[SOURCE_AT..SOURCE_AT + 16].copy_from_slice(&v6.octets()),
    }
    id[COOKIE_AT..].fill(0xff); // INET_DIAG_NOCOOKIE: any socket.
    request
}

/// Returns the owner of the listener in the kernel's reply; `None` for an error, such as that there is none.
fn parse_listener_reply(reply: &[u8]) -> Option<u32> {
    let kind = array(reply, 4).map(u16::from_ne_bytes)?;
    let socket = reply.get(HEADER_BYTES..).filter(|_| kind == SOCK_DIAG_BY_FAMILY)?;
    (*socket.get(STATE_AT)? == STATE_LISTEN).then(|| array(socket, UID_AT).map(u32::from_ne_bytes))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_listener_is_found_at_its_address_and_at_unspecified_ones() {
        let own = Ok(Some(rustix::process::geteuid().as_raw()));
        for (bound, at) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.1"),
            ("[::]:0", "127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "::1"),
        ] {
            let listener = std::net::TcpListener::bind(bound).unwrap();
            let port = listener.local_addr().unwrap().port();
            let destination = SocketAddr::new(at.parse().unwrap(), port);
            assert_eq!(listener_uid(destination), own, "{bound}");
            drop(listener);
            assert_eq!(listener_uid(destination), Ok(None), "{bound}");
        }
    }

    #[test]
    fn a_connected_socket_is_no_listener_and_a_damaged_reply_names_none() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(listener_uid(client.local_addr().unwrap()), Ok(None));
        let mut reply = [0; HEADER_BYTES + UID_AT + 4];
        reply[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        reply[HEADER_BYTES + STATE_AT] = STATE_LISTEN;
        reply[HEADER_BYTES + UID_AT..].copy_from_slice(&7_u32.to_ne_bytes());
        assert_eq!(parse_listener_reply(&reply), Some(7));
        for length in 0..reply.len() {
            assert_eq!(parse_listener_reply(&reply[..length]), None, "{length}");
        }
    }

    #[test]
    fn an_address_of_another_machine_is_named() {
        assert_eq!(of_missing_listener("198.51.100.7:80".parse().unwrap()), FallbackReason::RemoteAddress);
    }
}
