//! The proxy's endpoint of a program's connection, whichever path its bytes take.

use super::direct_endpoint::DirectEndpoint;
use super::epoll_set::EpollSet;
use super::segment_endpoint::SegmentEndpoint;
use super::tcp_endpoint::TcpEndpoint;
use crate::frame::ConnectionNumber;
use crate::local::{Broken, Input, LocalEndpoint};
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};
use lane::{Draft, Span};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// The proxy's endpoint of a connection.
#[derive(Debug)]
pub(super) enum ProgramEndpoint {
    /// The proxies forward the bytes.
    Forwarded(Box<SegmentEndpoint>),
    /// The programs write the windows themselves.
    Direct(DirectEndpoint),
    /// The proxies forward the bytes of a kernel TCP connection.
    Tcp(Box<TcpEndpoint>),
}

impl ProgramEndpoint {
    /// Watches its descriptors for a connection of an engine.
    pub(super) fn watch(&mut self, epoll: &EpollSet, engine: usize, key: ConnectionKey) -> Result<(), Errno> {
        match self {
            Self::Forwarded(endpoint) => epoll.add_lifeline(endpoint.lifeline(), engine, key),
            Self::Direct(endpoint) => epoll.add_lifeline(endpoint.lifeline(), engine, key),
            Self::Tcp(endpoint) => endpoint.watch(epoll, engine, key),
        }
    }

    /// Returns the descriptor of its program.
    pub(super) fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Forwarded(endpoint) => Some(endpoint.lifeline()),
            Self::Direct(endpoint) => Some(endpoint.lifeline()),
            Self::Tcp(endpoint) => endpoint.socket(),
        }
    }

    /// Returns the address to which the program has connected, if it opened the connection.
    pub(super) fn destination(&self) -> Option<SocketAddr> {
        match self {
            Self::Forwarded(endpoint) => endpoint.destination(),
            Self::Direct(_) => None,
            Self::Tcp(endpoint) => endpoint.destination(),
        }
    }

    /// Refuses the connection: the other node has no server.
    pub(super) fn refuse(self, errno: Errno) {
        match self {
            Self::Forwarded(endpoint) => endpoint.refuse(errno),
            Self::Direct(endpoint) => endpoint.reset(),
            Self::Tcp(endpoint) => endpoint.refuse(errno),
        }
    }
}

