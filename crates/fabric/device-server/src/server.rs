//! The event loop: accepts clients, notices disconnections, sends queued messages.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags};

use crate::clients::{Clients, Dropped};
use crate::error::Error;
use crate::limits::CLIENTS_MAX;
use crate::listener::{self, BoundSocket};
use crate::options::Options;
use crate::send_queue::SendError;
use crate::{descriptor_limit, memory};

/// Maximum number of clients accepted per iteration, before the others are polled again.
const ACCEPTS_MAX: usize = 16;
/// Pause before the next `accept` after the kernel ran out of resources for a new client.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// A server with its socket and its memory. Clients can connect, and get responses once it runs.
#[derive(Debug)]
pub struct Server {
    socket: BoundSocket,
    memory: OwnedFd,
    vectors: u32,
}

/// An event, for a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A client has connected.
    Connected {
        /// ID of the client.
        id: u16,
    },
    /// A client has closed its socket, or was killed.
    Disconnected {
        /// ID of the client.
        id: u16,
    },
    /// A client was dropped.
    Dropped {
        /// ID of the client.
        id: u16,
        /// The reason.
        why: String,
    },
    /// A client was refused.
    Refused {
        /// The reason.
        why: String,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { id } => write!(formatter, "client {id} connected"),
            Self::Disconnected { id } => write!(formatter, "client {id} disconnected"),
            Self::Dropped { id, why } => write!(formatter, "client {id} dropped: {why}"),
            Self::Refused { why } => write!(formatter, "a client was refused: {why}"),
        }
    }
}

