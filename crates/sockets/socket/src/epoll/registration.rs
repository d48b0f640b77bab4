//! One registered descriptor: what is asked of it, and what was last reported.

use super::ready_time::{ReadyTime, ready_time};
use super::set::EpollSet;
use crate::connection::{Connection, Edges};
use crate::descriptor::table::{self, Kind};
use crate::listener::Listener;
use crate::process::blocking;
use std::os::fd::RawFd;

pub(super) const EDGE: u32 = libc::EPOLLET as u32;
pub(super) const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub(super) const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// The bits of an event that say what is asked; the others say how.
const WANTED: u32 = 0x3fdf;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM;

/// What a registered descriptor is.
#[derive(Clone, Copy)]
pub(super) enum Target {
    /// Looked at in memory; its lifeline is in the inner epoll.
    Connection(&'static Connection),
    /// The TCP listener is in the program's epoll with the program's data, the lane listener in the inner one.
    Listener(&'static Listener),
    /// Another set, in the inner epoll.
    Nested(&'static EpollSet),
    /// A TCP socket that the kernel serves, remembered because `connect` or `listen` may make it one of the others.
    Stream,
}

impl Target {
    /// Whether both are the same object.
    pub fn is(self, other: Self) -> bool {
        match (self, other) {
            (Self::Connection(one), Self::Connection(other)) => std::ptr::eq(one, other),
            (Self::Listener(one), Self::Listener(other)) => std::ptr::eq(one, other),
            (Self::Nested(one), Self::Nested(other)) => std::ptr::eq(one, other),
            _ => false,
        }
    }

    /// The program's descriptors of the object; of a TCP socket that the kernel serves they are not known.
    pub fn descriptors(self) -> Vec<RawFd> {
        match self {
            Self::Connection(connection) => connection.with_descriptors(<[RawFd]>::to_vec),
            Self::Listener(listener) => listener.with_descriptors(<[RawFd]>::to_vec),
            Self::Nested(set) => set.with(|ready_list| ready_list.descriptors.clone()),
            Self::Stream => Vec::new(),
        }
    }

    /// Returns what `fd` stands for, if a set treats it otherwise than the kernel does.
    pub fn of_descriptor(fd: RawFd) -> Option<Self> {
        let object = table::load(fd);
        match object.kind()? {
            Kind::Connection => object.get().map(Self::Connection),
            Kind::Listener => object.get().map(Self::Listener),
            Kind::EpollSet => object.get().map(Self::Nested),
            Kind::Stream => Some(Self::Stream),
            Kind::Confined => None,
        }
    }

    /// Returns whether a descriptor is not the object that was registered under it.
    pub fn has_gone((fd, target): &(RawFd, Self)) -> bool {
        match (Self::of_descriptor(*fd), target) {
            (Some(Self::Connection(now)), Self::Connection(then)) => !std::ptr::eq(now, *then),
            (Some(Self::Listener(now)), Self::Listener(then)) => !std::ptr::eq(now, *then),
            (Some(Self::Nested(now)), Self::Nested(then)) => !std::ptr::eq(now, *then),
            (Some(Self::Stream), Self::Stream) => false,
            _ => true,
        }
    }
}

/// What the lifeline of a connection can still say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LifelineState {
    /// The kernel has not been asked to report it.
    Unregistered,
    /// The connection is on it: the kernel reports once whatever comes.
    CarriesData,
    /// It rings.
    Wakes,
    /// It rings, and the rings are left there, because others listen to it too: the kernel reports each once.
    Shared,
    /// The peer is gone: nothing comes any more, and the kernel would report that for ever.
    Ended,
    /// It was shut down for reading here, so the peer cannot ring although it lives.
    Unwakeable,
}

/// How the set finds out that a registration has something to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watch {
    /// It has nothing to report until the kernel says so or the program changes it.
    Off,
    /// Every wait polls it.
    Hot,
    /// It was found ready and waits for its turn to be reported; since when.
    Queued(ReadyTime),
    /// Its peer has been asked to ring.
    Parked,
    /// Its peer cannot ring: waits poll such ones in turn.
    Unparkable,
}

/// One registered descriptor.
pub(super) struct Registration {
    /// The number under which the program registered it; closed since, if it is an orphan.
    pub fd: RawFd,
    /// The descriptor of the same object by which the kernel knows it; -1 if there is none.
    pub kernel_fd: RawFd,
    pub target: Target,
    /// As the program gave them.
    pub events: u32,
    /// As the program gave it.
    pub data: u64,
    pub lifeline: LifelineState,
    /// Not since a one-shot report.
    pub is_enabled: bool,
    pub watch: Watch,
    /// The peer has been asked to ring.
    pub is_parked: bool,
    /// Made before a fork: the kernel's part of it is another process's too.
    pub is_inherited: bool,
    /// A child has inherited it, which may be there still.
    pub may_be_in_child: bool,
    /// The kernel has reported a listener or a nested set, and the program has not been told yet.
    pub is_pending: bool,
    /// Reported in the wait that is about to return.
    pub was_reported: bool,
    /// Found ready in the scan that is going on.
    pub is_found: bool,
    /// How many scans of the set had reported something when this was last reported, or became hot.
    pub active_at: u32,
    /// It has been reported since it was added.
    pub was_ever_reported: bool,
    /// It cannot have joined the ready list earlier: when it was added, changed or last reported.
    eligible_at: ReadyTime,
    /// When it joined the ready list, once it was found ready and until it is reported.
    listed_at: Option<ReadyTime>,
    /// When the kernel reported it, of one that has no stamp and has not been found ready since.
    kernel_reported_at: Option<ReadyTime>,
    /// It was ready in each poll since it was last reported.
    stays_ready: bool,
    /// Nothing has been reported since it was added or changed.
    is_fresh: bool,
    /// Edge-triggered: what held when it was last reported, less what has ceased to hold.
    last_ready: i16,
    edges_reported: Edges,
    edges_seen: Edges,
}

impl Registration {
    pub fn new(fd: RawFd, target: Target, events: u32, data: u64) -> Self {
        Self {
            fd,
            kernel_fd: fd,
            target,
            events,
            data,
            lifeline: LifelineState::Unregistered,
            is_enabled: true,
            watch: Watch::Off,
            is_parked: false,
            is_inherited: false,
            may_be_in_child: false,
            is_pending: false,
            was_reported: false,
            is_found: false,
            active_at: 0,
            was_ever_reported: false,
            eligible_at: ReadyTime::now(),
            listed_at: None,
            kernel_reported_at: None,
            stays_ready: false,
            is_fresh: true,
            last_ready: 0,
            edges_reported: Edges::default(),
            edges_seen: Edges::default(),
        }
    }

