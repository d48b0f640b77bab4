//! The proxy's endpoint of a direct connection.

use super::span_pool::{SpanAcceptance, SpanGrant, SpanPool, SpanProposal};
use crate::frame::ConnectionNumber;
use crate::local::Input;
use control::proxy::RetainedConnection;
use fabric::device::{Device, DeviceInbound};
use segment::Endpoint;
use socket::process::{blocking, system};
use socket::rendezvous::handshake::WindowSpans;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Whether and how a program's lifeline has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hangup {
    No,
    /// The program has closed it.
    Closed,
    /// The server never accepted it.
    NeverAccepted,
}

/// The proxy's endpoint of a direct connection: its lifeline, and the endpoint that it shares with the program.
///
/// The lifeline stays open as long as the program's end does, even when the other program is gone. If it ends, this
/// proxy has died and no monitor has retained it, and the program sees a reset.
#[derive(Debug)]
pub(super) struct DirectEndpoint {
    endpoint: Arc<Endpoint<DeviceInbound>>,
    lifeline: Arc<OwnedFd>,
    /// Held until both programs are gone.
    grant: SpanGrant,
    is_opener: bool,
    has_rung: bool,
    hangup: Hangup,
}

impl DirectEndpoint {
    fn new(endpoint: Endpoint<DeviceInbound>, lifeline: Arc<OwnedFd>, grant: SpanGrant, is_opener: bool) -> Self {
        let endpoint = Arc::new(endpoint);
        grant.expect_attach(&endpoint);
        Self { endpoint, lifeline, grant, is_opener, has_rung: false, hangup: Hangup::No }
    }

    /// Begins a connection in the span that this node proposed, with the lifeline of the program that connects. Also
    /// returns what the program receives. Returns `None` if the span cannot be marked as leased.
    pub(super) fn proposed(
        proposal: SpanProposal,
        number: ConnectionNumber,
        lifeline: Arc<OwnedFd>,
    ) -> Option<(Self, WindowSpans, OwnedFd)> {
        let SpanProposal { mut grant, spans, descriptor, endpoint } = proposal.marked_leased()?;
        grant.deposit(number, &lifeline);
        Some((Self::new(endpoint, lifeline, grant, true), spans, descriptor))
    }

    /// Begins a connection in the span that this node accepted, with the server's lifeline.
    pub(super) fn accepted(acceptance: SpanAcceptance, lifeline: OwnedFd) -> Self {
        Self::new(acceptance.endpoint, Arc::new(lifeline), acceptance.grant, false)
    }

    /// Continues a connection of an earlier proxy. Returns `None` if there is no such span, or another connection has
    /// it.
    pub(super) fn readopt(
        pool: &Arc<SpanPool>,
        device: &Device,
        retained: RetainedConnection,
        lifeline: OwnedFd,
    ) -> Option<Self> {
        let lifeline = Arc::new(lifeline);
        let (grant, endpoint) = pool.grant_retained(device, retained, &lifeline)?;
        let is_opener = ConnectionNumber(retained.number).opener() == pool.own_side();
        Some(Self::new(endpoint, lifeline, grant, is_opener))
    }

