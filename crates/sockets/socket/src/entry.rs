//! The typed object behind each descriptor of the program.

use crate::connection::Connection;
use crate::descriptor::table::{self, Kind, Object};
use crate::epoll::EpollSet;
use crate::listener::Listener;
use crate::stream::Stream;
use std::os::fd::RawFd;

pub use crate::descriptor::table::can_hold;

/// The object that a descriptor refers to.
#[derive(Clone, Copy)]
pub enum Entry {
    /// None: only the kernel knows the descriptor.
    None,
    /// A connection with lanes.
    Connection(&'static Connection),
    /// A connection of a process that has installed a system call filter: the kernel serves it in everything that the
    /// filter does not concern.
    Confined(&'static Connection),
    /// A TCP listener that is accompanied by a lane listener.
    Listener(&'static Listener),
    /// A TCP socket without lanes, or without lanes so far.
    Stream(&'static Stream),
    /// An epoll instance that holds, or has held, one of the library's sockets.
    EpollSet(&'static EpollSet),
}

impl From<Object> for Entry {
    #[inline]
    fn from(object: Object) -> Self {
        let entry = match object.kind() {
            None => None,
            Some(Kind::Connection) => object.get().map(Self::Connection),
            Some(Kind::Confined) => object.get().map(Self::Confined),
            Some(Kind::Listener) => object.get().map(Self::Listener),
            Some(Kind::Stream) => object.get().map(Self::Stream),
            Some(Kind::EpollSet) => object.get().map(Self::EpollSet),
        };
        entry.unwrap_or(Self::None)
    }
}

impl From<Entry> for Object {
    fn from(entry: Entry) -> Self {
        match entry {
            Entry::None => Self::NONE,
            Entry::Connection(connection) => Self::new(Kind::Connection, connection),
            Entry::Confined(connection) => Self::new(Kind::Confined, connection),
            Entry::Listener(listener) => Self::new(Kind::Listener, listener),
            Entry::Stream(stream) => Self::new(Kind::Stream, stream),
            Entry::EpollSet(set) => Self::new(Kind::EpollSet, set),
        }
    }
}

/// Returns the entry of `fd`.
#[inline]
pub fn get(fd: RawFd) -> Entry {
    table::load(fd).into()
}

/// Returns the connection that `fd` refers to, if it is one.
#[inline]
pub fn connection(fd: RawFd) -> Option<&'static Connection> {
    match get(fd) {
        Entry::Connection(connection) => Some(connection),
        _ => None,
    }
}

/// Replaces the entry of `fd` and returns the previous one. A descriptor beyond the table is left to the kernel.
pub fn set(fd: RawFd, entry: Entry) -> Entry {
    table::swap(fd, entry.into()).into()
}

/// Runs `visit` on each descriptor in `range` that has an entry.
pub fn for_each(range: std::ops::RangeInclusive<RawFd>, mut visit: impl FnMut(RawFd, Entry)) {
    table::for_each(range, |fd, object| visit(fd, object.into()));
}
