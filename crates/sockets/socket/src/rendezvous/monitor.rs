//! Asking the monitor of this node about a listener of another.
//!
//! The monitor's socket lies at the top of the node's rack directory. One packet each way, text:
//!
//! ```text
//!   far 1 127.77.0.2:6379     is there such a listener?
//!   ready 127.77.0.1          yes, and this node's proxy stands in for it by now; this node's address
//!   no REASON                 no; REASON is a word of `FallbackReason`
//! ```

use std::ffi::OsStr;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use stats_page::FallbackReason;

use crate::descriptor::hidden::close;
use crate::rendezvous::directory::Rack;

/// Name of the monitor's socket in the rack directory.
pub const SOCKET_NAME: &str = "monitor.sock";
/// What a question begins with: the word, and the version of this exchange.
pub const QUERY_PREFIX: &str = "far 1 ";
/// Bytes of a question or an answer at most.
pub const PACKET_BYTES_MAX: usize = 256;
/// How long an answer may take: it crosses a link twice, and a machine under load keeps it waiting.
pub const RESPONSE_WAIT_NS: u64 = 3_000_000_000;

/// What the monitor says of a listener of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerResponse {
    /// It is there, and the proxy of this node stands in for it.
    Ready {
        /// This node's address, of the family that was asked for.
        node: IpAddr,
    },
    /// There is none to be had.
    Unavailable(FallbackReason),
}

impl ListenerResponse {
    /// The answer as it is sent.
    pub fn encode(&self) -> String {
        match self {
            Self::Ready { node } => format!("ready {node}"),
            Self::Unavailable(reason) => format!("no {reason}"),
        }
    }

    /// The answer in received bytes; nothing but what [`ListenerResponse::encode`] writes is one.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(packet).ok()?;
        if let Some(node) = text.strip_prefix("ready ") {
            return node.parse().ok().map(|node| Self::Ready { node });
        }
        let word = text.strip_prefix("no ")?;
        FallbackReason::ALL.iter().find(|reason| reason.name() == word).copied().map(Self::Unavailable)
    }
}

/// The question for a listener, as it is sent.
pub fn encode_query(destination: SocketAddr) -> String {
    format!("{QUERY_PREFIX}{destination}")
}

/// The listener that a question is about; `None` for anything that [`encode_query`] does not write.
pub fn decode_query(packet: &[u8]) -> Option<SocketAddr> {
    std::str::from_utf8(packet).ok()?.strip_prefix(QUERY_PREFIX)?.parse().ok()
}

/// Whether the rack directory is a node's that has a monitor, running or not.
pub fn has_monitor(rack: &Rack) -> bool {
    socket_path(rack).is_some_and(|path| rustix::fs::stat(&path).is_ok())
}

/// Asks. The answer comes to the descriptor, for [`receive_response`]; `None`: too many others are asking just now.
///
/// # Errors
/// Why nobody can be asked; [`FallbackReason::LinkDown`] where the monitor does not run.
pub fn send_query(rack: &Rack, destination: SocketAddr) -> Result<Option<OwnedFd>, FallbackReason> {
    let path = socket_path(rack).ok_or(FallbackReason::RackUnavailable)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|_| FallbackReason::ResourceLimit)?;
    match send_query_on(&socket, &path, destination) {
        Ok(()) => Ok(Some(socket)),
        Err(errno) => {
            close(socket);
            if errno == Errno::AGAIN { Ok(None) } else { Err(FallbackReason::LinkDown) }
        }
    }
}

fn send_query_on(socket: &OwnedFd, path: &PathBuf, destination: SocketAddr) -> Result<(), Errno> {
    rustix::net::connect(socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::send(socket, encode_query(destination).as_bytes(), SendFlags::NOSIGNAL).map(|_| ())
}

/// The answer to a question, without waiting. `None`: it is not there yet.
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

/// At the top of the rack directory, two levels above the names of one network namespace.
fn socket_path(rack: &Rack) -> Option<PathBuf> {
    let top = rack.path().parent()?.parent()?;
    Some(top.join(OsStr::from_bytes(SOCKET_NAME.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::directory::tests::Scratch;
    use proptest::prelude::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn questions_and_answers_survive_the_way() {
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
        fn other_packets_are_no_answers(packet in prop::collection::vec(any::<u8>(), 0..40)) {
            let known = ListenerResponse::decode(&packet);
            prop_assert!(known.is_none_or(|answer| answer.encode().as_bytes() == packet));
            let _ = decode_query(&packet);
        }
    }

    #[test]
    fn a_rack_without_a_monitor_says_so_and_a_dead_one_means_that_the_link_is_down() {
        let scratch = Scratch::new();
        let rack = scratch.rack();
        assert!(!has_monitor(&rack));
        let path = socket_path(&rack).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(has_monitor(&rack));
        assert_eq!(send_query(&rack, address("127.77.0.2:80")).unwrap_err(), FallbackReason::LinkDown);
    }
}
