//! The upgrade of a connection from its lifeline to lanes, by messages of one byte with a descriptor in the stream
//! itself:
//!
//! * `OFFER`: the sender offers memory for both directions.
//! * `SWITCH`: after this byte, the sender sends by a lane in the attached memory.
//! * `FOLLOW`: the same, in the memory that the receiver of the message has sent.
//!
//! The accepting endpoint offers memory once a connection has proved busy; the connecting one attaches it and follows.
//! An endpoint whose lifeline is full switches without an offer, since its peer may not read for long, and so does one
//! that only sends. An endpoint that receives a `SWITCH` or `FOLLOW` receives by the lane from then on, and follows if
//! it has not switched itself. An endpoint that cannot attach memory, or must not because several processes hold it,
//! ignores an offer, and the connection stays as it is. An endpoint that has switched also ignores an offer. If two
//! offers cross, that of the connecting endpoint is used; if both endpoints switch at the same time, each direction has
//! memory of its own.
//!
//! Rings are bytes too: an endpoint rings only once its sends use a lane, and a sender that waits for room in its lane
//! before its peer has followed polls once a millisecond.

use super::super::lane_kinds::LaneReceiver;
use super::super::lanes::Lanes;
use super::super::{Connection, Details, PeerState, SHUTDOWN_WRITE};
use super::dispatch::Purpose;
use super::message::{self, FOLLOW, Message, OFFER, SWITCH, send_message};
use super::{Lookahead, lane_peers};
use crate::descriptor::hidden::{HiddenFd, Need, close};
use crate::options::OptionRecord;
use crate::process::clock::{note_ticks, ticks};
use crate::process::system::is_inheritable;
use crate::process::{limit, signals, system};
use crate::rendezvous::local_page::MemoryFds;
use rustix::io::Errno;
use segment::{BY_LANE_RECEIVE, BY_LANE_SEND, OwnState, PeerStatus, RECEIVES_ELSEWHERE, RECEIVES_ONLY, Segment, Side};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

/// Most messages that an endpoint sends.
const MESSAGES_MAX: u32 = 4;
/// Requests to the accepting endpoint, each in one receive or several, before it offers lanes with its next response. A
/// connection for one request and one response is over by then.
const REQUESTS_BEFORE_OFFER: u32 = 2;
/// Sends without a receive in between before an endpoint switches. They take as long as the switch itself; a response,
/// even one that is written in many parts, is over by then.
const SENDS_BEFORE_SWITCH: u32 = 32;
/// The default size of an AF_UNIX stream's buffer (`net.core.wmem_default`).
const LIFELINE_BYTES: usize = 212_992;

/// Memory that this endpoint has offered.
pub(super) struct OfferedMemory {
    pub segment: Segment,
    memory: Option<MemoryFds<HiddenFd>>,
}

impl Connection {
    /// Handles the message that has been received.
    ///
    /// # Errors
    /// `AGAIN` in a signal handler that has interrupted the holder of the connection; `CONNRESET` if the memory that
    /// carries bytes cannot be attached.
    pub(super) fn handle_pending_message(&'static self) -> Result<(), Errno> {
        let _both = self.lock_both().ok_or(Errno::AGAIN)?;
        self.lifeline_path.has_pending_message.store(false, Ordering::Relaxed);
        // SAFETY: the receive lock is held, which protects the cell.
        let Some(Message { kind, memory }) = (unsafe { (*self.lifeline_path.pending_message.get()).take() }) else {
            return Ok(());
        };
        if self.lifeline_path.messages_received.fetch_add(1, Ordering::Relaxed) >= MESSAGES_MAX {
            memory.into_iter().for_each(close);
            return Err(self.abort());
        }
        match kind {
            OFFER => {
                self.accept_offer(memory);
                Ok(())
            }
            SWITCH => self.handle_switch(memory),
            FOLLOW => self.handle_follow(memory),
            _ => Err(self.abort()),
        }
    }

