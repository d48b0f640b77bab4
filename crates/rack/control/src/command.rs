//! Commands: versioned requests of the command line to a server (a monitor or a router node) at its unix socket.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, accept_with, bind, listen, socket_with};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::channel::{Channel, FLAGS, Received, peer_uid};

/// Maximum number of connections accepted at once.
const ACCEPTS_MAX: usize = 64;

/// A request with the version of its protocol: command and server may be of different releases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versioned<R> {
    /// Version of the protocol.
    pub version: u32,
    /// The request.
    #[serde(rename = "ask")]
    pub request: R,
}

impl<R: DeserializeOwned> Versioned<R> {
    /// Parses the request in a packet.
    ///
    /// # Errors
    /// Why the request is not one of this version, for [`refuse`].
    pub fn decode(packet: &[u8], version: u32) -> Result<R, String> {
        #[derive(Deserialize)]
        struct Header {
            version: u32,
        }
        let found = match serde_json::from_slice::<Self>(packet) {
            Ok(versioned) if versioned.version == version => return Ok(versioned.request),
            Ok(versioned) => format!("version {}", versioned.version),
            Err(error) => match serde_json::from_slice::<Header>(packet) {
                Ok(header) if header.version != version => format!("version {}", header.version),
                _ => error.to_string(),
            },
        };
        Err(format!("request of another release ({found}; version here: {version}); use one release for all"))
    }
}

/// The response to a request that a server does not execute; both kinds of servers have it among their responses.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Refusal<'a> {
    Refused { reason: &'a str },
}

/// Refuses a request.
pub fn refuse(channel: &Channel, reason: &str) {
    // A command that does not read its response has ended, or will end.
    let _ = channel.send(&Refusal::Refused { reason }, &[]);
}

/// A server's socket and the commands that are connected to it, by number.
#[derive(Debug)]
pub struct Commands {
    listener: OwnedFd,
    channels: BTreeMap<u64, Channel>,
    number_next: u64,
    own_uid: u32,
    /// What the server is called in refusals.
    server: &'static str,
    channels_max: usize,
}

impl Commands {
    /// Listens at `path` for at most `channels_max` connections to a `server`, such as `monitor`. The caller holds the
    /// server's lock, so an existing socket is stale and is replaced.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn listen(path: &Path, server: &'static str, channels_max: u16) -> Result<Self, Errno> {
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, i32::from(channels_max))?;
        let own_uid = rustix::process::geteuid().as_raw();
        let channels_max = usize::from(channels_max);
        Ok(Self { listener, channels: BTreeMap::new(), number_next: 0, own_uid, server, channels_max })
    }

    /// Returns the listening socket, to be polled.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Returns the connections with their numbers.
    pub fn channels(&self) -> impl Iterator<Item = (u64, &Channel)> {
        self.channels.iter().map(|(number, channel)| (*number, channel))
    }

    /// Returns a connection.
    pub fn channel(&self, number: u64) -> Option<&Channel> {
        self.channels.get(&number)
    }

    /// Accepts pending connections of the server's own user and of root, and refuses others. Returns the others' users.
    pub fn accept(&mut self) -> Vec<Option<u32>> {
        let mut refused_uids = Vec::new();
        for _ in 0..ACCEPTS_MAX {
            let Ok(socket) = accept_with(&self.listener, FLAGS) else { break };
            let uid = peer_uid(&socket).ok();
            let channel = Channel::new(socket);
            let server = self.server;
            if uid != Some(self.own_uid) && uid != Some(0) {
                refuse(
                    &channel,
                    &format!("this {server} runs as another user; run the command as that user or as root"),
                );
                refused_uids.push(uid);
            } else if self.channels.len() >= self.channels_max {
                refuse(&channel, &format!("too many commands are connected to this {server}; try again"));
            } else {
                self.number_next += 1;
                self.channels.insert(self.number_next, channel);
            }
        }
        refused_uids
    }

    /// Returns the next packet of a connection, if one is pending. A connection that has ended is removed.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn receive_packet(&mut self, number: u64) -> Result<Option<Vec<u8>>, Ended> {
        let Some(channel) = self.channels.get(&number) else { return Ok(None) };
        match channel.receive_packet() {
            Ok(Received::Message(packet, _)) => Ok(Some(packet)),
            Ok(Received::Nothing) => Ok(None),
            Ok(Received::Ended) | Err(_) => {
                self.channels.remove(&number);
                Err(Ended)
            }
        }
    }

    /// Sends a response to a connection, if it still exists.
    pub fn respond<M: Serialize>(&self, number: u64, response: &M) {
        if let Some(channel) = self.channels.get(&number) {
            // A command that does not read its response has ended, or will end.
            let _ = channel.send(response, &[]);
        }
    }
}

/// A connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;

#[cfg(test)]
mod tests {
    use super::*;

    fn listening() -> (tempfile::TempDir, std::path::PathBuf, Commands) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.sock");
        let commands = Commands::listen(&path, "server", 2).unwrap();
        (folder, path, commands)
    }

    fn refusal(channel: &Channel) -> String {
        match channel.receive::<serde_json::Value>().unwrap() {
            Received::Message(response, _) => response["refused"]["reason"].as_str().unwrap().to_owned(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_of_another_version_or_form_has_a_reason() {
        let decode = |packet: &[u8]| Versioned::<u8>::decode(packet, 1);
        assert_eq!(decode(br#"{"version":1,"ask":7}"#), Ok(7));
        for (packet, found) in [
            (&br#"{"version":9,"ask":7}"#[..], "(version 9; version here: 1)"),
            (br#"{"version":9,"ask":"dance"}"#, "(version 9; version here: 1)"),
            (br#"{"version":1,"ask":"dance"}"#, "invalid type: string"),
            (b"\xff", "expected value"),
        ] {
            let reason = decode(packet).unwrap_err();
            assert!(reason.contains("another release") && reason.contains(found), "{reason}");
        }
    }

    #[test]
    fn connections_have_numbers_and_are_removed_when_they_end() {
        let (_folder, path, mut commands) = listening();
        let [one, other] = [(); 2].map(|()| Channel::connect(&path).unwrap());
        assert_eq!(commands.accept(), []);
        other.send_packet(b"hello", &[]).unwrap();
        let packets = [1, 2, 3].map(|number| commands.receive_packet(number));
        assert_eq!(packets, [Ok(None), Ok(Some(b"hello".to_vec())), Ok(None)]);
        drop(one);
        assert_eq!(commands.receive_packet(1), Err(Ended));
        assert_eq!(commands.channels().map(|(number, _)| number).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn more_connections_than_the_maximum_are_refused() {
        let (_folder, path, mut commands) = listening();
        let channels = [(); 3].map(|()| Channel::connect(&path).unwrap());
        commands.accept();
        assert_eq!(refusal(&channels[2]), "too many commands are connected to this server; try again");
        assert_eq!(commands.channels().count(), 2);
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let (_folder, path, commands) = listening();
        drop(commands);
        assert!(Channel::connect(&path).is_err());
        let _commands = Commands::listen(&path, "server", 2).unwrap();
        assert!(Channel::connect(&path).is_ok());
    }
}