    /// Starts anew, as `EPOLL_CTL_MOD` does.
    pub fn modify(&mut self, events: u32, data: u64) {
        let asks_for_more = events & !self.events & INPUT as u32 != 0;
        if !self.is_enabled || asks_for_more {
            self.eligible_at = ReadyTime::now();
        }
        self.events = events;
        self.data = data;
        self.is_enabled = true;
        self.is_fresh = true;
        self.is_pending = matches!(self.target, Target::Listener(_) | Target::Nested(_));
    }

    #[inline]
    pub fn wanted(&self) -> i16 {
        (self.events & WANTED) as i16
    }

    #[inline]
    pub fn is_edge(&self) -> bool {
        self.events & EDGE != 0
    }

    /// What there is to report now. A look that is not `fully` done spares system calls and the clock, and may miss
    /// what only the kernel knows.
    #[inline]
    pub fn check(&mut self, thorough: bool) -> i16 {
        #[cfg(test)]
        super::tests::note_poll();
        match self.target {
            _ if !self.is_enabled => 0,
            Target::Connection(connection) => self.check_connection(connection, thorough),
            Target::Listener(listener) => self.check_listener(listener),
            Target::Nested(set) => self.check_set(set, thorough),
            Target::Stream => 0,
        }
    }

    #[inline]
    fn check_connection(&mut self, connection: &'static Connection, thorough: bool) -> i16 {
        let wanted = self.wanted();
        if !thorough {
            // Room to send that has been reported is no news as long as no send was refused, and that the connection
            // remembers.
            let known = if self.is_edge() && !self.is_fresh { self.last_ready & OUTPUT } else { 0 };
            if !connection.may_be_ready(wanted & !known) {
                return 0;
            }
        }
        let ready = connection.readiness(wanted);
        if ready & libc::POLLERR != 0 && !connection.is_open() {
            // Closed by a signal handler in the middle of this wait: the registration is about to go.
            return 0;
        }
        if !self.is_edge() {
            return ready;
        }
        self.edges_seen = connection.edges(self.edges_reported);
        let has_happened = self.edges_seen.has_event_since(self.edges_reported, wanted);
        let is_news = self.is_fresh || has_happened || ready & !self.last_ready != 0;
        self.last_ready &= ready;
        if is_news { ready } else { 0 }
    }

