//! The proxy's endpoint of a connection in a program's segment, which stands in for the program of the other node.

use crate::frame::ConnectionNumber;
use crate::local::{Broken, Input, LocalEndpoint};
use fabric::{Inbound, Outbound};
use lane::{Chunk, Draft, Span};
use rustix::io::Errno;
use segment::{PeerStatus, Receiver, Segment, Sender};
use socket::process::blocking;
use socket::process::system;
use socket::rendezvous::{self, ProxyReply};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::direct_endpoint::DirectEndpoint;
use super::span_pool::SpanProposal;

/// Whether and how a program's lifeline has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hangup {
    No,
    /// Its last descriptor is closed.
    Closed,
    /// No server accepted it.
    NeverAccepted,
}

/// The proxy's endpoint of a connection whose bytes the proxies forward.
///
/// From the beginning its status in the segment is "reset". The program considers that only when the lifeline ends, and
/// an orderly close clears it. A proxy that dies therefore resets its connections.
#[derive(Debug)]
pub(super) struct SegmentEndpoint {
    segment: Segment,
    sender: Sender,
    receiver: Receiver,
    lifeline: Arc<OwnedFd>,
    chunk: Option<Chunk>,
    hangup: Hangup,
    /// The program waits for the reply of the other node.
    awaits_reply: bool,
    destination: Option<SocketAddr>,
    /// The span that was proposed for a direct connection.
    proposal: Option<SpanProposal>,
    has_reported_end: bool,
    has_written: bool,
    has_consumed: bool,
    /// The program has sent since bytes were last written to it: the traffic is requests and responses.
    is_conversation: bool,
    /// The sender's position when the program was last woken.
    position: u64,
}

impl SegmentEndpoint {
    /// Creates the endpoint of a connection that a program has opened, which awaits a reply, or that was opened to a
    /// server.
    pub(super) fn new(segment: Segment, lifeline: OwnedFd, awaits_reply: bool) -> Self {
        segment.publish(PeerStatus::Reset, 1);
        let (sender, receiver) = (segment.sender(), segment.receiver());
        let position = sender.position();
        Self {
            segment,
            sender,
            receiver,
            lifeline: Arc::new(lifeline),
            chunk: None,
            hangup: Hangup::No,
            awaits_reply,
            destination: None,
            proposal: None,
            has_reported_end: false,
            has_written: false,
            has_consumed: false,
            is_conversation: false,
            position,
        }
    }

    /// Sets the address to which the program has connected.
    pub(super) fn to(self, destination: SocketAddr) -> Self {
        Self { destination: Some(destination), ..self }
    }

    /// Sets the span that was proposed to the other proxy.
    pub(super) fn proposing(self, proposal: Option<SpanProposal>) -> Self {
        Self { proposal, ..self }
    }

    /// Makes the connection direct, in the proposed span, and tells the program. This endpoint is used no more. Returns
    /// `None` if no span was proposed.
    pub(super) fn move_to_windows(&mut self, number: ConnectionNumber) -> Option<DirectEndpoint> {
        let (direct, spans, lease) =
            DirectEndpoint::proposed(self.proposal.take()?, number, Arc::clone(&self.lifeline))?;
        if std::mem::take(&mut self.awaits_reply) {
            let _ =
                rendezvous::send_reply(self.lifeline.as_fd(), ProxyReply::Accepted(Some(spans)), Some(lease.as_fd()));
        }
        Some(direct)
    }

    /// Returns the address to which the program has connected, if it opened the connection.
    pub(super) fn destination(&self) -> Option<SocketAddr> {
        self.destination
    }

    pub(super) fn lifeline(&self) -> BorrowedFd<'_> {
        self.lifeline.as_fd()
    }

    /// Refuses the connection: the other node has no server.
    pub(super) fn refuse(mut self, errno: Errno) {
        self.reply(ProxyReply::Refused(errno));
        self.reset();
    }

    fn reply(&mut self, reply: ProxyReply) {
        if std::mem::take(&mut self.awaits_reply) {
            // A program that has closed does not read the reply.
            let _ = rendezvous::send_reply(self.lifeline.as_fd(), reply, None);
        }
    }

    /// Returns the state of the program's sending direction when no bytes are left.
    fn input_end(&mut self) -> Input {
        let is_closed = self.segment.status(PeerStatus::Closed) != 0;
        if !is_closed && self.hangup == Hangup::No {
            self.has_reported_end |= self.receiver.is_finished();
            return if self.has_reported_end { Input::Finished } else { Input::Nothing };
        }
        // Bytes before the end were written before it: check once more.
        match self.receiver.peek() {
            Ok(Some(chunk)) => self.report_bytes(chunk),
            Ok(None) if !self.is_broken() => Input::Closed,
            _ => Input::Broken,
        }
    }

    fn report_bytes(&mut self, chunk: Chunk) -> Input {
        self.chunk = Some(chunk);
        Input::Bytes(chunk.len_bytes)
    }
}

impl LocalEndpoint for SegmentEndpoint {
    #[inline]
    fn may_have_input(&mut self) -> bool {
        let may_have_data = !self.has_reported_end && self.receiver.may_have_data();
        may_have_data || self.segment.status(PeerStatus::Closed) != 0 || self.hangup != Hangup::No
    }

