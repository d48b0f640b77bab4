//! Requests to the monitors of a rack, and handles of the processes behind its sockets.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use control::command::Versioned;
use control::monitor::{Request, Response, Status, VERSION};
use control::{Channel, ChannelError, Received};
use rack::NodeRunDir;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Time limit for an answer. A server answers within a millisecond unless the machine is overloaded.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for a process to exit by itself before it is killed.
pub const END_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the kernel to end a killed process.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// A monitor or a router node, and where it listens and logs.
pub struct Server {
    /// `monitor` or `node`.
    pub kind: &'static str,
    /// Its socket.
    pub socket: PathBuf,
    /// Its log file.
    pub log: PathBuf,
}

impl Server {
    /// Sends a request and returns the answer, or `None` when the server does not run.
    pub fn request<R: Serialize, A: DeserializeOwned>(&self, request: &Versioned<R>) -> Result<Option<(A, Channel)>> {
        Ok(self.request_descriptors(request)?.map(|(answer, _, channel)| (answer, channel)))
    }

    /// Sends a request and returns the answer with its descriptors, or `None` when the server does not run.
    pub fn request_descriptors<R: Serialize, A: DeserializeOwned>(
        &self,
        request: &Versioned<R>,
    ) -> Result<Option<(A, Vec<OwnedFd>, Channel)>> {
        let Self { kind, socket, log } = self;
        let (socket, log) = (socket.display(), log.display());
        let channel = match Channel::connect(&self.socket) {
            Ok(channel) => channel,
            Err(ChannelError::System { error, .. }) if is_not_listening(&error) => return Ok(None),
            Err(error) => bail!("{kind} at {socket}: {error}; see {log}"),
        };
        let no_answer = || anyhow!("{kind} at {socket} does not answer; see {log}");
        channel.send(request, &[]).map_err(|_| no_answer())?;
        let (answer, descriptors) = receive_descriptors(&channel, ANSWER_LIMIT)?.ok_or_else(no_answer)?;
        Ok(Some((answer, descriptors, channel)))
    }

    /// Returns the error of a request that the server has refused.
    pub fn refusal(&self, reason: &str) -> anyhow::Error {
        anyhow!("{} at {}: {reason}", self.kind, self.socket.display())
    }
}

/// Returns whether a connection failed because no process listens.
pub fn is_not_listening(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Sends a request to a monitor and returns the answer, or `None` when the monitor does not run.
pub fn request(node: &NodeRunDir, request: Request) -> Result<Option<(Response, Channel)>> {
    let server = Server { kind: "monitor", socket: node.monitor_socket(), log: node.monitor_log() };
    match server.request(&Versioned { version: VERSION, request })? {
        Some((Response::Refused { reason }, _)) => Err(server.refusal(&reason)),
        answer => Ok(answer),
    }
}

/// Returns the status of a node, or `None` when its monitor does not run.
pub fn status(node: &NodeRunDir) -> Result<Option<Status>> {
    match request(node, Request::Status)? {
        Some((Response::Status(status), _)) => Ok(Some(*status)),
        Some((other, _)) => bail!("a monitor answers {other:?} to a request for its status; use one release for all"),
        None => Ok(None),
    }
}

/// Returns the next message; `None` if none arrives within `limit` or the peer has closed the channel.
pub fn receive<M: DeserializeOwned>(channel: &Channel, limit: Duration) -> Result<Option<M>> {
    Ok(receive_descriptors(channel, limit)?.map(|(message, _)| message))
}

/// Returns the next message with its descriptors, as [`receive`] does.
fn receive_descriptors<M: DeserializeOwned>(channel: &Channel, limit: Duration) -> Result<Option<(M, Vec<OwnedFd>)>> {
    let deadline = Instant::now() + limit;
    loop {
        match channel.receive()? {
            Received::Message(answer, descriptors) => return Ok(Some((answer, descriptors))),
            Received::Ended => return Ok(None),
            Received::Nothing if Instant::now() >= deadline => return Ok(None),
            Received::Nothing => _ = is_readable(channel, deadline.saturating_duration_since(Instant::now())),
        }
    }
}

fn is_readable(descriptor: impl AsFd, limit: Duration) -> bool {
    let timeout = Timespec::try_from(limit).ok();
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    poll(&mut polled, timeout.as_ref()).is_ok_and(|ready| ready > 0)
}

/// A process, held by a pidfd so that its PID cannot refer to another process.
pub struct Process {
    pidfd: OwnedFd,
}

impl Process {
    /// Returns the process that listens at a unix socket; `None` if there is none or its backlog is full, because it
    /// hangs.
    pub fn listening_at(socket: &Path, kind: SocketType) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let probe = socket_with(AddressFamily::UNIX, kind, flags, None).ok()?;
        connect(&probe, &SocketAddrUnix::new(socket).ok()?).ok()?;
        Self::new(socket_peercred(&probe).ok()?.pid)
    }

    /// Returns the process that holds the lock of a PID file.
    pub fn holding_lock(lock: &Path) -> Option<Self> {
        let file = File::open(lock).ok()?;
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => {}
            _ => return None,
        }
        let number = io::read_to_string(file).ok()?.trim().parse().ok()?;
        Self::new(Pid::from_raw(number)?)
    }

    /// Returns the process with this PID; `None` if there is none.
    pub fn new(pid: Pid) -> Option<Self> {
        Some(Self { pidfd: pidfd_open(pid, PidfdFlags::empty()).ok()? })
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// Waits until the process has ended, and kills it if it does not end within `limit`. Returns whether it has ended.
    pub fn end_within(&self, limit: Duration) -> bool {
        self.has_ended(limit) || {
            self.signal(Signal::KILL);
            self.has_ended(KILL_LIMIT)
        }
    }

    /// Waits until the process has ended. Returns whether it ended within `limit`.
    pub fn has_ended(&self, limit: Duration) -> bool {
        is_readable(&self.pidfd, limit)
    }
}

/// Waits until `signals` is readable (returns `None`) or a process has ended (returns its index).
pub fn first_of<'a>(signals: BorrowedFd<'_>, processes: impl Iterator<Item = &'a Process>) -> Option<usize> {
    let mut polled = vec![PollFd::from_borrowed_fd(signals, PollFlags::IN)];
    polled.extend(processes.map(|process| PollFd::new(&process.pidfd, PollFlags::IN)));
    loop {
        let _ = poll(&mut polled, None);
        if let Some(index) = polled.iter().position(|entry| !entry.revents().is_empty()) {
            return index.checked_sub(1);
        }
    }
}
