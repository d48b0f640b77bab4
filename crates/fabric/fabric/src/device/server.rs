//! A client of an ivshmem server: QEMU's protocol over a unix socket (docs/specs/ivshmem-spec of QEMU).
//!
//! The server only ever sends: numbers of 8 bytes, little endian, some with a descriptor. First the protocol's version,
//! this client's number, and -1 with the memory; then for each other client, and at last for this one, its number with
//! an eventfd, once for each vector. Later on, clients that come are announced the same way, and ones that go by
//! their number alone.
//!
//! The server is trusted with the memory, as its owner is root or the user of this process. It is not trusted to make
//! sense: numbers and counts are bounded, and what is too much is closed.

use super::bell::{Identity, Kicks};
use super::layout::VECTORS_MAX;
use super::{Caching, Found, Problem, file};
use crate::eventfd;
use rustix::event::PollFlags;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROTOCOL_VERSION: i64 = 0;
const MEMORY: i64 = -1;
const MESSAGE_BYTES: usize = size_of::<i64>();

/// How long a server may take to say all that a client needs.
const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Messages heard at a time, at most: a server that never stops holds nobody up.
const MESSAGES_MAX: usize = 4096;

/// Descriptors of one message that are looked at, at most; the kernel closes the rest.
const DESCRIPTORS_MAX: usize = 4;

/// What a client learns from a server after the setup.
#[derive(Debug)]
pub(super) enum News {
    /// Another bell of a client.
    Bells(Identity),
    /// A client has gone.
    Gone(Identity),
    /// The server has gone.
    ServerGone,
}

/// A number, and the descriptor that came with it.
type Message = (i64, Option<OwnedFd>);

/// The client's end of the socket.
#[derive(Debug)]
pub(super) struct Client {
    stream: Arc<OwnedFd>,
    is_server_gone: bool,
    own: Identity,
    partial: [u8; MESSAGE_BYTES],
    partial_bytes: usize,
    descriptor: Option<OwnedFd>,
}

/// Connects, and hears the server out until this client has its memory and `vectors` bells.
pub(super) fn connect(path: &Path, vectors: usize) -> Result<Found, Problem> {
    if !(1..=VECTORS_MAX).contains(&vectors) {
        return Err(Problem::unfit(format!("{vectors} bells asked for"), format!("use 1 to {VECTORS_MAX}")));
    }
    let stream = UnixStream::connect(path).map_err(Problem::system("connect (is 'crosslane device-server' up?)"))?;
    stream.set_nonblocking(true).map_err(Problem::system("fcntl O_NONBLOCK"))?;
    let owner = socket_peercred(&stream).map_err(Problem::system("getsockopt SO_PEERCRED"))?;
    file::check_owner(owner.uid.as_raw(), 0, 0)?;
    let mut client = Client::new(stream.into());
    let deadline = Instant::now() + SETUP_TIMEOUT;
    let descriptor = client.begin(deadline)?;
    let mut kicks = Kicks { identity: Some(client.own), ..Kicks::default() };
    while kicks.own.len() < vectors {
        match client.await_message(deadline)? {
            Some((number, Some(bell))) if number == i64::from(client.own) => kicks.own.push(checked_bell(bell)?),
            Some(message) => _ = client.note(message, &kicks)?,
            None => return Err(too_few_bells(kicks.own.len(), vectors)),
        }
    }
    let len_bytes = fstat(&descriptor).map_err(Problem::system("fstat of the server's memory"))?.st_size as u64;
    Ok(Found {
        name: path.display().to_string(),
        caching: Caching::Cached,
        descriptor,
        offset_bytes: 0,
        len_bytes,
        lending_obstacle: None,
        kicks,
        registers: None,
        server: Some(client),
        keepers: Vec::new(),
    })
}

fn too_few_bells(found: usize, vectors: usize) -> Problem {
    let found = format!("the server gave {found} of {vectors} bells");
    Problem::unfit(found, format!("start it with at least {vectors} vectors, or use fewer partitions"))
}

