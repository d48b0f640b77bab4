//! What the lanes of a connection add to the kernel's readiness of its socket.

use super::{Connection, Use};
use crate::epoll::EpollSet;
use crate::kernel::Tcp;
use meeting::bell::{self, Drained};
use path::{ReceiveBy, SendBy};
use socket::process::{blocking, threads};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
const ENDED: i16 = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;

/// What an edge-triggered watcher of the lanes compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edges {
    /// A number that grows with each arrival.
    arrivals: u64,
    /// How often a send that found no room was followed by room.
    rooms: u64,
}

impl Edges {
    /// Returns whether something has happened since `before`.
    pub fn has_event_since(self, before: Self) -> bool {
        self.arrivals != before.arrivals || self.rooms != before.rooms
    }
}

/// What the lanes add to the kernel's readiness of the socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaneReport {
    /// The wanted events that the lanes have.
    pub ready: i16,
    /// The kernel may have wanted events that the lanes cannot show: the direction that this end receives uses TCP, the
    /// stream has ended, or the peer has done something by the kernel before it sent.
    pub asks_kernel: bool,
}

/// A wait that relies on the bell of a connection. Ends when it is dropped.
pub struct Parked {
    connection: &'static Connection,
    /// The use of the connection in which it does not consent to moves, because it had no bell when the wait began.
    forbids_in: Option<u32>,
}

impl Drop for Parked {
    fn drop(&mut self) {
        threads::add(&self.connection.sleepers, u32::MAX);
        if self.forbids_in == Some(self.connection.generation.load(Ordering::Acquire)) {
            self.connection.allow_moves();
        }
    }
}

impl Connection {
    /// Returns which of `wanted` the lanes have. The kernel reports what uses TCP.
    pub fn lane_events(&'static self, fd: RawFd, wanted: i16) -> i16 {
        self.lane_report(fd, wanted).ready
    }

    /// Returns which of `wanted` the lanes have, and whether the kernel may have others of them.
    #[inline]
    pub fn lane_report(&'static self, fd: RawFd, wanted: i16) -> LaneReport {
        let mut report = LaneReport::default();
        if wanted & INPUT != 0
            && let Some(mut receiver) = self.receiver.lock()
        {
            // A violation counts as readable: the receive reports it.
            let by_lane = receiver.prepare(Tcp(fd)).map_or(true, |by| by == ReceiveBy::Lane);
            let has_data = if by_lane {
                let lane = receiver.lane_in_use();
                let has_data = lane.as_ref().is_none_or(|lane| lane.may_have_data());
                report.asks_kernel = has_data && lane.is_some_and(|lane| lane.follows_use_of_kernel());
                has_data
            } else {
                report.asks_kernel = true;
                // Bytes in front of the lane may still be on their way.
                let has_data = receiver.lane_to_watch().is_some_and(|lane| lane.may_have_data());
                receiver.leftover_bytes() > 0 || has_data && Tcp(fd).available() > 0
            };
            report.ready |= if has_data { INPUT } else { 0 };
        }
        if wanted & OUTPUT != 0
            && let Some(mut sender) = self.sender.lock()
        {
            let by = sender.prepare_if_by_lane(Tcp(fd), self.role());
            let has_room = match by {
                Some(SendBy::Lane) => sender.lane().is_none_or(|lane| lane.has_room(Tcp(fd))),
                Some(_) => true,
                None => sender.reports_room_on_tcp(Tcp(fd)),
            };
            if by.is_some() || has_room {
                sender.note_room(has_room);
            }
            report.ready |= if has_room { OUTPUT } else { 0 };
        }
        report.ready &= wanted;
        report.asks_kernel |= report.ready != 0 && self.has_ended.load(Ordering::Relaxed);
        report
    }

    /// Returns the counters by which edges are recognized.
    pub fn edges(&'static self) -> Edges {
        let arrivals = self.receiver.lock().and_then(|mut it| it.lane_to_watch().map(|lane| lane.arrivals(0)));
        let rooms = self.sender.lock().map_or(0, |sender| sender.rooms());
        Edges { arrivals: arrivals.unwrap_or(0), rooms }
    }