/// A server in a thread of its own. Dropping it ends the server; clients keep the memory that they have mapped.
#[derive(Debug)]
pub struct ServerThread {
    stop: OwnedFd,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Server {
    /// Binds the socket and makes the memory. Leaves nothing behind on an error.
    pub fn bind(options: &Options) -> Result<Self, Error> {
        descriptor_limit::raise(options.vectors)?;
        let socket = listener::bind(&options.socket)?;
        let memory = memory::create(options.size_bytes)?;
        Ok(Self { socket, memory, vectors: options.vectors })
    }

    /// The memory that all clients receive.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Path of the socket.
    pub fn socket(&self) -> &Path {
        self.socket.path()
    }

    /// Serves until `stop` is readable, then removes the socket.
    pub fn run(self, stop: BorrowedFd<'_>, on_event: &mut dyn FnMut(&Event)) -> Result<(), Error> {
        let clients = Clients::new(self.memory, self.vectors);
        Loop { socket: self.socket, clients, accept_from: None, on_event }.run(stop)
    }

    /// Serves in a thread of its own.
    pub fn start(self, mut on_event: impl FnMut(&Event) + Send + 'static) -> Result<ServerThread, Error> {
        let failed = |errno| Error::Wait { errno };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?;
        let stop_of_thread =
            stop.try_clone().map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let thread = std::thread::spawn(move || self.run(stop_of_thread.as_fd(), &mut on_event));
        Ok(ServerThread { stop, thread: Some(thread) })
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Loop<'a> {
    socket: BoundSocket,
    clients: Clients,
    /// When `accept` is called again; `None`: now.
    accept_from: Option<Instant>,
    on_event: &'a mut dyn FnMut(&Event),
}

/// What one poll returned.
#[derive(Default)]
struct Ready {
    stop: bool,
    acceptable: bool,
    readable: Vec<u16>,
    writable: Vec<u16>,
}

impl Loop<'_> {
    fn run(mut self, stop: BorrowedFd<'_>) -> Result<(), Error> {
        loop {
            let ready = self.wait(stop)?;
            if ready.stop {
                return Ok(());
            }
            for id in ready.readable {
                self.handle_readable(id);
            }
            for id in ready.writable {
                if let Err(error) = self.clients.flush(id) {
                    self.drop_client(id, error);
                }
            }
            if ready.acceptable {
                self.accept();
            }
        }
    }

    fn wait(&mut self, stop: BorrowedFd<'_>) -> Result<Ready, Error> {
        let pause = self.accept_from.map(|from| from.saturating_duration_since(Instant::now()));
        let pause = pause.filter(|pause| !pause.is_zero());
        let timeout = pause.map(|pause| Timespec::try_from(pause).expect("a second at most"));
        let acceptable = if pause.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut ids = Vec::new();
        let mut polled =
            vec![PollFd::from_borrowed_fd(stop, PollFlags::IN), PollFd::new(self.socket.listener(), acceptable)];
        for (id, socket, has_more) in self.clients.sockets() {
            let writable = if has_more { PollFlags::OUT } else { PollFlags::empty() };
            polled.push(PollFd::from_borrowed_fd(socket, PollFlags::IN | writable));
            ids.push(id);
        }
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Ready::default()),
            Err(errno) => return Err(Error::Wait { errno }),
        }
        let mut ready = Ready { stop: !polled[0].revents().is_empty(), ..Ready::default() };
        ready.acceptable = !polled[1].revents().is_empty();
        for (id, polled) in ids.into_iter().zip(&polled[2..]) {
            if polled.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                ready.readable.push(id);
            } else if polled.revents().contains(PollFlags::OUT) {
                ready.writable.push(id);
            }
        }
        Ok(ready)
    }

    /// Handles a readable client. Clients never send, so it has disconnected or violates the protocol.
    fn handle_readable(&mut self, id: u16) {
        let Some(socket) = self.clients.socket(id) else { return };
        let event = match peek(socket) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(0) | Err(Errno::CONNRESET) => Event::Disconnected { id },
            Ok(_) => Event::Dropped { id, why: "it sent data, which clients never do".to_owned() },
            Err(errno) => Event::Dropped { id, why: errno.to_string() },
        };
        (self.on_event)(&event);
        let dropped = self.clients.remove(id);
        self.report(dropped);
    }

    fn drop_client(&mut self, id: u16, error: SendError) {
        let mut dropped = vec![(id, error)];
        dropped.extend(self.clients.remove(id));
        self.report(dropped);
    }

    fn report(&mut self, dropped: Vec<Dropped>) {
        for (id, error) in dropped {
            let event = match error {
                SendError::Full => Event::Dropped { id, why: "it does not read, and its queue is full".to_owned() },
                SendError::Broken(Errno::PIPE | Errno::CONNRESET) => Event::Disconnected { id },
                SendError::Broken(errno) => Event::Dropped { id, why: errno.to_string() },
            };
            (self.on_event)(&event);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(self.socket.listener(), flags) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return self.pause(errno),
            }
        }
    }

    /// Pauses accepting: the client stays in the backlog, where it would wake the loop again immediately.
    fn pause(&mut self, errno: Errno) {
        self.accept_from = Some(Instant::now() + ACCEPT_PAUSE);
        (self.on_event)(&Event::Refused { why: format!("{errno}; trying again in {} s", ACCEPT_PAUSE.as_secs()) });
    }

    fn admit(&mut self, socket: OwnedFd) {
        // It has disconnected already, so it is not announced.
        if peek(socket.as_fd()) == Ok(0) {
            return;
        }
        if let Some(foreign_user) = foreign_user(&socket) {
            return (self.on_event)(&Event::Refused {
                why: format!("user {foreign_user} is neither root nor the server's user"),
            });
        }
        if self.clients.is_full() {
            return (self.on_event)(&Event::Refused {
                why: format!("{CLIENTS_MAX} clients are connected, which is the maximum"),
            });
        }
        match self.clients.admit(socket) {
            Ok((id, dropped)) => {
                (self.on_event)(&Event::Connected { id });
                self.report(dropped);
            }
            Err(errno) => (self.on_event)(&Event::Refused { why: errno.to_string() }),
        }
    }
}

/// Returns the user of a client that is neither root nor this process's user. The mode of the socket may have been
/// changed.
fn foreign_user(socket: &OwnedFd) -> Option<u32> {
    // A socket without peer credentials counts as a foreign user's.
    let user = rustix::net::sockopt::socket_peercred(socket).map_or(u32::MAX, |peer| peer.uid.as_raw());
    (user != 0 && user != rustix::process::geteuid().as_raw()).then_some(user)
}

/// Peeks at what a client has sent: 0 bytes if it has closed its socket.
fn peek(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut byte = [0_u8];
    rustix::net::recv(socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT).map(|(length, _)| length)
}