fn nonsense(found: impl std::fmt::Display) -> Problem {
    Problem::unfit(format!("the server said {found}"), "is it an ivshmem server, as 'crosslane device-server' is?")
}

fn checked_bell(bell: OwnedFd) -> Result<OwnedFd, Problem> {
    let name = eventfd::kernel_name(&bell).map_err(Problem::system("readlink of /proc/self/fd"))?;
    if eventfd::is_name_of_eventfd(&name) { Ok(bell) } else { Err(nonsense(format!("a bell that is {name:?}"))) }
}

impl Client {
    fn new(stream: OwnedFd) -> Self {
        Self {
            stream: Arc::new(stream),
            is_server_gone: false,
            own: 0,
            partial: [0; MESSAGE_BYTES],
            partial_bytes: 0,
            descriptor: None,
        }
    }

    /// Version, number and memory.
    fn begin(&mut self, deadline: Instant) -> Result<OwnedFd, Problem> {
        let mut next = || self.await_message(deadline)?.ok_or_else(|| nonsense("too little, then nothing for long"));
        match next()? {
            (PROTOCOL_VERSION, _) => {}
            (version, _) => return Err(nonsense(format!("protocol version {version}, not {PROTOCOL_VERSION}"))),
        }
        let (number, _) = next()?;
        let memory = match next()? {
            (MEMORY, Some(memory)) => memory,
            (number, _) => return Err(nonsense(format!("{number} where the memory was due"))),
        };
        self.own = Identity::try_from(number).map_err(|_| nonsense(format!("client number {number}")))?;
        file::check_seals(&memory)?;
        Ok(memory)
    }

    /// The next message, none if it does not come in time.
    fn await_message(&mut self, deadline: Instant) -> Result<Option<Message>, Problem> {
        loop {
            if let Some(message) = self.next_message()? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(None);
            }
            // Ready, late or interrupted: the next turn sees which.
            let _ = eventfd::poll_for(&self.stream, PollFlags::IN, Some(left));
        }
    }

    /// The next message if it is there, without waiting.
    fn next_message(&mut self) -> Result<Option<Message>, Problem> {
        while self.partial_bytes < MESSAGE_BYTES {
            match self.receive() {
                Ok(0) => return Err(nonsense("good-bye")),
                Ok(received) => self.partial_bytes += received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Problem::system("recvmsg")(errno)),
            }
        }
        self.partial_bytes = 0;
        Ok(Some((i64::from_le_bytes(self.partial), self.descriptor.take())))
    }

    /// More bytes of the message that has begun, and the descriptor with it.
    fn receive(&mut self) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut self.partial[self.partial_bytes..])];
        let received = recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptor = descriptors.last().or(self.descriptor.take());
            }
        }
        Ok(received.bytes)
    }

    /// What a message after the setup means.
    fn note(&self, (number, descriptor): Message, kicks: &Kicks) -> Result<Option<News>, Problem> {
        let identity = Identity::try_from(number).map_err(|_| nonsense(format!("client number {number}")))?;
        match descriptor {
            // More bells of this client than it asked for.
            Some(_) if identity == self.own => Ok(None),
            Some(bell) => {
                kicks.add(identity, checked_bell(bell)?);
                Ok(Some(News::Bells(identity)))
            }
            None => {
                kicks.remove(identity);
                Ok(Some(News::Gone(identity)))
            }
        }
    }

    /// All that the server has said since. A server that stops making sense is left, and said to be gone.
    pub(super) fn hear(&mut self, kicks: &Kicks) -> Vec<News> {
        let mut news = Vec::new();
        for _ in 0..MESSAGES_MAX {
            if self.is_server_gone {
                break;
            }
            match self.next_message().and_then(|message| message.map(|it| self.note(it, kicks)).transpose()) {
                Ok(None) => break,
                Ok(Some(noted)) => news.extend(noted),
                Err(_) => {
                    self.is_server_gone = true;
                    news.push(News::ServerGone);
                }
            }
        }
        news
    }

    /// The socket, for who polls it.
    pub(super) fn stream(&self) -> Arc<OwnedFd> {
        self.stream.clone()
    }
}
