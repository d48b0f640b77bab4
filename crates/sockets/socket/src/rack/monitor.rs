//! Queries to the monitor of this node about listeners on other nodes.
//!
//! The monitor's socket is at the top of the node's rack directory. One packet in each direction, text:
//!
//! ```text
//!   far 1 127.77.0.2:6379     is there a listener at this address?
//!   ready 127.77.0.1          yes, and this node's proxy stands in for it now; this node's address
//!   no REASON                 no; REASON is a word of `FallbackReason`
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use stats_page::FallbackReason;

use crate::descriptor::hidden::close;

/// Name of the monitor's socket in the rack directory.
pub const SOCKET_NAME: &str = "monitor.sock";
/// The prefix of a query: a word, and the version of this exchange.
pub const QUERY_PREFIX: &str = "far 1 ";
/// Maximum length of a query or a response.
pub const PACKET_BYTES_MAX: usize = 256;
/// Time that a response may take: it crosses a link twice, and the machines may be under load.
pub const RESPONSE_WAIT_NS: u64 = 3_000_000_000;

/// The monitor's response about a listener on another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerResponse {
    /// The listener exists, and the proxy of this node stands in for it.
    Ready {
        /// This node's address, in the family that was queried.
        node: IpAddr,
    },
    /// The listener cannot be reached, for this reason.
    Unavailable(FallbackReason),
}

impl ListenerResponse {
    /// Encodes the response.
    pub fn encode(&self) -> String {
        match self {
            Self::Ready { node } => format!("ready {node}"),
            Self::Unavailable(reason) => format!("no {reason}"),
        }
    }

    /// Decodes a response; `None` for any bytes that [`ListenerResponse::encode`] does not write.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(packet).ok()?;
        if let Some(node) = text.strip_prefix("ready ") {
            return node.parse().ok().map(|node| Self::Ready { node });
        }
        let word = text.strip_prefix("no ")?;
        FallbackReason::ALL.iter().find(|reason| reason.name() == word).copied().map(Self::Unavailable)
    }
}

/// Encodes the query about a listener.
pub fn encode_query(destination: SocketAddr) -> String {
    format!("{QUERY_PREFIX}{destination}")
}

/// Decodes the address in a query; `None` for any bytes that [`encode_query`] does not write.
pub fn decode_query(packet: &[u8]) -> Option<SocketAddr> {
    std::str::from_utf8(packet).ok()?.strip_prefix(QUERY_PREFIX)?.parse().ok()
}

/// Returns whether the rack directory belongs to a node with a monitor, running or not.
pub fn has_monitor(rack: &Path) -> bool {
    rustix::fs::stat(rack.join(SOCKET_NAME)).is_ok()
}

/// Sends a query. The response arrives on the descriptor, for [`receive_response`]. Returns `None` if too many programs
/// query the monitor now.
///
/// # Errors
/// The reason why the query cannot be sent; [`FallbackReason::LinkDown`] if the monitor does not run.
pub fn send_query(rack: &Path, destination: SocketAddr) -> Result<Option<OwnedFd>, FallbackReason> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|_| FallbackReason::ResourceLimit)?;
    match send_query_on(&socket, &rack.join(SOCKET_NAME), destination) {
        Ok(()) => Ok(Some(socket)),
        Err(errno) => {
            close(socket);
            if errno == Errno::AGAIN { Ok(None) } else { Err(FallbackReason::LinkDown) }
        }
    }
}

fn send_query_on(socket: &OwnedFd, path: &Path, destination: SocketAddr) -> Result<(), Errno> {
    rustix::net::connect(socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::send(socket, encode_query(destination).as_bytes(), SendFlags::NOSIGNAL).map(|_| ())
}

/// Receives the response to a query without waiting. Returns `None` if it has not arrived.
pub fn receive_response(query: BorrowedFd<'_>) -> Option<ListenerResponse> {
    let mut packet = [0_u8; PACKET_BYTES_MAX];
    match rustix::net::recv(query, &mut packet, RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN | Errno::INTR) => None,
        Ok((length, _)) => Some(
            ListenerResponse::decode(&packet[..length])
                .unwrap_or(ListenerResponse::Unavailable(FallbackReason::LinkDown)),
        ),
        Err(_) => Some(ListenerResponse::Unavailable(FallbackReason::LinkDown)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn queries_and_responses_survive_encoding() {
        let destination = address("127.77.0.2:6379");
        assert_eq!(decode_query(encode_query(destination).as_bytes()), Some(destination));
        let ready = ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() };
        let answers = FallbackReason::ALL.iter().map(|reason| ListenerResponse::Unavailable(*reason)).chain([ready]);
        for answer in answers {
            assert_eq!(ListenerResponse::decode(answer.encode().as_bytes()), Some(answer));
        }
    }

    proptest! {
        #[test]
        fn other_packets_are_not_responses(packet in prop::collection::vec(any::<u8>(), 0..40)) {
            let known = ListenerResponse::decode(&packet);
            prop_assert!(known.is_none_or(|answer| answer.encode().as_bytes() == packet));
            let _ = decode_query(&packet);
        }
    }

    #[test]
    fn a_rack_without_a_monitor_is_recognized_and_a_dead_monitor_counts_as_a_link_that_is_down() {
        let rack = tempfile::tempdir().unwrap();
        assert!(!has_monitor(rack.path()));
        drop(std::os::unix::net::UnixListener::bind(rack.path().join(SOCKET_NAME)).unwrap());
        assert!(has_monitor(rack.path()));
        assert_eq!(send_query(rack.path(), address("127.77.0.2:80")).unwrap_err(), FallbackReason::LinkDown);
    }
}