    fn check_listener(&mut self, listener: &'static Listener) -> i16 {
        if !self.is_pending {
            return 0;
        }
        let mut ready = 0;
        if blocking::poll_now(listener.watched_fd(), libc::POLLIN) & libc::POLLIN != 0 && listener.has_lane_client() {
            ready |= INPUT & self.wanted();
        }
        if self.events & ONESHOT != 0 {
            ready |= blocking::poll_now(self.kernel_fd, self.wanted());
        }
        self.is_pending = ready != 0;
        ready
    }

    fn check_set(&mut self, set: &'static EpollSet, thorough: bool) -> i16 {
        let is_ready = set.peek(thorough);
        if thorough {
            let is_news = !self.is_edge() || self.is_fresh || self.is_pending || self.last_ready == 0;
            self.is_pending &= is_ready;
            if !is_ready {
                self.last_ready = 0;
            }
            return if is_ready && is_news { INPUT & self.wanted() } else { 0 };
        }
        let is_news = !self.is_edge() || self.is_fresh || self.is_pending;
        if is_ready && is_news { INPUT & self.wanted() } else { 0 }
    }

    /// As [`Registration::check`]; what is not ready is not in the ready list.
    #[inline]
    pub fn poll(&mut self, thorough: bool) -> i16 {
        let ready = self.check(thorough);
        if ready == 0 && (thorough || !self.is_on_lifeline()) {
            (self.listed_at, self.kernel_reported_at, self.stays_ready) = (None, None, false);
        }
        ready
    }

    /// Whether only the kernel knows what has arrived.
    pub fn is_on_lifeline(&self) -> bool {
        matches!(self.target, Target::Connection(connection) if connection.is_on_lifeline())
    }

    /// Whether the kernel can tell when there is something to report, and there is nothing now that was not reported.
    pub fn can_be_left_to_kernel(&self) -> bool {
        let waits_for_room = self.wanted() & OUTPUT != 0 && !self.is_edge() && self.is_enabled;
        // What the program is just told it may read until the rest comes by a lane, of which the kernel knows nothing.
        let has_news = self.listed_at.is_some() || self.kernel_reported_at.is_some() || self.stays_ready;
        self.is_on_lifeline() && !has_news && !waits_for_room && !self.lacks_lane_wakeup()
    }

    /// As [`Registration::can_be_left_to_kernel`], of one that has just been added or changed.
    pub fn can_be_left_to_kernel_at_once(&self) -> bool {
        self.wanted() & OUTPUT == 0 && self.can_be_left_to_kernel()
    }

    /// The kernel has reported it, at that time. It does so in order: what it has reported before came before.
    pub fn note_kernel_report(&mut self, at: ReadyTime) {
        self.kernel_reported_at.get_or_insert(at);
    }

    /// Whether nothing wakes for what it waits for, though its lifeline can ring.
    pub fn lacks_wakeup(&self) -> bool {
        matches!(self.target, Target::Connection(connection) if connection.must_poll_for_room(self.wanted()))
    }

    /// As [`Connection::poll_for_hang_up`].
    pub fn poll_for_hang_up(&self) {
        if let Target::Connection(connection) = self.target {
            connection.poll_for_hang_up();
        }
    }

    /// Whether nothing wakes for it, and whoever sleeps has to look now and then.
    pub fn is_unwakeable(&self) -> bool {
        self.lifeline == LifelineState::Unwakeable || self.lacks_wakeup()
    }

    /// As [`Registration::lacks_wakeup`], for room in a lane: of room in the lifeline the kernel tells.
    fn lacks_lane_wakeup(&self) -> bool {
        matches!(self.target, Target::Connection(connection) if connection.sends_by_lane()) && self.lacks_wakeup()
    }

