//! The management socket of a node, and the commands that are connected to it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use ::control::ChannelError;
use ::control::command::{Commands, Versioned, refuse};
use ipnet::IpNet;
use rustix::event::PollFlags;
use rustix::io::Errno;
use tracing::warn;

use crate::management::{Request, Response, VERSION};

/// Maximum number of connections.
const CLIENTS_MAX: u16 = 64;

/// What a connected command waits for.
#[derive(Debug, Default)]
struct Pending {
    /// Prefixes whose routes are still to be sent, in reverse order.
    prefixes: Option<Vec<IpNet>>,
    is_tracing: bool,
    awaits_status: bool,
}

/// The management socket and its connections.
#[derive(Debug)]
pub struct Clients {
    commands: Commands,
    /// By the number of the connection.
    pending: BTreeMap<u64, Pending>,
    /// Whether a descriptor may be readable.
    is_readable: bool,
}

impl Clients {
    /// Listens at `path`. The caller holds the node's lock, so an existing socket is stale.
    ///
    /// # Errors
    /// Returns the error of the kernel.
    pub fn listen(path: &Path) -> Result<Self, Errno> {
        let commands = Commands::listen(path, "node", CLIENTS_MAX)?;
        Ok(Self { commands, pending: BTreeMap::new(), is_readable: true })
    }

    /// Returns the descriptors to poll.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let clients = self.commands.channels().map(|(number, channel)| {
            let is_writing = self.pending.get(&number).is_some_and(|pending| pending.prefixes.is_some());
            let flags = if is_writing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            (channel.as_fd(), flags)
        });
        std::iter::once((self.commands.listener(), PollFlags::IN)).chain(clients).collect()
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
        for uid in self.commands.accept() {
            warn!(?uid, "connection from another user to the management socket refused");
        }
        let numbers: Vec<u64> = self.commands.channels().map(|(number, _)| number).collect();
        numbers.into_iter().filter_map(|number| Some((number, self.request(number)?))).collect()
    }

    /// Returns the next request of a command, if one is pending.
    fn request(&mut self, number: u64) -> Option<Request> {
        let Ok(packet) = self.commands.receive_packet(number) else {
            self.pending.remove(&number);
            return None;
        };
        match Versioned::decode(&packet?, VERSION) {
            Ok(request) => Some(request),
            Err(reason) => {
                refuse(self.commands.channel(number)?, &reason);
                None
            }
        }
    }

    /// Sends a response.
    pub fn respond(&self, number: u64, response: &Response) {
        self.commands.respond(number, response);
    }

    /// Sends a response with a descriptor.
    pub fn respond_with(&self, number: u64, response: &Response, descriptor: BorrowedFd<'_>) {
        if let Some(channel) = self.commands.channel(number) {
            // A command that is gone needs no response.
            let _ = channel.send(response, &[descriptor]);
        }
    }

    /// Records that a command waits for the status.
    pub fn request_status(&mut self, number: u64) {
        self.pending.entry(number).or_default().awaits_status = true;
    }

    /// Returns whether any command waits for the status.
    pub fn is_status_requested(&self) -> bool {
        self.pending.values().any(|pending| pending.awaits_status)
    }

    /// Sends the status to all commands that wait for it.
    pub fn respond_status(&mut self, response: &Response) {
        for (number, pending) in &mut self.pending {
            if std::mem::take(&mut pending.awaits_status) {
                self.commands.respond(*number, response);
            }
        }
    }

    /// Starts to send the routes of these prefixes to a command.
    pub fn stream_routes(&mut self, number: u64, mut prefixes: Vec<IpNet>) {
        prefixes.reverse();
        self.pending.entry(number).or_default().prefixes = Some(prefixes);
    }

    /// Sends pending routes as fast as the commands read them.
    pub fn continue_route_streams(&mut self, routes_max: usize, response: impl Fn(&[IpNet], bool) -> Response) {
        for (number, pending) in &mut self.pending {
            let Some(channel) = self.commands.channel(*number) else { continue };
            while let Some(remaining) = pending.prefixes.as_mut() {
                let rest = remaining.len().saturating_sub(routes_max);
                let batch: Vec<IpNet> = remaining[rest..].iter().rev().copied().collect();
                match channel.send(&response(&batch, rest == 0), &[]) {
                    Ok(()) => remaining.truncate(rest),
                    Err(ChannelError::System { error, .. }) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(_) => pending.prefixes = None,
                }
                if rest == 0 {
                    pending.prefixes = None;
                }
            }
        }
    }

    /// Starts a trace for a command. Returns false if there is one already.
    pub fn trace(&mut self, number: u64) -> bool {
        let is_taken = self.is_tracing();
        if !is_taken {
            self.pending.entry(number).or_default().is_tracing = true;
        }
        !is_taken
    }

    /// Returns whether a command traces packets.
    pub fn is_tracing(&self) -> bool {
        self.pending.values().any(|pending| pending.is_tracing)
    }

    /// Sends steps to the tracing command. Steps that it does not read in time are lost.
    pub fn send_trace_steps(&mut self, response: &Response) {
        for (number, _) in self.pending.iter().filter(|(_, pending)| pending.is_tracing) {
            self.commands.respond(*number, response);
        }
    }
}
