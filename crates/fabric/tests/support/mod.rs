//! An ivshmem server for tests: it hands out one memory and the clients' eventfds, and ends with its last client.

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use tempfile::TempDir;

/// A server that runs; its socket is gone with it.
pub struct Server {
    folder: TempDir,
}

/// A number, and the descriptor that goes with it.
pub type Message = (i64, Option<OwnedFd>);

struct Client {
    stream: UnixStream,
    bells: Vec<OwnedFd>,
}

/// A memory file that cannot shrink.
pub fn memory(len_bytes: usize) -> OwnedFd {
    let memfd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&memfd, len_bytes as u64).expect("a length");
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
    memfd
}

impl Server {
    /// Serves `len_bytes` of memory, and `vectors` bells to each client.
    pub fn start(len_bytes: usize, vectors: usize) -> Self {
        Self::serving(memory(len_bytes), vectors)
    }

    /// Serves this memory.
    pub fn serving(memory: OwnedFd, vectors: usize) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let listener = UnixListener::bind(folder.path().join("socket")).expect("a socket");
        thread::spawn(move || serve(&listener, &memory, vectors));
        Self { folder }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("socket")
    }
}

/// A server that says just this, message by message, and hangs up.
#[allow(dead_code)] // Not every test that takes this module needs it.
pub fn start_saying(messages: Vec<Message>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        for (number, descriptor) in &messages {
            say(&stream, *number, descriptor.as_ref().map(AsFd::as_fd));
        }
    });
    (folder, path)
}

fn serve(listener: &UnixListener, memory: &OwnedFd, vectors: usize) {
    let mut clients = BTreeMap::<i64, Client>::new();
    let mut had_clients = false;
    while !(had_clients && clients.is_empty()) {
        let (came, gone) = wait(listener, &clients);
        for identity in gone {
            clients.remove(&identity);
            clients.values().for_each(|client| say(&client.stream, identity, None));
        }
        if came {
            let (stream, _) = listener.accept().expect("a client");
            welcome(stream, &mut clients, memory, vectors);
            had_clients = true;
        }
    }
}

/// Whether somebody came, and who has gone.
fn wait(listener: &UnixListener, clients: &BTreeMap<i64, Client>) -> (bool, Vec<i64>) {
    let mut polled = vec![PollFd::new(listener, PollFlags::IN)];
    polled.extend(clients.values().map(|client| PollFd::new(&client.stream, PollFlags::IN)));
    poll(&mut polled, None).expect("poll");
    let gone = clients.keys().zip(&polled[1..]).filter(|(_, polled)| !polled.revents().is_empty());
    let gone = gone.map(|(identity, _)| *identity).collect();
    (!polled[0].revents().is_empty(), gone)
}

fn welcome(stream: UnixStream, clients: &mut BTreeMap<i64, Client>, memory: &OwnedFd, vectors: usize) {
    let identity = (0..).find(|identity| !clients.contains_key(identity)).expect("a number");
    let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let client = Client { stream, bells: (0..vectors).map(|_| bell()).collect() };
    say(&client.stream, 0, None);
    say(&client.stream, identity, None);
    say(&client.stream, -1, Some(memory.as_fd()));
    for (other, others) in clients.iter() {
        others.bells.iter().for_each(|bell| say(&client.stream, *other, Some(bell.as_fd())));
        client.bells.iter().for_each(|bell| say(&others.stream, identity, Some(bell.as_fd())));
    }
    client.bells.iter().for_each(|bell| say(&client.stream, identity, Some(bell.as_fd())));
    clients.insert(identity, client);
}

/// A client that is gone by now hears nothing.
fn say(stream: &UnixStream, number: i64, descriptor: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let _ = sendmsg(stream, &[IoSlice::new(&number.to_le_bytes())], &mut control, SendFlags::NOSIGNAL);
}

/// A file of zeros.
#[allow(dead_code)] // As above.
pub fn file(folder: &Path, len_bytes: u64) -> PathBuf {
    let path = folder.join("device");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(len_bytes).expect("a length");
    path
}