    pub(super) fn lifeline(&self) -> BorrowedFd<'_> {
        self.lifeline.as_fd()
    }

    pub(super) fn span_index(&self) -> u32 {
        self.grant.index()
    }

    /// Deposits a duplicate of the lifeline with the monitor.
    pub(super) fn deposit(&mut self, number: ConnectionNumber) {
        self.grant.deposit(number, &self.lifeline);
    }

    /// Returns what the next monitor needs to retain the connection after this proxy's monitor has died.
    pub(super) fn into_retained(self, number: ConnectionNumber) -> Option<(RetainedConnection, OwnedFd)> {
        let retained = self.grant.retained(number);
        let lifeline = Arc::try_unwrap(self.lifeline);
        lifeline.or_else(|shared| rustix::io::dup(&shared)).ok().map(|lifeline| (retained, lifeline))
    }

    /// Drains the rings from the lifeline, and checks whether it has ended.
    pub(super) fn poll_lifeline(&mut self) {
        let lifeline = self.lifeline.as_raw_fd();
        // Before draining, which clears the error.
        let events = blocking::poll_now(lifeline, libc::POLLIN);
        let _ = system::drain(lifeline);
        self.has_rung |= events & libc::POLLIN != 0;
        if events & libc::POLLHUP != 0 && self.hangup == Hangup::No {
            let is_attached = self.endpoint.is_attached();
            self.hangup = if is_attached || self.is_opener { Hangup::Closed } else { Hangup::NeverAccepted };
            let has_read = events & libc::POLLERR == 0;
            // The program has read the reply with its span, and ended without attaching.
            if has_read && !is_attached && self.grant.note_missed() {
                eprintln!(
                    "crosslane proxy: a program of this node could not map its part of the windows, or was killed just \
                     then; its connection has failed; see its limits (ulimit -v), or have trust = \"proxy\""
                );
            }
        }
    }

    pub(super) fn input(&mut self) -> Input {
        match self.hangup {
            Hangup::NeverAccepted => Input::Broken,
            Hangup::Closed => Input::Closed,
            Hangup::No if std::mem::take(&mut self.has_rung) => Input::Rang,
            Hangup::No => Input::Nothing,
        }
    }

    /// Wakes the program's sleeping threads.
    pub(super) fn wake(&self) {
        let _ = system::ring(self.lifeline.as_raw_fd());
    }

    pub(super) fn peer_closed(&self) {
        self.endpoint.note_left();
        self.wake();
    }

    pub(super) fn reset(&self) {
        self.endpoint.note_reset();
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::super::span_pool::tests::node;
    use super::*;
    use crate::frame::LinkSide;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use segment::{Secrets, Segment, Side};
    use volmem::{Mapping, Region};

    /// The proxy's endpoint of a connection with a span, and what its program has.
    fn connection(device: &Device, pool: &Arc<SpanPool>) -> (DirectEndpoint, OwnedFd, WindowSpans, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (lifeline, programs) = pair.expect("a pair");
        let proposal = pool.propose(device, false).expect("a free span");
        let number = ConnectionNumber::new(1, LinkSide::Lower);
        let (endpoint, spans, lease) = DirectEndpoint::proposed(proposal, number, Arc::new(lifeline)).expect("a lock");
        (endpoint, programs, spans, lease)
    }

    #[test]
    fn a_connection_counts_as_direct_once_its_program_attaches_and_as_missed_if_it_leaves_before() {
        let (device, pool, _monitor) = node();
        let (mut endpoint, lifeline, spans, lease) = connection(&device, &pool);
        assert_eq!(pool.counts(), (1, 0, 0), "a program that has not attached is not counted");
        let map = |offset| {
            let mapping = Mapping::at(lease.as_fd(), offset, spans.span_bytes()).expect("a mapping");
            Region::of_mapping(Arc::new(mapping))
        };
        let (inbound, outbound) = (map(spans.inbound_offset), map(spans.outbound_offset));
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        Segment::in_windows(&inbound, &outbound, Side::Connector, secrets).set_up();
        assert_eq!([pool.counts(), pool.counts()], [(1, 1, 0); 2]);
        drop(lifeline);
        endpoint.poll_lifeline();
        drop(endpoint);
        assert_eq!(pool.counts(), (0, 1, 0));

        let (mut endpoint, lifeline, ..) = connection(&device, &pool);
        drop(lifeline);
        endpoint.poll_lifeline();
        assert_eq!(endpoint.hangup, Hangup::Closed);
        drop(endpoint);
        assert_eq!(pool.counts(), (0, 1, 1), "it had the descriptor and did not map it");

        let (mut endpoint, lifeline, ..) = connection(&device, &pool);
        system::ring(endpoint.lifeline.as_raw_fd()).expect("room for a ring");
        drop(lifeline);
        endpoint.poll_lifeline();
        drop(endpoint);
        assert_eq!(pool.counts(), (0, 1, 1), "a program that has not read the reply does not know its span");
    }
}
