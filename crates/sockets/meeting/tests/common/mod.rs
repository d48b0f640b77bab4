//! Connections, memory and descriptors of the tests.

#![allow(dead_code)] // Each test binary uses a part.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use meeting::{
    Accepting, Answer, Endpoint, Evidence, Key, Memory, Met, Offer, PeerUser, Policy, Proposal, Reason, Rendezvous,
    Role, Step,
};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

pub const MEMORY_BYTES: u64 = 65_536;

/// Keeps the tests of a binary apart. Every test of one in which some count the descriptors of the process calls this.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns a key of this process's own.
pub fn key() -> Key {
    key_of(u128::from(std::process::id()) << 64)
}

pub fn key_of(number: u128) -> Key {
    Key::from(number.to_ne_bytes())
}

/// Returns the place of that key.
pub fn place() -> Rendezvous {
    Rendezvous::from(key())
}

/// Returns the user of this process.
pub fn own_uid() -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid()
}

/// Admits the user of this process.
pub fn policy() -> Policy {
    let admits = |uid, _: &Endpoint| if uid == own_uid() { Ok(PeerUser::Known(uid)) } else { Err(Reason::User) };
    Policy { admits, evidence: Evidence::LookUp, keys: None }
}

/// A TCP connection within this process.
pub struct Connection {
    pub connected: TcpStream,
    pub accepted: TcpStream,
}

impl Connection {
    /// Connects to a listener at `listening` by the address `destination`, whose port is filled in.
    pub fn new(listening: &str, destination: &str) -> Self {
        let listener = TcpListener::bind(listening).unwrap();
        let mut destination: SocketAddr = destination.parse().unwrap();
        destination.set_port(listener.local_addr().unwrap().port());
        Self::to(&listener, destination)
    }

    pub fn to(listener: &TcpListener, destination: SocketAddr) -> Self {
        let connected = TcpStream::connect(destination).unwrap();
        Self { connected, accepted: listener.accept().unwrap().0 }
    }

    pub fn v4() -> Self {
        Self::new("127.0.0.1:0", "127.0.0.1:0")
    }

    pub fn endpoints(&self) -> (Endpoint, Endpoint) {
        let connected = Endpoint::of(self.connected.as_fd(), Role::Connected).unwrap();
        (connected, Endpoint::of(self.accepted.as_fd(), Role::Accepted).unwrap())
    }

    pub fn announce(&self) -> Accepting {
        Accepting::announce(&place(), self.accepted.as_fd(), &self.endpoints().1, &policy()).unwrap()
    }

    pub fn connect(&self) -> Result<Proposal, Reason> {
        Proposal::connect(&place(), &self.endpoints().0, &policy())
    }

    /// Lets both endpoints meet in this process.
    pub fn meet(&self) -> (Box<Met>, Box<Met>) {
        let memories = [memory(), memory()];
        let mut accepting = self.announce();
        assert_eq!(accepting.advance(self.accepted.as_fd()), Step::Waiting);
        let mut proposal = self.connect().unwrap();
        proposal.send(self.connected.as_fd(), &offer(&memories[0], 11)).unwrap();
        assert!(matches!(proposal.advance(self.connected.as_fd()), Answer::Waiting));
        assert_eq!(accepting.advance(self.accepted.as_fd()), Step::Proposed);
        assert_eq!(accepting.advance(self.accepted.as_fd()), Step::Proposed);
        let accepted = accepting.accept(&offer(&memories[1], 22)).unwrap();
        match proposal.advance(self.connected.as_fd()) {
            Answer::Met(connected) => (connected, accepted),
            answer => panic!("{answer:?}"),
        }
    }
}

/// Returns a read-only descriptor of sealed memory.
pub fn memory() -> OwnedFd {
    sealed(MEMORY_BYTES, SealFlags::SHRINK | SealFlags::GROW)
}

pub fn sealed(bytes: u64, seals: SealFlags) -> OwnedFd {
    let memory = rustix::fs::memfd_create("lane", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

pub fn offer(memory: &OwnedFd, secret: u64) -> Offer<'_> {
    Offer { descriptor: memory.as_fd(), memory: Memory::own(MEMORY_BYTES, secret) }
}
