//! A netlink socket, with requests and answers as types of the library.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP,
    NLMSG_OVERRUN, NetlinkBuffer, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

/// The size of the receive buffer; the kernel's messages have at most 32 KiB.
const BUFFER_BYTES: usize = 64 << 10;
/// The size of the socket's receive queue: some ten thousand routes.
const QUEUE_BYTES: usize = 32 << 20;
/// The time to wait for an answer. The kernel answers at once, so a missing answer is lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The size of the header of a message.
const NETLINK_HEADER_BYTES: usize = 16;
/// The largest number of attempts of a dump while the tables change.
const DUMPS_MAX: u32 = 8;

/// An error of netlink.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// A socket operation failed.
    #[error("netlink: {doing}: {source}")]
    Socket {
        /// The operation.
        doing: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel refused a request.
    #[error("netlink: the kernel refused {request}: {source}")]
    Refused {
        /// The request.
        request: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The header of a message of the kernel could not be parsed.
    #[error("netlink: cannot parse a header: {reason}; is the kernel newer than this program?")]
    Malformed {
        /// The error of the parser.
        reason: String,
    },
    /// The kernel does not report the hops of routes with next-hop objects.
    #[error(
        "net.ipv4.nexthop_compat_mode is 0, so that routes with next-hop objects are reported without hops; set it to 1"
    )]
    HopsHidden,
}

impl NetlinkError {
    pub(super) fn socket(doing: &'static str) -> impl FnOnce(Errno) -> NetlinkError {
        move |source| NetlinkError::Socket { doing, source: source.into() }
    }
}

/// A message of the kernel whose payload is not yet parsed.
pub(crate) struct Raw<'a> {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    bytes: &'a [u8],
}

impl Raw<'_> {
    pub fn read(&self) -> Result<RouteNetlinkMessage, DecodeError> {
        let mut header = NetlinkHeader::default();
        header.message_type = self.kind;
        RouteNetlinkMessage::deserialize(&header, self.bytes)
    }

    /// Returns the error of an `NLMSG_ERROR` or `NLMSG_DONE`; 0 means success.
    pub fn error(&self) -> i32 {
        self.bytes.first_chunk().map_or(0, |code| -i32::from_ne_bytes(*code))
    }
}

pub(crate) struct Socket {
    fd: OwnedFd,
    buffer: Vec<u8>,
    sequence: u32,
    unreadable: u64,
}

impl Socket {
    /// Opens a socket that subscribes to the event groups of the bit mask `groups`.
    pub fn open(groups: u32) -> Result<Socket, NetlinkError> {
        // Protocol 0 of netlink is NETLINK_ROUTE.
        Socket::open_protocol(None, groups)
    }

