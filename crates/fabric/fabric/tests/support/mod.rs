//! Servers and files for tests of devices.

use device_server::{Options, ServerThread};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::Permissions;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use tempfile::TempDir;

/// A running server.
pub struct Server {
    folder: TempDir,
    _running: ServerThread,
}

impl Server {
    /// Serves at least `len_bytes` of memory, and `vectors` doorbells to each client.
    pub fn start(len_bytes: usize, vectors: u32) -> Self {
        let owner_only = Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().permissions(owner_only).tempdir().expect("a folder");
        let options = Options::new(&folder.path().join("socket"), len_bytes.next_power_of_two() as u64, vectors);
        let server = device_server::Server::bind(&options.expect("options")).expect("a server");
        Self { folder, _running: server.start(|_event| ()).expect("a thread") }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("socket")
    }
}

/// A number, and the descriptor that goes with it.
pub type Message = (i64, Option<OwnedFd>);

/// A server that sends these messages and closes the connection.
#[allow(dead_code)] // Not every test that includes this module needs it.
pub fn start_sending(messages: Vec<Message>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        for (number, descriptor) in &messages {
            send(&stream, *number, descriptor.as_ref().map(AsFd::as_fd));
        }
    });
    (folder, path)
}

/// Sends a message. The client may have disconnected.
fn send(stream: &UnixStream, number: i64, descriptor: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let _ = sendmsg(stream, &[IoSlice::new(&number.to_le_bytes())], &mut control, SendFlags::NOSIGNAL);
}

/// A memory file that is sealed against shrinking.
pub fn memory(len_bytes: usize) -> OwnedFd {
    let memfd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&memfd, len_bytes as u64).expect("a length");
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
    memfd
}

/// Makes a file of zeros.
pub fn file(folder: &Path, len_bytes: u64) -> PathBuf {
    let path = folder.join("device");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(len_bytes).expect("a length");
    path
}
