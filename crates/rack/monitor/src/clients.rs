//! Connections of programs and commands to the monitor's socket.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use control::command::{Commands, Ended, Versioned, refuse};
use control::monitor::{Request, Response, VERSION};
use rustix::io::Errno;
use tracing::warn;

/// Maximum number of connections.
const CLIENTS_MAX: u16 = 1024;

/// A request of a client.
#[derive(Debug)]
pub enum ClientRequest {
    /// A program queries a listener of another node.
    RemoteListener(SocketAddr),
    /// A request of the command line.
    Command(Request),
}

/// The monitor's socket and its connections.
#[derive(Debug)]
pub struct Clients(Commands);

impl Clients {
    /// Listens at `path`. The caller holds the node's lock, so an existing socket is stale and is replaced.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn listen(path: &Path) -> Result<Self, Errno> {
        Commands::listen(path, "monitor", CLIENTS_MAX).map(Self)
    }

    /// Returns the descriptors to poll: the listener, then each client with its number.
    pub fn descriptors(&self) -> (BorrowedFd<'_>, impl Iterator<Item = (u64, BorrowedFd<'_>)>) {
        (self.0.listener(), self.0.channels().map(|(number, channel)| (number, channel.as_fd())))
    }

    /// Accepts pending connections.
    pub fn accept(&mut self) {
        for uid in self.0.accept() {
            warn!(?uid, "refused a connection of another user at the monitor's socket");
        }
    }

    /// Returns the next request of a client, if one is pending. A client that has disconnected is removed, and its
    /// number is the error.
    pub fn next_request(&mut self, number: u64) -> Result<Option<ClientRequest>, u64> {
        let Some(packet) = self.0.receive_packet(number).map_err(|Ended| number)? else { return Ok(None) };
        if let Some(address) = socket::rack::monitor::decode_query(&packet) {
            return Ok(Some(ClientRequest::RemoteListener(address)));
        }
        match Versioned::decode(&packet, VERSION) {
            Ok(request) => Ok(Some(ClientRequest::Command(request))),
            Err(reason) => {
                if let Some(channel) = self.0.channel(number) {
                    refuse(channel, &reason);
                }
                Ok(None)
            }
        }
    }

    /// Answers the query of a program.
    pub fn answer_query(&self, number: u64, answer: socket::rack::monitor::ListenerResponse) {
        if let Some(channel) = self.0.channel(number) {
            // Sending fails if the program has ended, or if it does not read its answers.
            let _ = channel.send_packet(answer.encode().as_bytes(), &[]);
        }
    }

    /// Answers a request of the command line.
    pub fn respond(&self, number: u64, response: &Response) {
        self.0.respond(number, response);
    }
}

#[cfg(test)]
mod tests {
    use control::{Channel, Received};

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
        program.send_packet(socket::rack::monitor::encode_query(address).as_bytes(), &[]).unwrap();
        assert!(
            matches!(clients.next_request(number), Ok(Some(ClientRequest::RemoteListener(found))) if found == address)
        );
        clients.answer_query(
            number,
            socket::rack::monitor::ListenerResponse::Ready { node: "127.77.0.1".parse().unwrap() },
        );
        let Received::Message(packet, _) = program.receive_packet().unwrap() else { panic!("no answer") };
        assert_eq!(packet, b"ready 127.77.0.1");
        program.send(&Versioned { version: VERSION, request: Request::Status }, &[]).unwrap();
        assert!(matches!(clients.next_request(number), Ok(Some(ClientRequest::Command(Request::Status)))));
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
            let number = clients.descriptors().1.last().unwrap().0;
            assert!(matches!(clients.next_request(number), Ok(None)));
            let Received::Message(Response::Refused { reason }, _) = command.receive().unwrap() else {
                panic!("taken")
            };
            assert!(reason.contains("another release"), "{reason}");
        }
    }
}
