//! Commands that ask this node: connections to its socket.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use ::control::{Channel, ChannelError, Received, peer_uid};
use ipnet::IpNet;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with};
use tracing::warn;

use crate::management::{Request, Response, VERSION, VersionedRequest};

/// Connections at a time, at most.
const CLIENTS_MAX: usize = 64;
const BACKLOG: i32 = 64;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A command.
#[derive(Debug)]
struct Client {
    channel: Channel,
    /// Prefixes whose routes it is still to be told; the last one first.
    prefixes_pending: Option<Vec<IpNet>>,
    is_tracing: bool,
    awaits_status: bool,
}

/// The node's socket, and who is connected to it.
#[derive(Debug)]
pub struct Clients {
    listener: OwnedFd,
    clients: BTreeMap<u64, Client>,
    number_next: u64,
    own_uid: u32,
    /// Whether anybody may have come, gone or said something.
    is_readable: bool,
}

impl Clients {
    /// Listens at `path`, where nobody else does: whoever calls holds the node's lock, so what lies there is stale.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn listen(path: &Path) -> Result<Self, Errno> {
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        let own_uid = rustix::process::geteuid().as_raw();
        Ok(Self { listener, clients: BTreeMap::new(), number_next: 0, own_uid, is_readable: true })
    }

    /// What to poll.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let clients = self.clients.values().map(|client| {
            let is_writing = client.prefixes_pending.is_some();
            let flags = if is_writing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            (client.channel.as_fd(), flags)
        });
        std::iter::once((self.listener.as_fd(), PollFlags::IN)).chain(clients).collect()
    }

    /// One of [`Clients::descriptors`] has something to be read.
    pub fn note_readable(&mut self) {
        self.is_readable = true;
    }

    /// What commands ask, by their numbers; those that are gone are forgotten.
    pub fn requests(&mut self) -> Vec<(u64, Request)> {
        if !std::mem::take(&mut self.is_readable) {
            return Vec::new();
        }
        self.accept();
        let mut requests = Vec::new();
        let mut gone = Vec::new();
        for (number, client) in &self.clients {
            match client.channel.receive::<VersionedRequest>() {
                Ok(Received::Message(VersionedRequest { version: VERSION, request }, _)) => {
                    requests.push((*number, request))
                }
                Ok(Received::Nothing) => {}
                Ok(Received::Ended) => gone.push(*number),
                Ok(Received::Message(other, _)) => {
                    refuse(&client.channel, &format!("version {}, here {VERSION}; use one release", other.version));
                }
                Err(ChannelError::Senseless { reason }) => {
                    refuse(&client.channel, &format!("no request of this release: {reason}; use one release"));
                }
                Err(_) => gone.push(*number),
            }
        }
        gone.iter().for_each(|number| drop(self.clients.remove(number)));
        requests
    }

    fn accept(&mut self) {
        while let Ok(socket) = accept_with(&self.listener, FLAGS) {
            let uid = peer_uid(&socket).ok();
            let channel = Channel::new(socket);
            if uid != Some(self.own_uid) && uid != Some(0) {
                warn!(?uid, "connection from another user to the management socket refused");
                refuse(&channel, "this node is another user's; ask as its user or as root");
            } else if self.clients.len() >= CLIENTS_MAX {
                refuse(&channel, "too many commands ask this node; ask again");
            } else {
                self.number_next += 1;
                let client = Client { channel, prefixes_pending: None, is_tracing: false, awaits_status: false };
                self.clients.insert(self.number_next, client);
            }
        }
    }

    /// Answers a command.
    pub fn respond(&mut self, number: u64, response: &Response) {
        if let Some(client) = self.clients.get(&number) {
            // One that does not take its answer has ended, or soon does.
            let _ = client.channel.send(response, &[]);
        }
    }

    /// The command waits for the state.
    pub fn request_status(&mut self, number: u64) {
        if let Some(client) = self.clients.get_mut(&number) {
            client.awaits_status = true;
        }
    }

    /// Whether any command waits for the state.
    pub fn is_status_requested(&self) -> bool {
        self.clients.values().any(|client| client.awaits_status)
    }

    /// Tells the state to all who wait for it.
    pub fn respond_status(&mut self, response: &Response) {
        for client in self.clients.values_mut().filter(|client| client.awaits_status) {
            client.awaits_status = false;
            let _ = client.channel.send(response, &[]);
        }
    }

    /// The command is to be told the routes of these prefixes.
    pub fn stream_routes(&mut self, number: u64, mut prefixes: Vec<IpNet>) {
        prefixes.reverse();
        if let Some(client) = self.clients.get_mut(&number) {
            client.prefixes_pending = Some(prefixes);
        }
    }

    /// Tells routes to those who are to be told some, as fast as they take them.
    pub fn continue_route_streams(&mut self, routes_max: usize, response: impl Fn(&[IpNet], bool) -> Response) {
        for client in self.clients.values_mut() {
            while let Some(left) = client.prefixes_pending.as_mut() {
                let rest = left.len().saturating_sub(routes_max);
                let some: Vec<IpNet> = left[rest..].iter().rev().copied().collect();
                match client.channel.send(&response(&some, rest == 0), &[]) {
                    Ok(()) => left.truncate(rest),
                    Err(ChannelError::System { error, .. }) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(_) => client.prefixes_pending = None,
                }
                if rest == 0 {
                    client.prefixes_pending = None;
                }
            }
        }
    }

    /// The command is to be told what becomes of packets; false when another one is already.
    pub fn trace(&mut self, number: u64) -> bool {
        let is_taken = self.is_tracing();
        if let (false, Some(client)) = (is_taken, self.clients.get_mut(&number)) {
            client.is_tracing = true;
        }
        !is_taken
    }

    /// Whether any command follows packets.
    pub fn is_tracing(&self) -> bool {
        self.clients.values().any(|client| client.is_tracing)
    }

    /// Tells steps to who follows packets. What that does not take in time is lost to it.
    pub fn send_trace_steps(&mut self, response: &Response) {
        for client in self.clients.values().filter(|client| client.is_tracing) {
            let _ = client.channel.send(response, &[]);
        }
    }
}

fn refuse(channel: &Channel, reason: &str) {
    let _ = channel.send(&Response::Refused { reason: reason.to_owned() }, &[]);
}