    /// When it joined the ready list, of one that is ready.
    #[inline]
    pub fn ready_since(&mut self, ready: i16, now: ReadyTime) -> ReadyTime {
        if let Some(listed) = self.listed_at {
            return listed;
        }
        let stamp = if ready & INPUT == 0 { None } else { self.arrival_stamp() };
        let seen = if self.stays_ready { self.eligible_at } else { self.kernel_reported_at.unwrap_or(now) };
        *self.listed_at.insert(ready_time(stamp, seen, self.eligible_at, now))
    }

    /// When its first unread record was sent, if that is known: perhaps once a message is heard that leads to a lane.
    pub fn arrived_or_arrives(&self) -> Option<ReadyTime> {
        if let Target::Connection(connection) = self.target
            && connection.is_on_lifeline()
        {
            connection.readiness(libc::POLLIN);
        }
        self.arrived()
    }

    /// When its first unread record was sent, if that is known.
    fn arrived(&self) -> Option<ReadyTime> {
        self.arrival_stamp().map(|stamp| ReadyTime::from_stamp(stamp, ReadyTime::now()))
    }

    /// Whether it is known when it became ready.
    pub fn has_stamp(&self) -> bool {
        self.arrival_stamp().is_some()
    }

    /// The stamp of the first unread record.
    fn arrival_stamp(&self) -> Option<u64> {
        #[cfg(test)]
        if let Some(stamp) = super::tests::made_up_stamp(self.fd) {
            return Some(stamp);
        }
        match self.target {
            Target::Connection(connection) => connection.arrival_stamp(),
            Target::Listener(_) | Target::Nested(_) | Target::Stream => None,
        }
    }

    /// The program is being told: if it stays ready, it is behind all that are ready now.
    #[inline]
    pub fn note_report(&mut self, ready: i16, now: ReadyTime) {
        self.eligible_at = now;
        (self.listed_at, self.kernel_reported_at, self.stays_ready) = (None, None, true);
        self.is_fresh = false;
        self.is_pending = false;
        self.was_reported = true;
        self.last_ready = ready;
        self.edges_reported = self.edges_seen;
        if self.events & ONESHOT != 0 {
            self.is_enabled = false;
        }
    }

    /// As [`Registration::note_report`], of the only one that the set polls. Whatever else becomes ready later is
    /// behind it, whenever it was reported last.
    #[inline]
    pub fn note_report_of_single(&mut self, ready: i16) {
        self.note_report(ready, self.eligible_at);
    }

    pub fn is_connection(&self) -> bool {
        matches!(self.target, Target::Connection(_))
    }

    /// Whether waits must go on polling it.
    #[inline]
    pub fn stays_hot(&self) -> bool {
        self.is_enabled
            && match self.target {
                Target::Connection(_) | Target::Nested(_) => true,
                Target::Listener(_) => self.is_pending,
                Target::Stream => false,
            }
    }

    /// Whether the kernel reports it.
    pub fn can_wake(&self) -> bool {
        matches!(self.lifeline, LifelineState::CarriesData | LifelineState::Wakes | LifelineState::Shared)
    }

    /// Asks the peer of a connection to ring. `false` if its lifeline cannot.
    pub fn park(&mut self) -> bool {
        let Target::Connection(connection) = self.target else { return false };
        if !self.can_wake() {
            return false;
        }
        if self.is_parked {
            connection.park_again(self.wanted());
        } else {
            connection.park(self.wanted());
            self.is_parked = true;
        }
        true
    }

    /// How long a sleep may be that is to end when something is ready without a ring: what a sender holds back.
    pub fn held_left_ns(&self) -> Option<u64> {
        if let Target::Connection(connection) = self.target { connection.held_left_ns() } else { None }
    }

    /// As [`Connection::publish_held`].
    pub fn publish_held(&self) {
        if let Target::Connection(connection) = self.target {
            connection.publish_held();
        }
    }

    pub fn unpark(&mut self) {
        if let Target::Connection(connection) = self.target
            && self.is_parked
        {
            self.is_parked = false;
            connection.unpark();
        }
    }
}
