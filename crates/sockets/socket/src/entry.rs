//! What each descriptor of the program stands for, by type.

use crate::connection::Connection;
use crate::descriptor::table::{self, Kind, Object};
use crate::epoll::EpollSet;
use crate::listener::Listener;
use crate::stream::Stream;
use std::os::fd::RawFd;

pub use crate::descriptor::table::can_hold;

/// What a descriptor stands for.
#[derive(Clone, Copy)]
pub enum Entry {
    /// Nothing: only the kernel knows it.
    None,
    /// A connection with lanes.
    Connection(&'static Connection),
    /// A connection of a process under a system call filter of its own: the kernel answers for it in all that the
    /// filter does not concern.
    Confined(&'static Connection),
    /// A TCP listener with a lane listener beside it.
    Listener(&'static Listener),
    /// A TCP socket that has no lane, or none yet.
    Stream(&'static Stream),
    /// An epoll instance that has held a connection of ours.
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

/// Returns what `fd` stands for.
#[inline]
pub fn get(fd: RawFd) -> Entry {
    table::load(fd).into()
}

/// Returns the connection that `fd` stands for, if it is one.
#[inline]
pub fn connection(fd: RawFd) -> Option<&'static Connection> {
    match get(fd) {
        Entry::Connection(connection) => Some(connection),
        _ => None,
    }
}

/// Enters what `fd` stands for from now on. Returns what it stood for. A descriptor beyond the table stays the
/// kernel's.
pub fn set(fd: RawFd, entry: Entry) -> Entry {
    table::swap(fd, entry.into()).into()
}

/// Runs `visit` on each descriptor in a range that stands for an object of ours.
pub fn for_each(range: std::ops::RangeInclusive<RawFd>, mut visit: impl FnMut(RawFd, Entry)) {
    table::for_each(range, |fd, object| visit(fd, object.into()));
}