impl LocalEndpoint for ProgramEndpoint {
    #[inline]
    fn may_have_input(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.may_have_input(),
            Self::Direct(_) => false,
            Self::Tcp(endpoint) => endpoint.may_have_input(),
        }
    }

    #[inline]
    fn input(&mut self) -> Input {
        match self {
            Self::Forwarded(endpoint) => endpoint.input(),
            Self::Direct(endpoint) => endpoint.input(),
            Self::Tcp(endpoint) => endpoint.input(),
        }
    }

    #[inline]
    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        match self {
            Self::Forwarded(endpoint) => endpoint.copy_input(draft, len_bytes),
            Self::Direct(_) => {}
            Self::Tcp(endpoint) => endpoint.copy_input(draft, len_bytes),
        }
    }

    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        match self {
            Self::Forwarded(endpoint) => endpoint.read_input(skip_bytes, destination),
            Self::Direct(_) => {}
            Self::Tcp(endpoint) => endpoint.read_input(skip_bytes, destination),
        }
    }

    #[inline]
    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        match self {
            Self::Forwarded(endpoint) => endpoint.consume(len_bytes),
            Self::Tcp(endpoint) => endpoint.consume(len_bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    #[inline]
    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        match self {
            Self::Forwarded(endpoint) => endpoint.write_span(bytes),
            Self::Tcp(endpoint) => endpoint.write_span(bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        match self {
            Self::Forwarded(endpoint) => endpoint.write(bytes),
            Self::Tcp(endpoint) => endpoint.write(bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    fn set_yielding(&mut self, should_yield: bool) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.set_yielding(should_yield);
        }
    }

    #[inline]
    fn has_room(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.has_room(),
            Self::Tcp(endpoint) => endpoint.has_room(),
            Self::Direct(_) => false,
        }
    }

    #[inline]
    fn wake_sleeper(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.wake_sleeper(),
            Self::Tcp(endpoint) => endpoint.wake_sleeper(),
            Self::Direct(_) => false,
        }
    }

    fn finish(&mut self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.finish(),
            Self::Direct(_) => {}
            Self::Tcp(endpoint) => endpoint.finish(),
        }
    }

    fn close(self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.close(),
            Self::Tcp(endpoint) => endpoint.close(),
            Self::Direct(endpoint) => endpoint.peer_closed(),
        }
    }

    fn reset(self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.reset(),
            Self::Tcp(endpoint) => endpoint.reset(),
            Self::Direct(endpoint) => endpoint.reset(),
        }
    }

    #[inline]
    fn park(&mut self, for_room: bool) {
        match self {
            Self::Forwarded(endpoint) => endpoint.park(for_room),
            Self::Direct(_) => {}
            Self::Tcp(endpoint) => endpoint.park(for_room),
        }
    }

    #[inline]
    fn unpark(&mut self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.unpark(),
            Self::Direct(_) => {}
            Self::Tcp(endpoint) => endpoint.unpark(),
        }
    }

    fn reclaim(&mut self) {
        if let Self::Tcp(endpoint) = self {
            endpoint.reclaim();
        }
    }

    fn poll_lifeline(&mut self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.poll_lifeline(),
            Self::Direct(endpoint) => endpoint.poll_lifeline(),
            Self::Tcp(endpoint) => endpoint.poll_lifeline(),
        }
    }

    #[inline]
    fn is_broken(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.is_broken(),
            Self::Tcp(endpoint) => endpoint.is_broken(),
            Self::Direct(_) => false,
        }
    }

    fn opened(&mut self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.opened(),
            Self::Direct(_) => {}
            Self::Tcp(endpoint) => endpoint.opened(),
        }
    }

    fn has_span(&self) -> bool {
        if let Self::Tcp(endpoint) = self { endpoint.has_span() } else { false }
    }

    fn span_accepted(&mut self) -> bool {
        if let Self::Tcp(endpoint) = self { endpoint.span_accepted() } else { false }
    }

    fn take_ring(&mut self) -> bool {
        if let Self::Tcp(endpoint) = self { endpoint.take_ring() } else { false }
    }

    fn take_left(&mut self) -> bool {
        if let Self::Tcp(endpoint) = self { endpoint.take_left() } else { false }
    }

    fn peer_left(&mut self) {
        if let Self::Tcp(endpoint) = self {
            endpoint.peer_left();
        }
    }

    fn is_direct(&self) -> bool {
        matches!(self, Self::Direct(_))
    }

    fn move_to_span(&mut self, number: ConnectionNumber) -> bool {
        match self {
            Self::Forwarded(endpoint) => {
                let Some(direct) = endpoint.move_to_windows(number) else { return false };
                *self = Self::Direct(direct);
            }
            Self::Direct(endpoint) => endpoint.deposit(number),
            Self::Tcp(_) => return false,
        }
        true
    }

    fn span_index(&self) -> u32 {
        match self {
            Self::Forwarded(_) | Self::Tcp(_) => 0,
            Self::Direct(endpoint) => endpoint.span_index(),
        }
    }

    fn wake(&mut self) {
        match self {
            Self::Direct(endpoint) => DirectEndpoint::wake(endpoint),
            Self::Tcp(endpoint) => endpoint.wake(),
            Self::Forwarded(_) => {}
        }
    }

    fn peer_closed(&mut self) {
        if let Self::Direct(endpoint) = self {
            DirectEndpoint::peer_closed(endpoint);
        }
    }
}