    fn input(&mut self) -> Input {
        match self.receiver.peek() {
            Ok(Some(chunk)) => self.report_bytes(chunk),
            Ok(None) => self.input_end(),
            Err(_) => Input::Broken,
        }
    }

    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        let chunk = self.chunk.expect("input returned bytes");
        draft.append_span(&self.receiver.span(chunk).part(0, len_bytes));
    }

    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        let chunk = self.chunk.expect("input returned bytes");
        self.receiver.span(chunk).part(skip_bytes, destination.len()).read(destination);
    }

    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        self.has_consumed = true;
        self.is_conversation = true;
        self.receiver.consume(len_bytes).map_err(|_| Broken)
    }

    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        self.has_written = true;
        self.sender.write_span(bytes).map_err(|_| Broken)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        self.has_written = true;
        self.sender.write(bytes).map_err(|_| Broken)
    }

    fn has_room(&mut self) -> bool {
        self.sender.is_writable().unwrap_or(true)
    }

    fn wake_sleeper(&mut self) -> bool {
        let mut has_woken = false;
        if std::mem::take(&mut self.has_written) {
            // Demoting the lines helps a response, and costs a stream.
            if std::mem::take(&mut self.is_conversation) {
                self.sender.demote_since(self.position);
            }
            self.position = self.sender.position();
            has_woken |= self.sender.take_wake_request();
        }
        if std::mem::take(&mut self.has_consumed) {
            has_woken |= self.receiver.take_wake_request();
        }
        if has_woken {
            let _ = system::ring(self.lifeline.as_raw_fd());
        }
        has_woken
    }

    fn set_yielding(&mut self, should_yield: bool) {
        self.segment.publish(PeerStatus::GiveWay, u64::from(should_yield));
    }

    fn finish(&mut self) {
        self.sender.finish();
        self.has_written = true;
    }

    fn close(mut self) {
        self.sender.finish();
        self.segment.publish(PeerStatus::Reset, 0);
        self.segment.publish(PeerStatus::Closed, 1);
    }

    fn reset(mut self) {
        self.reply(ProxyReply::Refused(Errno::NETUNREACH));
        self.sender.finish();
        self.segment.publish(PeerStatus::Closed, 1);
    }

    fn park(&mut self, for_room: bool) {
        self.receiver.announce_sleep();
        if for_room {
            self.sender.announce_sleep();
        }
    }

    fn unpark(&mut self) {
        self.receiver.cancel_sleep();
        self.sender.cancel_sleep();
    }

    fn poll_lifeline(&mut self) {
        let lifeline = self.lifeline.as_raw_fd();
        // Before draining, which clears the error.
        let events = blocking::poll_now(lifeline, 0);
        let _ = system::drain(lifeline);
        if events & libc::POLLHUP != 0 && self.hangup == Hangup::No {
            let never_came = events & libc::POLLERR != 0 && self.segment.status(PeerStatus::Attached) == 0;
            self.hangup = if never_came { Hangup::NeverAccepted } else { Hangup::Closed };
        }
    }

    /// As in TCP, a program that closes with bytes unread resets the connection.
    fn is_broken(&mut self) -> bool {
        let is_gone = self.hangup != Hangup::No || self.segment.status(PeerStatus::Closed) != 0;
        let was_reset = || self.segment.status(PeerStatus::Reset) != 0 || self.hangup == Hangup::NeverAccepted;
        // A program that has closed has stored whether it was a reset. For a killed one, unread bytes in the memory
        // tell.
        let was_killed_early = || self.segment.status(PeerStatus::Closed) == 0 && !self.sender.is_drained();
        is_gone && (was_reset() || was_killed_early())
    }

    fn opened(&mut self) {
        self.proposal.take().map(SpanProposal::refused).unwrap_or_default();
        self.reply(ProxyReply::Accepted(None));
    }
}

#[cfg(test)]
mod tests {
    use super::super::program_endpoint::ProgramEndpoint;
    use super::*;

    /// Returns a program's side of a connection's memory, and the proxy's endpoint.
    fn pair() -> (Segment, ProgramEndpoint) {
        let (of_program, memfd) = Segment::create(segment::Side::Connector).expect("memory");
        of_program.set_up();
        let of_proxy = Segment::open(&memfd, of_program.secrets()).expect("its own memory");
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let kind = rustix::net::SocketType::STREAM;
        let (lifeline, _) =
            rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).expect("a pair");
        (of_program, ProgramEndpoint::Forwarded(Box::new(SegmentEndpoint::new(of_proxy, lifeline, false))))
    }

    #[test]
    fn a_program_learns_from_its_memory_whether_to_yield() {
        let (program, mut end) = pair();
        assert_eq!(program.status(PeerStatus::GiveWay), 0);
        end.set_yielding(true);
        assert_eq!(program.status(PeerStatus::GiveWay), 1);
        end.set_yielding(false);
        assert_eq!(program.status(PeerStatus::GiveWay), 0);
    }
}
