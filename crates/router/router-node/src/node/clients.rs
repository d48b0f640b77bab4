//! The management socket of a node, and the commands that are connected to it.

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

/// Maximum number of connections.
const CLIENTS_MAX: usize = 64;
const BACKLOG: i32 = 64;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A connected command.
#[derive(Debug)]
struct Client {
    channel: Channel,
    /// Prefixes whose routes are still to be sent, in reverse order.
    prefixes_pending: Option<Vec<IpNet>>,
    is_tracing: bool,
    awaits_status: bool,
}

/// The management socket and its connections.
#[derive(Debug)]
pub struct Clients {
    listener: OwnedFd,
    clients: BTreeMap<u64, Client>,
    number_next: u64,
    own_uid: u32,
    /// Whether a descriptor may be readable.
    is_readable: bool,
}

impl Clients {
    /// Listens at `path`. The caller holds the node's lock, so an existing socket is stale.
    ///
    /// # Errors
    /// Returns the error of the kernel.
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

    /// Returns the descriptors to poll.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let clients = self.clients.values().map(|client| {
            let is_writing = client.prefixes_pending.is_some();
            let flags = if is_writing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            (client.channel.as_fd(), flags)
        });
        std::iter::once((self.listener.as_fd(), PollFlags::IN)).chain(clients).collect()
    }

    /// Records that one of [`Clients::descriptors`] is readable.
    pub fn note_readable(&mut self) {
        self.is_readable = true;
    }

    /// Returns new requests with the numbers of their connections, and removes closed connections.
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
                    refuse(
                        &client.channel,
                        &format!(
                            "request of version {}, this node has {VERSION}; run the same release as the node",
                            other.version
                        ),
                    );
                }
                Err(ChannelError::Malformed { reason }) => {
                    refuse(&client.channel, &format!("invalid request: {reason}; run the same release as the node"));
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
                refuse(&channel, "this node runs as another user; run the command as that user or as root");
            } else if self.clients.len() >= CLIENTS_MAX {
                refuse(&channel, "too many commands are connected to this node; try again");
            } else {
                self.number_next += 1;
                let client = Client { channel, prefixes_pending: None, is_tracing: false, awaits_status: false };
                self.clients.insert(self.number_next, client);
            }
        }
    }

    /// Sends a response.
    pub fn respond(&mut self, number: u64, response: &Response) {
        if let Some(client) = self.clients.get(&number) {
            // A command that does not accept its response has ended, or will end.
            let _ = client.channel.send(response, &[]);
        }
    }

    /// Records that a command waits for the status.
    pub fn request_status(&mut self, number: u64) {
        if let Some(client) = self.clients.get_mut(&number) {
            client.awaits_status = true;
        }
    }

    /// Returns whether any command waits for the status.
    pub fn is_status_requested(&self) -> bool {
        self.clients.values().any(|client| client.awaits_status)
    }

    /// Sends the status to all commands that wait for it.
    pub fn respond_status(&mut self, response: &Response) {
        for client in self.clients.values_mut().filter(|client| client.awaits_status) {
            client.awaits_status = false;
            let _ = client.channel.send(response, &[]);
        }
    }

    /// Starts to send the routes of these prefixes to a command.
    pub fn stream_routes(&mut self, number: u64, mut prefixes: Vec<IpNet>) {
        prefixes.reverse();
        if let Some(client) = self.clients.get_mut(&number) {
            client.prefixes_pending = Some(prefixes);
        }
    }

    /// Sends pending routes as fast as the commands read them.
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

    /// Starts a trace for a command. Returns false if there is one already.
    pub fn trace(&mut self, number: u64) -> bool {
        let is_taken = self.is_tracing();
        if let (false, Some(client)) = (is_taken, self.clients.get_mut(&number)) {
            client.is_tracing = true;
        }
        !is_taken
    }

    /// Returns whether a command traces packets.
    pub fn is_tracing(&self) -> bool {
        self.clients.values().any(|client| client.is_tracing)
    }

    /// Sends steps to the tracing command. Steps that it does not read in time are lost.
    pub fn send_trace_steps(&mut self, response: &Response) {
        for client in self.clients.values().filter(|client| client.is_tracing) {
            let _ = client.channel.send(response, &[]);
        }
    }
}

fn refuse(channel: &Channel, reason: &str) {
    let _ = channel.send(&Response::Refused { reason: reason.to_owned() }, &[]);
}
