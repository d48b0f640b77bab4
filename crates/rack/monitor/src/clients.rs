//! Programs and commands that talk to the monitor: connections to its socket.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use control::monitor::{Answer, Ask, Request, VERSION};
use control::{Channel, Received, peer_uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with};
use std::net::SocketAddr;
use tracing::warn;

/// Connections at a time, at most.
const CLIENTS_MAX: usize = 1024;
/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;
/// Connections accepted in one turn.
const ACCEPTS_PER_TURN: usize = 64;

/// What a client wants.
#[derive(Debug)]
pub enum Wish {
    /// A program asks for a listener of another node.
    Far(SocketAddr),
    /// The command line asks.
    Ask(Ask),
}

/// The monitor's socket and who is connected to it.
#[derive(Debug)]
pub struct Clients {
    listener: OwnedFd,
    connected: BTreeMap<u64, Channel>,
    number_next: u64,
    own_uid: u32,
}

impl Clients {
    /// Listens at `path`, where nobody else does: whoever calls holds the node's lock, so what lies there is stale.
    ///
    /// # Errors
    /// What the kernel says.
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

    /// What to poll: new connections, then each client by its number.
    pub fn descriptors(&self) -> (BorrowedFd<'_>, impl Iterator<Item = (u64, BorrowedFd<'_>)>) {
        (self.listener.as_fd(), self.connected.iter().map(|(number, channel)| (*number, channel.as_fd())))
    }

    /// Takes who has come.
    pub fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else { return };
            let uid = peer_uid(&socket).ok();
            let channel = Channel::new(socket);
            if uid != Some(self.own_uid) && uid != Some(0) {
                warn!(?uid, "a stranger at the monitor's socket is refused");
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

    /// What a client wants, if it has said so; gone clients are dropped, and their number is the error.
    pub fn wish(&mut self, number: u64) -> Result<Option<Wish>, u64> {
        let Some(channel) = self.connected.get(&number) else { return Ok(None) };
        let packet = match channel.receive_packet() {
            Ok(Received::Message(packet, _)) => packet,
            Ok(Received::Nothing) => return Ok(None),
            Ok(Received::Ended) | Err(_) => {
                self.connected.remove(&number);
                return Err(number);
            }
        };
        if let Some(address) = socket::rendezvous::monitor::asked_for(&packet) {
            return Ok(Some(Wish::Far(address)));
        }
        match serde_json::from_slice::<Request>(&packet) {
            Ok(Request { version: VERSION, ask }) => Ok(Some(Wish::Ask(ask))),
            other => {
                let found = other.map_or("an unknown one".to_owned(), |request| format!("version {}", request.version));
                let reason = format!("request of another release ({found}, here {VERSION}); use one release for all");
                refuse(channel, &reason);
                Ok(None)
            }
        }
    }

    /// Answers a program.
    pub fn tell(&self, number: u64, answer: socket::rendezvous::monitor::Answer) {
        if let Some(channel) = self.connected.get(&number) {
            // A program that does not take its answer has ended, or soon does.
            let _ = channel.send_packet(answer.encode().as_bytes(), &[]);
        }
    }

    /// Answers a command.
    pub fn answer(&self, number: u64, answer: &Answer) {
        if let Some(channel) = self.connected.get(&number) {
            let _ = channel.send(answer, &[]);
        }
    }
}

fn refuse(channel: &Channel, reason: &str) {
    let _ = channel.send(&Answer::Refused { reason: reason.to_owned() }, &[]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("monitor.sock");
        (folder, path)
    }

    fn only(clients: &Clients) -> u64 {
        let (_, mut connected) = clients.descriptors();
        connected.next().unwrap().0
    }

    #[test]
    fn programs_and_commands_are_told_apart_and_answered() {
        let _no_child = test_support::spawn::forbid();
        let (_folder, path) = place();
        let mut clients = Clients::listen(&path).unwrap();
        let program = Channel::connect(&path).unwrap();
        clients.accept();
        let number = only(&clients);
        let address = "127.77.0.2:80".parse().unwrap();
        program.send_packet(socket::rendezvous::monitor::question(address).as_bytes(), &[]).unwrap();
        assert!(matches!(clients.wish(number), Ok(Some(Wish::Far(found))) if found == address));
        clients.tell(number, socket::rendezvous::monitor::Answer::Ready { node: "127.77.0.1".parse().unwrap() });
        let Received::Message(packet, _) = program.receive_packet().unwrap() else { panic!("no answer") };
        assert_eq!(packet, b"ready 127.77.0.1");
        program.send(&Request::new(Ask::Status), &[]).unwrap();
        assert!(matches!(clients.wish(number), Ok(Some(Wish::Ask(Ask::Status)))));
        drop(program);
        assert_eq!(clients.wish(number).unwrap_err(), number);
    }

    #[test]
    fn what_is_no_request_is_refused_in_words() {
        let (_folder, path) = place();
        let mut clients = Clients::listen(&path).unwrap();
        for packet in [&b"far 9 x"[..], b"\xff", br#"{"version":9,"ask":"status"}"#, br#"{"version":1,"ask":"dance"}"#]
        {
            let command = Channel::connect(&path).unwrap();
            clients.accept();
            command.send_packet(packet, &[]).unwrap();
            let number = clients.number_next;
            assert!(matches!(clients.wish(number), Ok(None)));
            let Received::Message(Answer::Refused { reason }, _) = command.receive().unwrap() else { panic!("taken") };
            assert!(reason.contains("another release"), "{reason}");
        }
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let _no_child = test_support::spawn::forbid();
        let (_folder, path) = place();
        drop(Clients::listen(&path).unwrap());
        assert!(Channel::connect(&path).is_err());
        let _clients = Clients::listen(&path).unwrap();
        assert!(Channel::connect(&path).is_ok());
    }
}
