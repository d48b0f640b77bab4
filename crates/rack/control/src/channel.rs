//! Messages in packets of a unix socket (SOCK_SEQPACKET).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
    socketpair, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Maximum size of a message in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of descriptors in one packet.
pub(crate) const DESCRIPTORS_MAX: usize = 200;
/// The kernel's maximum (`SCM_MAX_FD`). Packets are received with room for it: the kernel itself closes what does not
/// fit.
const RIGHTS_MAX: usize = 253;

/// Why a message could not be sent or parsed.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// A system call failed.
    #[error("{call}: {error}")]
    System {
        /// The system call.
        call: &'static str,
        /// The error of the kernel.
        error: io::Error,
    },
    /// The message exceeds the maximum size.
    #[error("message of {bytes} bytes: at most {MESSAGE_BYTES_MAX}")]
    TooLarge {
        /// Size of the message.
        bytes: usize,
    },
    /// The packet is not a message of this version.
    #[error("not a message of this release: {reason}")]
    Malformed {
        /// The error of the parser.
        reason: String,
    },
}

fn failed(call: &'static str) -> impl Fn(Errno) -> ChannelError {
    move |errno| ChannelError::System { call, error: errno.into() }
}

/// The result of polling a channel.
#[derive(Debug)]
pub enum Received<M> {
    /// A message, and the descriptors that came with it.
    Message(M, Vec<OwnedFd>),
    /// No message is pending.
    Nothing,
    /// The peer has closed its endpoint.
    Ended,
}

/// An endpoint of a socket that preserves packet boundaries and order. Sending and receiving never block.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

pub(crate) const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl Channel {
    /// Creates a connected pair of endpoints.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn pair() -> Result<(Self, Self), ChannelError> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None);
        let (one, other) = pair.map_err(failed("socketpair"))?;
        Ok((Self::new(one), Self::new(other)))
    }

    /// Connects to a socket that listens at a path.
    ///
    /// # Errors
    /// The error of the kernel, such as `NotFound` or `ConnectionRefused`.
    pub fn connect(path: &Path) -> Result<Self, ChannelError> {
        let address = SocketAddrUnix::new(path).map_err(failed("address of the socket"))?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None).map_err(failed("socket"))?;
        connect(&socket, &address).map_err(failed("connect"))?;
        Ok(Self::new(socket))
    }

    /// Wraps an endpoint that was inherited or accepted.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Returns the descriptor, as for a child's standard input.
    pub fn into_descriptor(self) -> OwnedFd {
        self.socket
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the message is too large, the peer has closed its endpoint, or its receive queue is full.
    pub fn send<M: Serialize>(&self, message: &M, descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        let malformed = |error: serde_json::Error| ChannelError::Malformed { reason: error.to_string() };
        self.send_packet(&serde_json::to_vec(message).map_err(malformed)?, descriptors)
    }

    /// Sends a packet that is not a message of this crate.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn send_packet(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        if packet.len() > MESSAGE_BYTES_MAX {
            return Err(ChannelError::TooLarge { bytes: packet.len() });
        }
        assert!(descriptors.len() <= DESCRIPTORS_MAX, "{} descriptors in a packet", descriptors.len());
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let sent = sendmsg(&self.socket, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL);
        sent.map(|_| ()).map_err(failed("sendmsg"))
    }

    /// Receives the next message, if one is pending.
    ///
    /// # Errors
    /// If the packet is not a message.
    pub fn receive<M: DeserializeOwned>(&self) -> Result<Received<M>, ChannelError> {
        match self.receive_packet()? {
            Received::Message(packet, descriptors) => parse(&packet).map(|found| Received::Message(found, descriptors)),
            Received::Nothing => Ok(Received::Nothing),
            Received::Ended => Ok(Received::Ended),
        }
    }

    /// Receives the next packet without parsing it, if one is pending.
    ///
    /// # Errors
    /// If it exceeds the maximum size of a message, or the error of the kernel.
    pub fn receive_packet(&self) -> Result<Received<Vec<u8>>, ChannelError> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(RIGHTS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let found = match received {
            Ok(found) => found,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET) => return Ok(Received::Ended),
            Err(errno) => return Err(failed("recvmsg")(errno)),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                // The last close of a socket with a time for this option waits. Without a time it resets at once.
                descriptors.extend(some.inspect(|one| {
                    if sockopt::socket_linger(one).is_ok_and(|limit| limit.is_some_and(|limit| !limit.is_zero())) {
                        let _ = sockopt::set_socket_linger(one, None);
                    }
                }));
            }
        }
        if found.flags.contains(ReturnFlags::TRUNC) {
            return Err(ChannelError::TooLarge { bytes: MESSAGE_BYTES_MAX + 1 });
        }
        // Empty packets cannot be told from the end of the channel, and are never sent.
        if found.bytes == 0 {
            return Ok(Received::Ended);
        }
        bytes.truncate(found.bytes);
        Ok(Received::Message(bytes, descriptors))
    }
}

