//! The loop: who comes, who goes, who can be told more.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags};

use crate::clients::{Clients, Dropped};
use crate::outbox::Stop;
use crate::place::{self, Place};
use crate::{CLIENTS_MAX, Error, Options, limits, memory};

/// Clients taken in before the others are looked at again.
const ACCEPTS_MAX: usize = 16;
/// How long nobody is taken in after the kernel had nothing left for a new one.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// A server that has its socket and its memory: clients can connect, and are answered once it runs.
#[derive(Debug)]
pub struct Server {
    place: Place,
    memory: OwnedFd,
    vectors: u32,
}

/// Something that happened, for a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A client is connected.
    Came {
        /// Its id.
        id: u16,
    },
    /// A client closed its socket, or died.
    Went {
        /// Its id.
        id: u16,
    },
    /// A client was dropped.
    Dropped {
        /// Its id.
        id: u16,
        /// Why, in words.
        why: String,
    },
    /// Somebody was not taken in.
    Refused {
        /// Why, in words.
        why: String,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Came { id } => write!(formatter, "client {id} came"),
            Self::Went { id } => write!(formatter, "client {id} went"),
            Self::Dropped { id, why } => write!(formatter, "client {id} dropped: {why}"),
            Self::Refused { why } => write!(formatter, "a client was refused: {why}"),
        }
    }
}

/// A server in a thread of its own. Dropping it ends the server; clients keep the memory they have mapped.
#[derive(Debug)]
pub struct Running {
    stop: OwnedFd,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Server {
    /// Takes the place and makes the memory, or leaves nothing behind.
    pub fn bind(options: &Options) -> Result<Self, Error> {
        limits::ensure(options.vectors)?;
        let place = place::claim(&options.socket)?;
        let memory = memory::create(options.size_bytes)?;
        Ok(Self { place, memory, vectors: options.vectors })
    }

    /// The memory that all clients get.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        self.place.path()
    }

    /// Serves until `stop` is readable, then gives its place back.
    pub fn run(self, stop: BorrowedFd<'_>, on_event: &mut dyn FnMut(&Event)) -> Result<(), Error> {
        let clients = Clients::new(self.memory, self.vectors);
        Loop { place: self.place, clients, accept_from: None, on_event }.run(stop)
    }

    /// The same in a thread of its own.
    pub fn start(self, mut on_event: impl FnMut(&Event) + Send + 'static) -> Result<Running, Error> {
        let failed = |errno| Error::Wait { errno };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?;
        let heard = stop.try_clone().map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let thread = std::thread::spawn(move || self.run(heard.as_fd(), &mut on_event));
        Ok(Running { stop, thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Loop<'a> {
    place: Place,
    clients: Clients,
    /// When newcomers are looked at again; now, without one.
    accept_from: Option<Instant>,
    on_event: &'a mut dyn FnMut(&Event),
}

/// What one wait brought.
#[derive(Default)]
struct Ready {
    stop: bool,
    newcomers: bool,
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
                self.hear(id);
            }
            for id in ready.writable {
                if let Err(stop) = self.clients.flush(id) {
                    self.drop_client(id, stop);
                }
            }
            if ready.newcomers {
                self.accept();
            }
        }
    }

    fn wait(&mut self, stop: BorrowedFd<'_>) -> Result<Ready, Error> {
        let pause = self.accept_from.map(|from| from.saturating_duration_since(Instant::now()));
        let pause = pause.filter(|pause| !pause.is_zero());
        let timeout = pause.map(|pause| Timespec::try_from(pause).expect("a second at most"));
        let newcomers = if pause.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut ids = Vec::new();
        let mut polled =
            vec![PollFd::from_borrowed_fd(stop, PollFlags::IN), PollFd::new(self.place.listener(), newcomers)];
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
        ready.newcomers = !polled[1].revents().is_empty();
        for (id, polled) in ids.into_iter().zip(&polled[2..]) {
            if polled.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                ready.readable.push(id);
            } else if polled.revents().contains(PollFlags::OUT) {
                ready.writable.push(id);
            }
        }
        Ok(ready)
    }

    /// A client has nothing to say: it has gone, or it is no client.
    fn hear(&mut self, id: u16) {
        let Some(socket) = self.clients.socket(id) else { return };
        let event = match look(socket) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(0) | Err(Errno::CONNRESET) => Event::Went { id },
            Ok(_) => Event::Dropped { id, why: "it wrote, and clients only listen".to_owned() },
            Err(errno) => Event::Dropped { id, why: errno.to_string() },
        };
        (self.on_event)(&event);
        let dropped = self.clients.remove(id);
        self.report(dropped);
    }

    fn drop_client(&mut self, id: u16, stop: Stop) {
        let mut dropped = vec![(id, stop)];
        dropped.extend(self.clients.remove(id));
        self.report(dropped);
    }

    fn report(&mut self, dropped: Vec<Dropped>) {
        for (id, stop) in dropped {
            let event = match stop {
                Stop::Full => Event::Dropped { id, why: "it does not read, and its queue is full".to_owned() },
                Stop::Broken(Errno::PIPE | Errno::CONNRESET) => Event::Went { id },
                Stop::Broken(errno) => Event::Dropped { id, why: errno.to_string() },
            };
            (self.on_event)(&event);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(self.place.listener(), flags) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return self.pause(errno),
            }
        }
    }

    /// The newcomer stays in the queue, where it would wake us again at once.
    fn pause(&mut self, errno: Errno) {
        self.accept_from = Some(Instant::now() + ACCEPT_PAUSE);
        (self.on_event)(&Event::Refused { why: format!("{errno}; trying again in {} s", ACCEPT_PAUSE.as_secs()) });
    }

    fn admit(&mut self, socket: OwnedFd) {
        // It did not even wait for an answer: nobody needs to hear of it.
        if look(socket.as_fd()) == Ok(0) {
            return;
        }
        if let Some(stranger) = stranger(&socket) {
            return (self.on_event)(&Event::Refused { why: format!("user {stranger} is not this server's") });
        }
        if self.clients.is_full() {
            return (self.on_event)(&Event::Refused { why: format!("{CLIENTS_MAX} are here, no more can be") });
        }
        match self.clients.admit(socket) {
            Ok((id, dropped)) => {
                (self.on_event)(&Event::Came { id });
                self.report(dropped);
            }
            Err(errno) => (self.on_event)(&Event::Refused { why: errno.to_string() }),
        }
    }
}

/// The user at a socket's other end, who is neither root nor this process's: the name's mode may have been changed.
fn stranger(socket: &OwnedFd) -> Option<u32> {
    // A socket that does not say who is there is nobody's.
    let user = rustix::net::sockopt::socket_peercred(socket).map_or(u32::MAX, |peer| peer.uid.as_raw());
    (user != 0 && user != rustix::process::geteuid().as_raw()).then_some(user)
}

/// What a socket's other end has written, without taking it: 0 bytes when it is closed.
fn look(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut byte = [0_u8];
    rustix::net::recv(socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT).map(|(length, _)| length)
}