    /// Like [`Socket::open`], for another protocol of netlink.
    pub fn open_protocol(protocol: Option<Protocol>, groups: u32) -> Result<Socket, NetlinkError> {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)
            .map_err(NetlinkError::socket("opening a socket"))?;
        // Exceeds the system's limit if permitted; a smaller queue only causes more resynchronizations.
        if sockopt::set_socket_recv_buffer_size_force(&fd, QUEUE_BYTES).is_err() {
            sockopt::set_socket_recv_buffer_size(&fd, QUEUE_BYTES)
                .map_err(NetlinkError::socket("setting the queue size"))?;
        }
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(ANSWER_TIMEOUT))
            .map_err(NetlinkError::socket("setting a time limit"))?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, groups)).map_err(NetlinkError::socket("joining groups"))?;
        Ok(Socket::of(fd))
    }

    pub(super) fn of(fd: OwnedFd) -> Socket {
        Socket { fd, buffer: vec![0; BUFFER_BYTES], sequence: 0, unreadable: 0 }
    }

    /// Returns the number of entries of dumps that could not be parsed.
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Appends a request to `bytes`, and returns its sequence number.
    pub fn write(&mut self, message: RouteNetlinkMessage, flags: u16, bytes: &mut Vec<u8>) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let start = bytes.len();
        bytes.resize(start + packet.buffer_len().next_multiple_of(4), 0);
        packet.serialize(&mut bytes[start..]);
        self.sequence
    }

    pub fn send(&self, bytes: &[u8]) -> Result<(), NetlinkError> {
        let sent = rustix::net::sendto(&self.fd, bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0));
        sent.map(|_| ()).map_err(NetlinkError::socket("sending a request"))
    }

    /// Waits, unless `flags` say otherwise, for messages of the kernel, and passes them to `each`.
    pub fn receive(
        &mut self,
        flags: RecvFlags,
        mut each: impl FnMut(Raw) -> Result<(), NetlinkError>,
    ) -> Result<(), ReceiveError> {
        let (_, bytes) = rustix::net::recv(&self.fd, self.buffer.as_mut_slice(), flags | RecvFlags::TRUNC)?;
        if bytes > self.buffer.len() {
            return Err(ReceiveError::Lost);
        }
        let mut rest = &self.buffer[..bytes];
        while !rest.is_empty() {
            let message = NetlinkBuffer::new_checked(rest).map_err(malformed)?;
            let consumed = (message.length() as usize).next_multiple_of(4).min(rest.len());
            each(Raw {
                kind: message.message_type(),
                flags: message.flags(),
                sequence: message.sequence_number(),
                bytes: message.payload(),
            })?;
            rest = &rest[consumed..];
        }
        Ok(())
    }

    /// Dumps a table and passes each entry to `each`; if the table changed during the dump, calls `restart` and dumps
    /// again. An entry that cannot be parsed is skipped and counted. Returns whether the table did not change during
    /// the last dump, as far as the kernel reports it.
    pub fn dump<T>(
        &mut self,
        request: &RouteNetlinkMessage,
        table: &mut T,
        restart: impl Fn(&mut T),
        mut each: impl FnMut(&mut T, RouteNetlinkMessage),
    ) -> Result<bool, NetlinkError> {
        for _ in 0..DUMPS_MAX {
            restart(table);
            if self.dump_once(request, &mut |message| each(table, message))? {
                return Ok(true);
            }
        }
        // The table is still changing: the changes arrive as events, and are applied to the dumped state.
        Ok(false)
    }

    /// Sends a request that is not a dump, and returns the answer, if it can be parsed.
    pub fn ask(&mut self, request: RouteNetlinkMessage) -> Result<Option<RouteNetlinkMessage>, NetlinkError> {
        let (mut bytes, mut answer) = (Vec::new(), None);
        // The acknowledgement ends the answers, as the end of a dump does.
        let sequence = self.write(request, NLM_F_ACK, &mut bytes);
        self.send(&bytes)?;
        self.receive_dump(sequence, &mut |raw| answer = raw.read().ok())?;
        Ok(answer)
    }

    /// Dumps a table of another netlink family: sends a request of this kind and contents, and passes the contents of
    /// each answer to `each`; if the table changed during the dump, calls `restart` and dumps again.
    pub fn dump_raw<T>(
        &mut self,
        kind: u16,
        request: &[u8],
        table: &mut T,
        restart: impl Fn(&mut T),
        mut each: impl FnMut(&mut T, &[u8]),
    ) -> Result<(), NetlinkError> {
        for _ in 0..DUMPS_MAX {
            restart(table);
            let sequence = self.send_raw(kind, NLM_F_DUMP, request)?;
            if self.receive_dump(sequence, &mut |raw| each(table, raw.bytes))? {
                break;
            }
        }
        Ok(())
    }

    /// Sends a request of another netlink family that is not a dump, and passes the contents of each answer to `each`.
    pub fn ask_raw(&mut self, kind: u16, request: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), NetlinkError> {
        // The acknowledgement ends the answers, as the end of a dump does.
        let sequence = self.send_raw(kind, NLM_F_ACK, request)?;
        self.receive_dump(sequence, &mut |raw| each(raw.bytes)).map(|_| ())
    }

    /// Sends a request of another netlink family, and returns its sequence number.
    fn send_raw(&mut self, kind: u16, flags: u16, request: &[u8]) -> Result<u32, NetlinkError> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut bytes = vec![0; NETLINK_HEADER_BYTES];
        let mut header = NetlinkHeader::default();
        header.length = (NETLINK_HEADER_BYTES + request.len()) as u32;
        header.message_type = kind;
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        header.emit(&mut bytes);
        bytes.extend_from_slice(request);
        self.send(&bytes)?;
        Ok(self.sequence)
    }

    /// Dumps a table once, and returns whether it did not change during the dump.
    fn dump_once(
        &mut self,
        request: &RouteNetlinkMessage,
        each: &mut dyn FnMut(RouteNetlinkMessage),
    ) -> Result<bool, NetlinkError> {
        let mut bytes = Vec::new();
        let sequence = self.write(request.clone(), NLM_F_DUMP, &mut bytes);
        self.send(&bytes)?;
        let mut unreadable = 0;
        let is_consistent = self.receive_dump(sequence, &mut |raw| match raw.read() {
            Ok(message) => each(message),
            Err(_) => unreadable += 1,
        })?;
        self.unreadable += unreadable;
        Ok(is_consistent)
    }

    /// Receives a dump, and returns whether the table did not change during it.
    fn receive_dump(&mut self, sequence: u32, each: &mut dyn FnMut(Raw)) -> Result<bool, NetlinkError> {
        let (mut is_done, mut is_consistent) = (false, true);
        while !is_done {
            let received = self.receive(RecvFlags::empty(), |raw| {
                if raw.sequence != sequence {
                    return Ok(());
                }
                is_consistent &= raw.flags & NLM_F_DUMP_INTR == 0;
                match raw.kind {
                    NLMSG_DONE | NLMSG_ERROR if raw.error() != 0 => return Err(refused("a dump", raw.error())),
                    NLMSG_DONE | NLMSG_ERROR => is_done = true,
                    NLMSG_NOOP | NLMSG_OVERRUN => {}
                    _ => each(raw),
                }
                Ok(())
            });
            received.map_err(|error| error.while_doing("waiting for a dump"))?;
        }
        Ok(is_consistent)
    }
}

pub(super) fn refused(request: impl Into<String>, error: i32) -> NetlinkError {
    NetlinkError::Refused { request: request.into(), source: io::Error::from_raw_os_error(error) }
}

fn malformed(error: DecodeError) -> NetlinkError {
    NetlinkError::Malformed { reason: format!("{error}") }
}

/// The reason why nothing was received.
pub(crate) enum ReceiveError {
    /// No message is queued.
    Empty,
    /// Messages were lost.
    Lost,
    /// Another error.
    Failed(NetlinkError),
}

impl ReceiveError {
    /// Converts the error for a socket that only receives answers, on which neither silence nor loss is expected.
    pub fn while_doing(self, doing: &'static str) -> NetlinkError {
        match self {
            ReceiveError::Empty => NetlinkError::socket(doing)(Errno::TIMEDOUT),
            ReceiveError::Lost => NetlinkError::socket(doing)(Errno::NOBUFS),
            ReceiveError::Failed(error) => error,
        }
    }
}

impl From<Errno> for ReceiveError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::AGAIN | Errno::INTR => ReceiveError::Empty,
            Errno::NOBUFS => ReceiveError::Lost,
            _ => ReceiveError::Failed(NetlinkError::socket("receiving")(errno)),
        }
    }
}

impl From<NetlinkError> for ReceiveError {
    fn from(error: NetlinkError) -> Self {
        ReceiveError::Failed(error)
    }
}
