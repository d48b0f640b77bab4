//! Connections of programs and commands to the monitor's socket.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use control::monitor::{Request, RequestKind, Response, VERSION};
use control::{Channel, Received, peer_uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with};
use std::net::SocketAddr;
use tracing::warn;

/// Maximum number of connections.
const CLIENTS_MAX: usize = 1024;
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Maximum number of connections accepted in one iteration of the event loop.
const ACCEPTS_PER_ITERATION: usize = 64;

/// A request of a client.
#[derive(Debug)]
pub enum ClientRequest {
    /// A program queries a listener of another node.
    RemoteListener(SocketAddr),
    /// A request of the command line.
    Command(RequestKind),
}

/// The monitor's socket and its connections.
#[derive(Debug)]
pub struct Clients {
    listener: OwnedFd,
    connected: BTreeMap<u64, Channel>,
    number_next: u64,
    own_uid: u32,
}

impl Clients {
    /// Listens at `path`. The caller holds the node's lock, so an existing socket is stale and is replaced.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn listen(path: &Path) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        let own_uid = rustix::process::geteuid().as_raw();
        Ok(Self { listener, connected: BTreeMap::new(), number_next: 0, own_uid })
    }

    /// Returns the descriptors to poll: the listener, then each client with its number.
    pub fn descriptors(&self) -> (BorrowedFd<'_>, impl Iterator<Item = (u64, BorrowedFd<'_>)>) {
        (self.listener.as_fd(), self.connected.iter().map(|(number, channel)| (*number, channel.as_fd())))
    }

    /// Accepts pending connections.
    pub fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_ITERATION {
            let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else { return };
            let uid = peer_uid(&socket).ok();
            let channel = Channel::new(socket);
            if uid != Some(self.own_uid) && uid != Some(0) {
                warn!(?uid, "refused a connection of another user at the monitor's socket");
                refuse(&channel, "this monitor is another user's; ask as its user or as root");
                continue;
            }
            if self.connected.len() >= CLIENTS_MAX {
                refuse(&channel, "too many connections to this monitor; ask again");
                continue;
            }
            self.number_next += 1;
            self.connected.insert(self.number_next, channel);
        }
    }

    /// Returns the next request of a client, if one is pending. A client that has disconnected is removed, and its
    /// number is the error.
    pub fn next_request(&mut self, number: u64) -> Result<Option<ClientRequest>, u64> {
        let Some(channel) = self.connected.get(&number) else { return Ok(None) };
        let packet = match channel.receive_packet() {
            Ok(Received::Message(packet, _)) => packet,
            Ok(Received::Nothing) => return Ok(None),
            Ok(Received::Ended) | Err(_) => {
                self.connected.remove(&number);
                return Err(number);
            }
        };
        if let Some(address) = socket::rendezvous::monitor::decode_query(&packet) {
            return Ok(Some(ClientRequest::RemoteListener(address)));
        }
        match serde_json::from_slice::<Request>(&packet) {
            Ok(Request { version: VERSION, kind }) => Ok(Some(ClientRequest::Command(kind))),
            other => {
                let found = other.map_or("an unknown one".to_owned(), |request| format!("version {}", request.version));
                let reason = format!("request of another release ({found}, here {VERSION}); use one release for all");
                refuse(channel, &reason);
                Ok(None)
            }
        }
    }

    /// Answers the query of a program.
    pub fn answer_query(&self, number: u64, answer: socket::rendezvous::monitor::ListenerResponse) {
        if let Some(channel) = self.connected.get(&number) {
            // Sending fails if the program has ended, or if it does not read its answers.
            let _ = channel.send_packet(answer.encode().as_bytes(), &[]);
        }
    }

    /// Answers a request of the command line.
    pub fn respond(&self, number: u64, response: &Response) {
        if let Some(channel) = self.connected.get(&number) {
            let _ = channel.send(response, &[]);
        }
    }
}

fn refuse(channel: &Channel, reason: &str) {
    let _ = channel.send(&Response::Refused { reason: reason.to_owned() }, &[]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket_path() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("monitor.sock");
        (folder, path)
    }

    fn only(clients: &Clients) -> u64 {
        let (_, mut connected) = clients.descriptors();
        connected.next().unwrap().0
    }

    #[test]
    fn programs_and_commands_are_distinguished_and_answered() {
        let _no_child = test_support::spawn::forbid();
        let (_folder, path) = socket_path();
        let mut clients = Clients::listen(&path).unwrap();
        let program = Channel::connect(&path).unwrap();
        clients.accept();
        let number = only(&clients);
        let address = "127.77.0.2:80".parse().unwrap();
        program.send_packet(socket::rendezvous::monitor::encode_query(address).as_bytes(), &[]).unwrap();
        assert!(
            matches!(clients.next_request(number), Ok(Some(ClientRequest::RemoteListener(found))) if found == address)
        );
        clients.answer_query(
            number,
            socket::rendezvous::monitor::ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() },
        );
        let Received::Message(packet, _) = program.receive_packet().unwrap() else { panic!("no answer") };
        assert_eq!(packet, b"ready 127.77.0.1");
        program.send(&Request::new(RequestKind::Status), &[]).unwrap();
        assert!(matches!(clients.next_request(number), Ok(Some(ClientRequest::Command(RequestKind::Status)))));
        drop(program);
        assert_eq!(clients.next_request(number).unwrap_err(), number);
    }

    #[test]
    fn a_malformed_request_is_refused_with_the_reason() {
        let (_folder, path) = socket_path();
        let mut clients = Clients::listen(&path).unwrap();
        for packet in [&b"far 9 x"[..], b"\xff", br#"{"version":9,"ask":"status"}"#, br#"{"version":1,"ask":"dance"}"#]
        {
            let command = Channel::connect(&path).unwrap();
            clients.accept();
            command.send_packet(packet, &[]).unwrap();
            let number = clients.number_next;
            assert!(matches!(clients.next_request(number), Ok(None)));
            let Received::Message(Response::Refused { reason }, _) = command.receive().unwrap() else {
                panic!("taken")
            };
            assert!(reason.contains("another release"), "{reason}");
        }
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let _no_child = test_support::spawn::forbid();
        let (_folder, path) = socket_path();
        drop(Clients::listen(&path).unwrap());
        assert!(Channel::connect(&path).is_err());
        let _clients = Clients::listen(&path).unwrap();
        assert!(Channel::connect(&path).is_ok());
    }
}