fn parse<M: DeserializeOwned>(packet: &[u8]) -> Result<M, ChannelError> {
    serde_json::from_slice(packet).map_err(|error| ChannelError::Malformed { reason: error.to_string() })
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the user of the peer of a connected unix socket.
///
/// # Errors
/// The error of the kernel.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    Ok(sockopt::socket_peercred(socket)?.uid.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_message_arrives_whole_with_its_descriptors() {
        let (one, other) = Channel::pair().unwrap();
        let (mut reader, mut writer) = io::pipe().unwrap();
        one.send(&"first", &[writer.as_fd()]).unwrap();
        one.send(&"second", &[]).unwrap();
        writer.write_all(b"x").unwrap();
        drop(writer);
        let Received::Message(text, descriptors) = other.receive::<String>().unwrap() else { panic!("nothing came") };
        assert_eq!((text.as_str(), descriptors.len()), ("first", 1));
        drop(descriptors);
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"x");
        let Received::Message(text, descriptors) = other.receive::<String>().unwrap() else { panic!("nothing came") };
        assert_eq!((text.as_str(), descriptors.len()), ("second", 0));
        assert!(matches!(other.receive::<String>(), Ok(Received::Nothing)));
        drop(one);
        assert!(matches!(other.receive::<String>(), Ok(Received::Ended)));
    }

    #[test]
    fn a_socket_that_resets_when_it_is_closed_still_does_after_it_was_passed() {
        let (one, other) = Channel::pair().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let passed = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        sockopt::set_socket_linger(&passed, Some(std::time::Duration::ZERO)).unwrap();
        one.send(&"socket", &[passed.as_fd()]).unwrap();
        drop(passed);
        let Received::Message(_, descriptors) = other.receive::<String>().unwrap() else { panic!("nothing came") };
        drop(descriptors);
        assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_malformed_packet_is_refused_and_the_next_message_arrives() {
        let (one, other) = Channel::pair().unwrap();
        one.send_packet(b"\xff{", &[]).unwrap();
        one.send(&7_u32, &[]).unwrap();
        assert!(matches!(other.receive::<u32>(), Err(ChannelError::Malformed { .. })));
        assert!(matches!(other.receive::<u32>(), Ok(Received::Message(7, _))));
        let large = vec![b' '; MESSAGE_BYTES_MAX + 1];
        assert!(matches!(one.send_packet(&large, &[]), Err(ChannelError::TooLarge { .. })));
        rustix::net::send(&one.socket, &large, SendFlags::empty()).unwrap();
        assert!(matches!(other.receive::<u32>(), Err(ChannelError::TooLarge { .. })));
    }

    #[test]
    fn a_receiver_that_does_not_read_does_not_block_the_sender() {
        let (one, _other) = Channel::pair().unwrap();
        let packet = vec![b'x'; MESSAGE_BYTES_MAX];
        let refused = (0..10_000).find_map(|_| one.send_packet(&packet, &[]).err());
        assert!(matches!(refused, Some(ChannelError::System { call: "sendmsg", .. })));
    }

    #[test]
    fn the_user_of_the_peer_is_known() {
        let (one, _other) = Channel::pair().unwrap();
        let own = std::fs::metadata("/proc/self").map(|found| std::os::unix::fs::MetadataExt::uid(&found)).unwrap();
        assert_eq!(peer_uid(&one).unwrap(), own);
    }
}