    /// Asks the peer to ring when one of `wanted` becomes true. Where there is room, none can appear: a send that finds
    /// none has the sets poll again. Otherwise the peer of an edge-triggered set would ring with each message it reads.
    pub fn ask_for_ring(&'static self, wanted: i16) {
        if wanted & INPUT != 0
            && let Some(mut receiver) = self.receiver.lock()
            && let Some(lane) = receiver.lane()
        {
            lane.announce_sleep();
        }
        if wanted & OUTPUT != 0
            && let Some(mut sender) = self.sender.lock()
            && let Some(lane) = sender.lane().filter(|lane| !lane.is_writable())
        {
            lane.announce_sleep();
        }
    }

    /// Returns whether the two ends have met.
    pub fn has_met(&self) -> bool {
        self.bell_slot.load(Ordering::Acquire) >= 0
    }

    /// Does not consent to moves until [`Connection::allow_moves`] is called as often.
    pub fn forbid_moves(&'static self) {
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.forbid_moves();
        }
    }

    /// Ends [`Connection::forbid_moves`].
    pub fn allow_moves(&'static self) {
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.allow_moves();
        }
    }

    /// Returns whether the program has several descriptors of the connection.
    pub fn has_several_descriptors(&self) -> bool {
        self.descriptors.lock().is_some_and(|descriptors| descriptors.len() > 1)
    }

    /// Returns whether more than one set watches the connection.
    pub fn has_several_watchers(&self) -> bool {
        self.watchers.lock().is_some_and(|watchers| watchers.len() > 1)
    }

    /// Sends the connection back to TCP, because a set cannot watch its lanes.
    pub fn leave_lanes(&'static self, fd: RawFd) {
        self.stay_on_tcp(Tcp(fd));
    }

    /// Notes that a set watches the connection.
    pub fn note_watcher(&self, set: &'static EpollSet) {
        if let Some(mut watchers) = self.watchers.lock()
            && !watchers.iter().any(|known| std::ptr::eq(*known, set))
        {
            watchers.push(set);
        }
    }

    /// Notes that a set does not watch the connection any more.
    pub fn forget_watcher(&self, set: &EpollSet) {
        if let Some(mut watchers) = self.watchers.lock() {
            watchers.retain(|known| !std::ptr::eq(*known, set));
        }
    }

    /// Calls `notify` for each set that watches the connection. No lock of the connection is held then.
    pub fn for_each_watcher(&self, mut notify: impl FnMut(&'static EpollSet)) {
        let mut index = 0;
        while let Some(set) = self.watchers.lock().and_then(|watchers| watchers.get(index).copied()) {
            notify(set);
            index += 1;
        }
    }

    /// Takes the rings from the bell and does what they ask for.
    pub fn answer_ring(&'static self, fd: RawFd) {
        self.answer_ring_for(self.current_use(fd));
    }

    /// As [`Connection::answer_ring`], in a call.
    pub(super) fn answer_ring_for(&'static self, this: Use) {
        match self.drain_bell() {
            Drained::Empty => {}
            Drained::HungUp => self.note_peer_left(this, None),
            Drained::Refused(reason) => self.note_peer_left(this, Some(reason)),
        }
        self.answer(this);
    }

    /// Notes that the peer has hung up.
    pub(super) fn note_hung_up(&'static self, this: Use) {
        let reason = if let Drained::Refused(reason) = self.drain_bell() { Some(reason) } else { None };
        self.note_peer_left(this, reason);
    }

    fn drain_bell(&self) -> Drained {
        let bell = self.bell();
        if bell >= 0 { bell::drain(Tcp(bell).borrow()) } else { Drained::Empty }
    }

    /// Returns whether sends go by a lane, so that the kernel's room does not matter.
    pub fn sends_by_lane(&'static self) -> bool {
        self.sender.lock().is_some_and(|sender| sender.is_by_lane())
    }

    /// Returns whether receives go by a lane.
    pub fn receives_by_lane(&'static self) -> bool {
        self.receiver.lock().is_some_and(|receiver| receiver.is_by_lane())
    }

    /// Returns whether both directions go by lanes.
    pub fn is_by_lanes(&'static self) -> bool {
        self.sends_by_lane() && self.receiver.lock().is_some_and(|receiver| receiver.is_by_lane())
    }

    /// Asks the peer to ring when one of `wanted` becomes true. Check [`Connection::lane_events`] once more before
    /// sleeping.
    pub fn park(&'static self, wanted: i16) -> Parked {
        threads::add(&self.sleepers, 1);
        let forbids_in = (!self.has_met() && wanted & INPUT != 0).then(|| {
            self.forbid_moves();
            self.generation.load(Ordering::Acquire)
        });
        self.ask_for_ring(wanted);
        Parked { connection: self, forbids_in }
    }

    /// Handles a ring of the bell, or its end.
    pub fn answer_bell(&'static self, fd: RawFd) {
        // Another thread may rely on the ring.
        if self.sleepers.load(Ordering::SeqCst) <= 1 {
            self.answer_ring(fd);
            self.for_each_watcher(|set| set.poll_again(self));
        } else {
            self.answer(self.current_use(fd));
        }
    }

    /// Returns which of the `wanted` events of the socket are true, now that the kernel has reported some: a peer that
    /// turns out to be gone, and bytes that come once more, change them.
    pub fn confirm_events(&'static self, fd: RawFd, reported: i16, wanted: i16) -> i16 {
        let is_plain = self.receiver.lock().is_none_or(|receiver| receiver.is_plain());
        let has_changed = self.note_kernel_events(fd, reported);
        if reported & INPUT == 0 || is_plain {
            return if has_changed { blocking::poll_now(fd, wanted) } else { reported };
        }
        let has_input = self.confirm_input(fd);
        let events = blocking::poll_now(fd, wanted);
        if has_input { events } else { events & !INPUT }
    }

    /// Notes that the kernel has reported these events of the socket. Returns whether there may be others by now,
    /// because the peer has turned out to be gone.
    fn note_kernel_events(&'static self, fd: RawFd, events: i16) -> bool {
        let is_by_lane = self.receiver.lock().is_some_and(|mut receiver| {
            receiver.note_kernel_event();
            receiver.is_by_lane()
        });
        // What TCP has for a direction that uses a lane is its end, as a rule.
        let has_ended = events & ENDED != 0
            || (is_by_lane && events & INPUT != 0 && blocking::poll_now(fd, libc::POLLRDHUP) & ENDED != 0);
        if !has_ended {
            return false;
        }
        self.has_ended.store(true, Ordering::Relaxed);
        let bell = self.bell();
        let is_gone = bell >= 0 && blocking::poll_now(bell, libc::POLLIN) & libc::POLLHUP != 0;
        if is_gone {
            self.note_hung_up(self.current_use(fd));
        }
        is_gone
    }

    /// Returns whether there is input for the program, now that the kernel has reported some: bytes that were read in a
    /// lane may come by TCP once more.
    fn confirm_input(&'static self, fd: RawFd) -> bool {
        // A violation counts as readable: the receive reports it.
        self.receiver.lock().is_none_or(|mut receiver| receiver.confirm_input(Tcp(fd)).unwrap_or(true))
    }

    /// Returns the number of unread bytes, if TCP has `in_tcp` of them.
    pub fn unread_bytes(&'static self, fd: RawFd, in_tcp: i32) -> i32 {
        let Some(mut receiver) = self.receiver.lock() else { return in_tcp };
        // The sender may have begun a move. A violation is reported by the next receive.
        let _ = receiver.prepare(Tcp(fd));
        let unread = receiver.unread_bytes(in_tcp.max(0) as u64).saturating_add(receiver.abandoned_bytes(Tcp(fd)));
        i32::try_from(unread).unwrap_or(i32::MAX)
    }

    /// Notes that the program has set the size of the socket's send buffer.
    pub fn note_send_buffer(&'static self, fd: RawFd) {
        if let Some(mut sender) = self.sender.lock()
            && let Some(lane) = sender.lane()
            && !lane.note_send_buffer(Tcp(fd))
        {
            sender.finish_stream(Tcp(fd), self.role());
        }
        // There may be room now, of which the peer does not know.
        self.for_each_watcher(|set| set.poll_again(self));
    }

    /// Returns the bytes in the lane that the peer has not read, if it has no room.
    pub fn unsent_bytes(&'static self) -> i32 {
        let Some(mut sender) = self.sender.lock() else { return 0 };
        if !sender.is_by_lane() {
            return 0;
        }
        let unsent = sender.lane().filter(|lane| !lane.is_writable()).map_or(0, |lane| lane.unsent_bytes());
        i32::try_from(unsent).unwrap_or(i32::MAX)
    }
}
