//! The local end of a connection in a program's segment: the proxy's, as a stand-in for the program of the other node.

use crate::frame::ConnectionNumber;
use crate::{Broken, Input, LocalEndpoint};
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

use super::direct::{DirectEnd, Proposal};

/// How a program's lifeline has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hangup {
    No,
    /// Its last descriptor is gone.
    Closed,
    /// It was never accepted.
    Never,
}

/// The local end of a connection.
///
/// From its first moment it has told the program that it was reset: that counts only once the lifeline ends, and is
/// taken back before an end in good order. So a proxy that dies resets its connections.
#[derive(Debug)]
pub(super) struct SegmentEnd {
    segment: Segment,
    sender: Sender,
    receiver: Receiver,
    lifeline: Arc<OwnedFd>,
    chunk: Option<Chunk>,
    hangup: Hangup,
    /// The program waits for the other node's answer.
    owes_reply: bool,
    destination: Option<SocketAddr>,
    /// Where in the windows it may go instead.
    proposal: Option<Proposal>,
    end_is_seen: bool,
    has_written: bool,
    has_consumed: bool,
    /// The program has sent since it was last put something: it waits for an answer, or has given one.
    converses: bool,
    /// Where the sender stood when the program was last rung for.
    position: u64,
}

impl SegmentEnd {
    /// The end of a connection that a program has opened, and which waits for an answer, or that was opened to a
    /// server.
    pub(super) fn new(segment: Segment, lifeline: OwnedFd, owes_reply: bool) -> Self {
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
            owes_reply,
            destination: None,
            proposal: None,
            end_is_seen: false,
            has_written: false,
            has_consumed: false,
            converses: false,
            position,
        }
    }

    /// Notes what the program has connected to.
    pub(super) fn to(self, destination: SocketAddr) -> Self {
        Self { destination: Some(destination), ..self }
    }

    /// The other proxy has been asked for a place in the windows.
    pub(super) fn proposing(self, proposal: Option<Proposal>) -> Self {
        Self { proposal, ..self }
    }

    /// Goes to the place that was proposed: the program is told, and this end is done with. `None`: there was none.
    pub(super) fn move_to_windows(&mut self, number: ConnectionNumber) -> Option<DirectEnd> {
        let (direct, place, lease) = self.proposal.take()?.into_end(number, Arc::clone(&self.lifeline))?;
        if std::mem::take(&mut self.owes_reply) {
            let _ =
                rendezvous::send_reply(self.lifeline.as_fd(), ProxyReply::Accepted(Some(place)), Some(lease.as_fd()));
        }
        Some(direct)
    }

    /// What the program has connected to, where it is one that connects.
    pub(super) fn destination(&self) -> Option<SocketAddr> {
        self.destination
    }

    pub(super) fn lifeline(&self) -> BorrowedFd<'_> {
        self.lifeline.as_fd()
    }

    /// The other node has no server for the program.
    pub(super) fn refuse(mut self, errno: Errno) {
        self.reply(ProxyReply::Refused(errno));
        self.reset();
    }

    fn reply(&mut self, reply: ProxyReply) {
        if std::mem::take(&mut self.owes_reply) {
            // One that has gone does not want to know.
            let _ = rendezvous::send_reply(self.lifeline.as_fd(), reply, None);
        }
    }

    /// What there is to say once nothing is left to read.
    fn end(&mut self) -> Input {
        let is_closed = self.segment.status(PeerStatus::Closed) != 0;
        if !is_closed && self.hangup == Hangup::No {
            self.end_is_seen |= self.receiver.is_finished();
            return if self.end_is_seen { Input::Finished } else { Input::Nothing };
        }
        // What came before the end was written before it: look once more.
        match self.receiver.peek() {
            Ok(Some(chunk)) => self.show(chunk),
            Ok(None) if !self.is_broken() => Input::Closed,
            _ => Input::Broken,
        }
    }

    fn show(&mut self, chunk: Chunk) -> Input {
        self.chunk = Some(chunk);
        Input::Bytes(chunk.len_bytes)
    }
}

impl LocalEndpoint for SegmentEnd {
    #[inline]
    fn may_have_input(&mut self) -> bool {
        let may_have_data = !self.end_is_seen && self.receiver.may_have_data();
        may_have_data || self.segment.status(PeerStatus::Closed) != 0 || self.hangup != Hangup::No
    }

    fn input(&mut self) -> Input {
        match self.receiver.peek() {
            Ok(Some(chunk)) => self.show(chunk),
            Ok(None) => self.end(),
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
        self.converses = true;
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
        let mut sleeps = false;
        if std::mem::take(&mut self.has_written) {
            // Worth it for an answer, not in a stream.
            if std::mem::take(&mut self.converses) {
                self.sender.demote_since(self.position);
            }
            self.position = self.sender.position();
            sleeps |= self.sender.take_wake_request();
        }
        if std::mem::take(&mut self.has_consumed) {
            sleeps |= self.receiver.take_wake_request();
        }
        if sleeps {
            let _ = system::ring(self.lifeline.as_raw_fd());
        }
        sleeps
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
        // First: draining takes the error.
        let said = blocking::poll_now(lifeline, 0);
        let _ = system::drain(lifeline);
        if said & libc::POLLHUP != 0 && self.hangup == Hangup::No {
            let never_came = said & libc::POLLERR != 0 && self.segment.status(PeerStatus::Attached) == 0;
            self.hangup = if never_came { Hangup::Never } else { Hangup::Closed };
        }
    }

    /// TCP's rule: whoever goes with bytes unread resets.
    fn is_broken(&mut self) -> bool {
        let is_gone = self.hangup != Hangup::No || self.segment.status(PeerStatus::Closed) != 0;
        let was_reset = || self.segment.status(PeerStatus::Reset) != 0 || self.hangup == Hangup::Never;
        // One that said good-bye has said whether it was a reset; of one that was killed the memory tells.
        let was_killed_early = || self.segment.status(PeerStatus::Closed) == 0 && !self.sender.is_drained();
        is_gone && (was_reset() || was_killed_early())
    }

    fn opened(&mut self) {
        self.proposal.take().map(Proposal::refused).unwrap_or_default();
        self.reply(ProxyReply::Accepted(None));
    }
}

#[cfg(test)]
mod tests {
    use super::super::direct::ProgramEnd;
    use super::*;

    /// A program's side of a connection's memory, and the proxy's end of it.
    fn pair() -> (Segment, ProgramEnd) {
        let (programs, memfd) = Segment::create(segment::Side::Connector).expect("memory");
        programs.set_up();
        let proxys = Segment::open(&memfd, programs.secrets()).expect("its own memory");
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let kind = rustix::net::SocketType::STREAM;
        let (lifeline, _) =
            rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).expect("a pair");
        (programs, ProgramEnd::Carried(Box::new(SegmentEnd::new(proxys, lifeline, false))))
    }

    #[test]
    fn a_program_is_told_in_its_memory_to_give_way_and_that_it_need_not_any_more() {
        let (program, mut end) = pair();
        assert_eq!(program.status(PeerStatus::GiveWay), 0);
        end.set_yielding(true);
        assert_eq!(program.status(PeerStatus::GiveWay), 1);
        end.set_yielding(false);
        assert_eq!(program.status(PeerStatus::GiveWay), 0);
    }
}
