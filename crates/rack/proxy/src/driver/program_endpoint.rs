//! The proxy's endpoint of a program's connection, whichever path its bytes take.

use super::direct_endpoint::DirectEndpoint;
use super::segment_endpoint::SegmentEndpoint;
use crate::frame::ConnectionNumber;
use crate::local::{Broken, Input, LocalEndpoint};
use fabric::{Inbound, Outbound};
use lane::{Draft, Span};
use std::os::fd::BorrowedFd;

/// The proxy's endpoint of a connection.
#[derive(Debug)]
pub(super) enum ProgramEndpoint {
    /// The proxies forward the bytes.
    Forwarded(Box<SegmentEndpoint>),
    /// The programs write the windows themselves.
    Direct(DirectEndpoint),
}

impl ProgramEndpoint {
    pub(super) fn lifeline(&self) -> BorrowedFd<'_> {
        match self {
            Self::Forwarded(endpoint) => endpoint.lifeline(),
            Self::Direct(endpoint) => endpoint.lifeline(),
        }
    }
}

impl LocalEndpoint for ProgramEndpoint {
    #[inline]
    fn may_have_input(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.may_have_input(),
            Self::Direct(_) => false,
        }
    }

    #[inline]
    fn input(&mut self) -> Input {
        match self {
            Self::Forwarded(endpoint) => endpoint.input(),
            Self::Direct(endpoint) => endpoint.input(),
        }
    }

    #[inline]
    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.copy_input(draft, len_bytes);
        }
    }

    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.read_input(skip_bytes, destination);
        }
    }

    #[inline]
    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        match self {
            Self::Forwarded(endpoint) => endpoint.consume(len_bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    #[inline]
    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        match self {
            Self::Forwarded(endpoint) => endpoint.write_span(bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        match self {
            Self::Forwarded(endpoint) => endpoint.write(bytes),
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
            Self::Direct(_) => false,
        }
    }

    #[inline]
    fn wake_sleeper(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.wake_sleeper(),
            Self::Direct(_) => false,
        }
    }

    fn finish(&mut self) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.finish();
        }
    }

    fn close(self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.close(),
            Self::Direct(endpoint) => endpoint.peer_closed(),
        }
    }

    fn reset(self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.reset(),
            Self::Direct(endpoint) => endpoint.reset(),
        }
    }

    #[inline]
    fn park(&mut self, for_room: bool) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.park(for_room);
        }
    }

    #[inline]
    fn unpark(&mut self) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.unpark();
        }
    }

    fn poll_lifeline(&mut self) {
        match self {
            Self::Forwarded(endpoint) => endpoint.poll_lifeline(),
            Self::Direct(endpoint) => endpoint.poll_lifeline(),
        }
    }

    #[inline]
    fn is_broken(&mut self) -> bool {
        match self {
            Self::Forwarded(endpoint) => endpoint.is_broken(),
            Self::Direct(_) => false,
        }
    }

    fn opened(&mut self) {
        if let Self::Forwarded(endpoint) = self {
            endpoint.opened();
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
        }
        true
    }

    fn span_index(&self) -> u32 {
        match self {
            Self::Forwarded(_) => 0,
            Self::Direct(endpoint) => endpoint.span_index(),
        }
    }

    fn wake(&mut self) {
        if let Self::Direct(endpoint) = self {
            DirectEndpoint::wake(endpoint);
        }
    }

    fn peer_closed(&mut self) {
        if let Self::Direct(endpoint) = self {
            DirectEndpoint::peer_closed(endpoint);
        }
    }
}