    /// Resets the connection because the peer broke the protocol, or because memory that carries bytes cannot be
    /// attached. The next call reports the error. The end of the lifeline wakes both endpoints: the peer may have sent
    /// what nobody will read.
    pub(in crate::connection) fn abort(&self) -> Errno {
        self.lifeline_path.note_reset();
        if let Some(lanes) = self.lanes() {
            self.note_corruption(lanes);
            lanes.segment.store(OwnState::PendingError, self.lifeline_path.error.swap(0, Ordering::Relaxed));
        }
        let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Both);
        Errno::CONNRESET
    }

    /// Clears the error of [`Connection::abort`], which the call reports.
    pub(super) fn take_reported_error(&self) {
        self.lifeline_path.take_error();
        if let Some(lanes) = self.lanes() {
            lanes.segment.store(OwnState::PendingError, 0);
        }
    }

    /// Handles an `OFFER`. The caller holds both locks.
    fn accept_offer(&'static self, memory: Option<OwnedFd>) {
        let Some(memory) = memory else { return };
        let joined = if self.lanes().is_none() && !self.own_offer_wins() && self.may_get_lanes() {
            Segment::join(&memory, self.lifeline_path.side()).ok()
        } else {
            None
        };
        self.note_unread();
        match joined {
            Some(segment) if self.send_lane_message(FOLLOW, memory.as_fd()).is_ok() => {
                self.withdraw_offer();
                self.begin_lanes(segment, MemorySource::Received(memory), BY_LANE_SEND);
            }
            joined => {
                joined.iter().for_each(Segment::undo_join);
                close(memory);
            }
        }
    }

    /// Returns whether an offer of this endpoint takes precedence over one of the peer that crosses it. The caller
    /// holds the send lock.
    pub(super) fn own_offer_wins(&self) -> bool {
        // SAFETY: the caller holds the send lock, which protects the cell.
        self.lifeline_path.side() == Side::Connector && unsafe { (*self.lifeline_path.offered.get()).is_some() }
    }

    /// Handles a `SWITCH`: the peer sends by a lane from here on, in memory that it has sent. The caller holds both
    /// locks.
    fn handle_switch(&'static self, memory: Option<OwnedFd>) -> Result<(), Errno> {
        let Some(memory) = memory else { return Err(self.abort()) };
        if let Some(lanes) = self.lanes() {
            let is_at_hand = self.is_memory_of(lanes, &memory);
            let descriptor = if is_at_hand { Some(memory) } else { self.attach_inbound(memory).map(|()| None)? };
            self.begin_to_receive_by_lane();
            // An endpoint that attached the memory in advance has not switched itself.
            self.follow_peer(descriptor);
            return Ok(());
        }
        self.withdraw_offer();
        let Ok(segment) = Segment::join(&memory, self.lifeline_path.side()) else {
            close(memory);
            return Err(self.abort());
        };
        let copy = rustix::io::fcntl_dupfd_cloexec(&memory, 0).ok();
        self.begin_lanes(segment, MemorySource::Received(memory), BY_LANE_RECEIVE);
        self.follow_peer(copy);
        Ok(())
    }

    /// Attaches the memory of a `SWITCH` or `FOLLOW` before the message comes first, so that its contents can be read.
    /// Returns whether it could. The caller holds both locks.
    pub(in crate::connection) fn attach_in_advance(&'static self, memory: OwnedFd) -> bool {
        if let Some(lanes) = self.lanes() {
            if self.is_memory_of(lanes, &memory) {
                close(memory);
                return true;
            }
            return self.attach_inbound(memory).is_ok();
        }
        let is_known = memfd_inode(&memory) == self.lifeline_path.inode.load(Ordering::Relaxed);
        if let Some(OfferedMemory { segment, memory: own }) = self.withdraw_offer().filter(|_| is_known) {
            close(memory);
            self.begin_lanes(segment, MemorySource::Own(own), 0);
            return true;
        }
        match Segment::join(&memory, self.lifeline_path.side()) {
            Ok(segment) => {
                self.begin_lanes(segment, MemorySource::Received(memory), 0);
                true
            }
            Err(_) => {
                close(memory);
                false
            }
        }
    }

    /// Attaches the memory of the first message in advance, if that is a `SWITCH` or `FOLLOW`. The caller holds both
    /// locks.
    pub(in crate::connection) fn attach_next_memory(&'static self) {
        match self.look_ahead() {
            Lookahead { message: Some(SWITCH | FOLLOW), memory: Some(memory), .. } => {
                self.attach_in_advance(memory);
            }
            Lookahead { memory, .. } => memory.into_iter().for_each(close),
        }
    }

    /// Handles a `FOLLOW`: the peer sends by a lane from here on, in memory that this endpoint has sent. The caller
    /// holds both locks.
    fn handle_follow(&'static self, received: Option<OwnedFd>) -> Result<(), Errno> {
        if self.lanes().is_some() {
            self.begin_to_receive_by_lane();
            self.follow_peer(received);
            return Ok(());
        }
        let Some(OfferedMemory { segment, memory }) = self.withdraw_offer() else {
            // A process that held this endpoint before has sent the memory, and only the message has it.
            return self.handle_switch(received);
        };
        self.begin_lanes(segment, MemorySource::Own(memory), BY_LANE_RECEIVE);
        self.follow_peer(received);
        Ok(())
    }

    /// Makes receives use the lane. The caller holds both locks.
    fn begin_to_receive_by_lane(&self) {
        signals::without_handlers(|| self.use_lanes_for(BY_LANE_RECEIVE));
        self.announce_earlier_sleepers();
    }

    /// Returns whether `memory`, which a message brings, is attached, for both directions or for the incoming one. The
    /// caller holds a lock of the connection.
    pub(super) fn is_memory_of(&self, lanes: &Lanes, memory: &OwnedFd) -> bool {
        // SAFETY: the cell is written only under both locks, and the caller holds one.
        let has_inbound = unsafe { &*lanes.inbound.get() }.is_some();
        has_inbound || memfd_inode(memory) == self.lifeline_path.inode.load(Ordering::Relaxed)
    }

    /// Attaches the memory of the incoming lane, because both endpoints have switched at the same time, each to memory
    /// of its own. The caller holds both locks.
    fn attach_inbound(&self, memory: OwnedFd) -> Result<(), Errno> {
        let Ok(inbound) = Segment::join(&memory, self.lifeline_path.side()) else {
            close(memory);
            return Err(self.abort());
        };
        self.set_inbound(inbound, memory);
        Ok(())
    }

    /// Adopts the memory of the incoming lane from a process that held this endpoint before, for a connection that this
    /// process has just opened.
    pub fn adopt_inbound(&'static self, inbound: Segment, memory: OwnedFd) {
        // A signal handler that has interrupted the holder must change nothing.
        let Some(_both) = self.lock_both() else { return };
        // SAFETY: both locks are held, under which the cell is written.
        if self.lanes().is_some_and(|lanes| unsafe { &*lanes.inbound.get() }.is_none()) {
            self.set_inbound(inbound, memory);
        }
    }

    /// Makes `inbound` the memory of the incoming lane. The caller holds both locks, and that lane is not in use.
    fn set_inbound(&self, inbound: Segment, memory: OwnedFd) {
        let Some(lanes) = self.lanes() else { return };
        let requested = self.with_details(Details::requested_options);
        let mut receiver = LaneReceiver::of(&inbound);
        receiver.set_capacity(requested.receive_bytes);
        inbound.note_by_lane(RECEIVES_ONLY);
        lanes.segment.note_by_lane(RECEIVES_ELSEWHERE);
        // SAFETY: the caller holds both locks, and no thread polls a lane that is not in use.
        unsafe {
            *lanes.receiver.get() = receiver;
            *lanes.observer.get() = LaneReceiver::of(&inbound);
            *lanes.inbound.get() = Some(Box::new(inbound));
        }
        let inbound = HiddenFd::hide(memory, Need::Optional).ok();
        self.with_details(|details| details.memory.as_mut().map(|memory| memory.inbound = inbound));
        self.set_inheritable_locked(self.has_descriptor(is_inheritable));
    }

    /// Follows a peer that has switched, unless this endpoint has switched itself. The message may carry any
    /// descriptor: `descriptor`, or a copy of the memory's own. Returns whether sends use the lane. The caller holds
    /// the send lock.
    pub(in crate::connection) fn follow_peer(&self, descriptor: Option<OwnedFd>) -> bool {
        let Some(lanes) = self.lanes().filter(|_| self.receives_by_lane() && !self.sends_by_lane()) else {
            descriptor.into_iter().for_each(close);
            return self.sends_by_lane();
        };
        let are_rights_refused = self.lifeline_path.are_rights_refused.load(Ordering::Relaxed);
        // The other processes would go on to send by the lifeline.
        let is_shared = self.lifeline_path.is_shared.load(Ordering::Relaxed) && self.may_have_other_holders();
        if is_shared || are_rights_refused || lanes.segment.load(OwnState::Shutdown) & SHUTDOWN_WRITE != 0 {
            descriptor.into_iter().for_each(close);
            return false;
        }
        let copy = || self.with_details(|details| details.memory.as_ref().and_then(duplicate_memfd));
        let Some(descriptor) = descriptor.or_else(copy) else { return false };
        self.send_follow(descriptor)
    }

    /// Sends a `FOLLOW` with any descriptor, and by the lane from then on. Returns `false` if the message cannot be
    /// sent. The caller holds the send lock.
    fn send_follow(&self, descriptor: OwnedFd) -> bool {
        self.note_unread();
        let sent = self.send_lane_message(FOLLOW, descriptor.as_fd());
        close(descriptor);
        if sent.is_ok() {
            signals::without_handlers(|| self.use_lanes_for(BY_LANE_SEND));
        }
        sent.is_ok()
    }

    /// Returns whether the endpoint may get lanes: only this process holds it, and it can still announce that to a
    /// connected peer. Before a fork every endpoint gets lanes that can, so what remains are children by `vfork`, which
    /// keep what survives `exec`.
    pub(in crate::connection) fn may_get_lanes(&self) -> bool {
        let can_announce =
            !self.is_shut(SHUTDOWN_WRITE) && self.lifeline_path.peer.load(Ordering::Relaxed) == PeerState::Alive as u64;
        let may_be_left = || self.may_have_other_holders() && self.has_descriptor(is_inheritable);
        can_announce
            && !self.lifeline_path.is_shared.load(Ordering::Relaxed)
            && !self.lifeline_path.are_rights_refused.load(Ordering::Relaxed)
            && !self.is_transferred.load(Ordering::Relaxed)
            && !may_be_left()
            && limit::has_spare_mappings()
    }

    /// Switches to lanes without waiting for the peer. Returns `false` if the endpoint stays on the lifeline.
    pub(in crate::connection) fn switch_to_lanes(&'static self) -> bool {
        let Some(_both) = self.lock_both() else { return false };
        if !self.is_open() || self.awaits_handshake.load(Ordering::Relaxed) {
            return false;
        }
        if self.sends_by_lane() {
            return true;
        }
        if !self.may_get_lanes() {
            return false;
        }
        if self.lanes().is_some() {
            // Attached before the peer's message comes first.
            let memory = self.with_details(|details| details.memory.as_ref().and_then(duplicate_memfd));
            return memory.is_some_and(|memory| self.send_follow(memory));
        }
        let (segment, memory, message) = match self.memory_for_switch() {
            Ok(found) => found,
            Err(_) => return false,
        };
        self.note_unread();
        if self.send_lane_message(message, memory.as_fd()).is_err() {
            segment.undo_join();
            close(memory);
            return false;
        }
        self.begin_lanes(segment, MemorySource::Received(memory), BY_LANE_SEND);
        true
    }

    /// Gives lanes to an endpoint that has to hold bytes back. Returns `false` if it stays on the lifeline. An endpoint
    /// that responds to the only request so far gets none: nearly always the connection ends then, and with lanes it
    /// took nginx (`tcp_nopush`, without keep-alive) twice the processor time.
    pub(in crate::connection) fn switch_for_cork(&'static self) -> bool {
        let is_acceptor = self.lifeline_path.is_acceptor.load(Ordering::Relaxed);
        let responds_first = (1..REQUESTS_BEFORE_OFFER).contains(&self.lifeline_path.requests.load(Ordering::Relaxed));
        !(is_acceptor && responds_first) && self.switch_to_lanes()
    }

    /// Switches to lanes, before a send, if this process has other connections with lanes to the same address. What is
    /// sent by lanes is stamped as later than this.
    pub(super) fn switch_for_order(&'static self) {
        let lifeline_path = &self.lifeline_path;
        note_ticks(ticks());
        if lifeline_path.is_acceptor.load(Ordering::Relaxed)
            || lifeline_path.has_switched_for_order.load(Ordering::Relaxed)
        {
            return;
        }
        if self.tuple().is_some_and(|tuple| lane_peers::is_any(tuple.peer)) {
            lifeline_path.has_switched_for_order.store(true, Ordering::Relaxed);
            self.switch_to_lanes();
        }
    }

    /// Switches to lanes, before a send, if the program has sent for long without receiving anything. The lifeline of a
    /// peer that reads as fast as this program sends never fills up.
    pub(super) fn switch_for_stream(&'static self) {
        // Not above: if the switch fails, it is not tried again before something was received.
        if self.unanswered_sends.load(Ordering::Relaxed) == SENDS_BEFORE_SWITCH {
            self.switch_to_lanes();
        }
    }

    /// Returns the memory to switch to, with the message that announces it: memory that the peer has sent, even if
    /// bytes before it are unread; memory that was offered; or new memory. The caller holds both locks.
    fn memory_for_switch(&self) -> Result<(Segment, OwnedFd, u8), Errno> {
        let own_offer_wins = self.own_offer_wins();
        let offered = self.withdraw_offer();
        if let Some((segment, memory)) = self.memory_from_peer(own_offer_wins) {
            return Ok((segment, memory, FOLLOW));
        }
        if let Some(OfferedMemory { segment, memory }) = offered
            && let Some(copy) = memory.as_ref().and_then(duplicate_memfd)
        {
            return Ok((segment, copy, SWITCH));
        }
        let (segment, memory) =
            limit::with_free_descriptor(self.borrow_lifeline(), || create_segment(self.lifeline_path.side()))?;
        // The creation takes long enough for the peer to switch meanwhile, as it does if both programs fork at once.
        if let Some((peers_segment, peers_memory)) = self.memory_from_peer(own_offer_wins) {
            close(memory);
            return Ok((peers_segment, peers_memory, FOLLOW));
        }
        // A peer with another capacity would have announced it; a part of this capacity is in the lifeline.
        let in_lifeline = self.with_details(|details| details.options.send_capacity_bytes()).min(LIFELINE_BYTES);
        segment.presume_capacity(OptionRecord::default().receive_capacity_bytes().saturating_sub(in_lifeline / 4));
        Ok((segment, memory, SWITCH))
    }

    /// Returns memory that the peer has sent and that this endpoint can switch to, even if bytes before the message are
    /// unread. The caller holds both locks.
    fn memory_from_peer(&self, own_offer_wins: bool) -> Option<(Segment, OwnedFd)> {
        let Lookahead { message, memory, .. } = self.look_ahead();
        let memory = memory?;
        let counts = message == Some(SWITCH) || (message == Some(OFFER) && !own_offer_wins);
        match if counts { Segment::join(&memory, self.lifeline_path.side()) } else { Err(Errno::INVAL) } {
            Ok(segment) => Some((segment, memory)),
            Err(_) => {
                close(memory);
                None
            }
        }
    }

    /// Sends a message to the peer, unless its kernel refuses descriptors. The caller holds the send lock.
    fn send_lane_message(&self, kind: u8, memory: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.lifeline_path.are_rights_refused.load(Ordering::Relaxed) {
            return Err(Errno::PERM);
        }
        let sent = send_message(self.borrow_lifeline(), kind, memory);
        if sent == Err(Errno::PERM) {
            self.lifeline_path.are_rights_refused.store(true, Ordering::Relaxed);
        }
        sent
    }

    /// Notes, before sends change to a lane, whether the peer has left bytes of the lifeline unread.
    pub(super) fn note_unread(&self) {
        let mut unread_bytes = 0_i32;
        // SAFETY: the call writes one number, to a local variable.
        let result = unsafe { system::call!(libc::SYS_ioctl, self.lifeline(), libc::TIOCOUTQ, &raw mut unread_bytes) };
        self.lifeline_path.was_unread.store(result < 0 || unread_bytes > 0, Ordering::Relaxed);
    }

    /// Enlarges the lifeline's buffer once, where there can be no lane. Returns whether it is larger now.
    pub(super) fn widen(&'static self) -> bool {
        let _send = self.lock_direction(&self.send_lock);
        if self.lanes().is_some() || self.lifeline_path.is_widened.swap(true, Ordering::Relaxed) {
            return false;
        }
        let bytes = self.with_details(|details| details.options.send_capacity_bytes());
        bytes >= LIFELINE_BYTES && message::widen(self.borrow_lifeline()).is_ok()
    }

    /// Returns whether the peer is a program, not a proxy.
    pub(in crate::connection) fn has_begun_on_lifeline(&self) -> bool {
        self.lifeline_path.inode.load(Ordering::Relaxed) != 0
    }

    /// Returns whether a closed peer has left bytes of the program unread in the lifeline, and not only a message or
    /// rings, after the kernel has reported that it has left something. For a connection that began with a handshake,
    /// returns whether that was never received.
    pub(in crate::connection) fn has_left_bytes_unread(&self, lanes: &Lanes) -> bool {
        if !self.has_begun_on_lifeline() {
            return lanes.segment.status(PeerStatus::Attached) == 0;
        }
        if lanes.segment.peer_receives_by_lane() {
            return false;
        }
        !self.sends_by_lane() || self.lifeline_path.was_unread.load(Ordering::Relaxed)
    }

    /// Offers lanes at once if the program has set a receive capacity, which the peer finds in their memory. The caller
    /// holds the send lock.
    pub(in crate::connection) fn offer_for_capacity(&self, receive_bytes: usize) {
        if receive_bytes != OptionRecord::default().receive_capacity_bytes() {
            self.offer();
        }
    }

    /// Offers lanes if the program responds to a peer that has proved busy. The caller holds the send lock.
    pub(super) fn offer_with_response(&self) {
        let is_acceptor = self.lifeline_path.is_acceptor.load(Ordering::Relaxed);
        let is_due = is_acceptor && self.lifeline_path.requests.load(Ordering::Relaxed) >= REQUESTS_BEFORE_OFFER;
        if is_due && self.unanswered_sends.load(Ordering::Relaxed) == 0 {
            self.offer();
        }
    }

    /// Offers lanes, once. The caller holds the send lock.
    fn offer(&self) {
        let lifeline_path = &self.lifeline_path;
        let is_out_of_place = self.lanes().is_some() || self.awaits_handshake.load(Ordering::Relaxed);
        if is_out_of_place || lifeline_path.has_offered.load(Ordering::Relaxed) || !self.may_get_lanes() {
            return;
        }
        // A descriptor or memory that is not available now may be so later, for another connection; this one does not
        // try again.
        lifeline_path.has_offered.store(true, Ordering::Relaxed);
        let Ok((segment, memory)) = create_segment(lifeline_path.side()) else { return };
        let receive_bytes = self.with_details(|details| details.options.receive_capacity_bytes());
        LaneReceiver::of(&segment).set_capacity(receive_bytes);
        if self.send_lane_message(OFFER, memory.as_fd()).is_err() {
            return close(memory);
        }
        lifeline_path.inode.store(memfd_inode(&memory), Ordering::Relaxed);
        let memory = MemoryFds::of_memfd(memory).hide().ok();
        // SAFETY: the caller holds the send lock, which protects the cell.
        unsafe { *lifeline_path.offered.get() = Some(OfferedMemory { segment, memory }) };
    }

    /// Limits the lifeline's buffer to what the program has requested. The caller holds the send lock.
    pub(in crate::connection) fn limit_lifeline(&self, send_bytes: usize) {
        if send_bytes < LIFELINE_BYTES && self.lanes().is_none() {
            // The kernel doubles the value.
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(self.borrow_lifeline(), send_bytes / 2);
        }
    }

    /// Withdraws the memory that was offered, if any. The caller holds the send lock.
    pub(super) fn withdraw_offer(&self) -> Option<OfferedMemory> {
        // SAFETY: the caller holds the send lock, which protects the cell.
        unsafe { (*self.lifeline_path.offered.get()).take() }
    }

    /// Starts to use lanes. The caller holds both locks.
    fn begin_lanes(&'static self, segment: Segment, memory: MemorySource, by_lane: u64) {
        let lifeline_path = &self.lifeline_path;
        let memory = match memory {
            MemorySource::Own(memory) => memory,
            MemorySource::Received(memory) => {
                lifeline_path.inode.store(memfd_inode(&memory), Ordering::Relaxed);
                MemoryFds::of_memfd(memory).hide().ok()
            }
        };
        if !segment.is_adopted() {
            segment.store(OwnState::Shutdown, lifeline_path.shutdown.load(Ordering::Relaxed));
            // An error that was reported is not reported again.
            segment.store(OwnState::Peer, lifeline_path.peer.load(Ordering::Relaxed));
            segment.store(OwnState::PendingError, lifeline_path.error.swap(0, Ordering::Relaxed));
        }
        self.attach_in_use(segment, memory, by_lane);
    }

    /// Prepares for another process that will hold the endpoint: handles pending messages, and switches to lanes if
    /// possible, whose memory both processes have. Otherwise the endpoint stays on the lifeline forever. Memory that
    /// comes with an unread message is attached as well, since only one of the processes will receive the message.
    pub(in crate::connection) fn settle_lifeline(&'static self) {
        if self.awaits_handshake.load(Ordering::Relaxed) || self.receives_by_lane() {
            return;
        }
        self.process_messages(Purpose::Other);
        if !self.switch_to_lanes() {
            self.lifeline_path.is_shared.store(true, Ordering::Relaxed);
        }
        let Some(_both) = self.lock_both().filter(|_| self.is_on_lifeline()) else { return };
        self.attach_next_memory();
    }

    /// Returns whether the connection consists of its lifeline alone.
    pub fn needs_no_memory(&'static self) -> bool {
        let _guard = self.lock_direction(&self.receive_lock);
        self.is_on_lifeline() && self.lanes().is_none()
    }

    /// Prepares the connection to be sent to another process: it gets lanes if it can, whose memory is sent with it.
    pub fn prepare_to_be_sent(&'static self) {
        self.await_handshake();
        self.settle_lifeline();
    }
}

/// Where the memory of new lanes comes from.
enum MemorySource {
    /// This endpoint has offered it.
    Own(Option<MemoryFds<HiddenFd>>),
    Received(OwnedFd),
}

/// Creates and sets up the memory of lanes.
fn create_segment(side: Side) -> Result<(Segment, OwnedFd), Errno> {
    let (segment, memory) = Segment::create(side)?;
    segment.set_up();
    Ok((segment, memory))
}

/// Returns the inode of a memfd, which identifies the memory; 0 if the kernel does not report it.
fn memfd_inode(memory: &OwnedFd) -> u64 {
    rustix::fs::fstat(memory).map_or(0, |stat| stat.st_ino)
}

/// Returns another descriptor of the memory, if this process has one.
fn duplicate_memfd(memory: &MemoryFds<HiddenFd>) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(memory.memfd.get()?, 0).ok()
}
