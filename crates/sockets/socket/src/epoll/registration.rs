//! One registered descriptor: the requested events, and what was last reported.

use super::ready_time::{ReadyTime, ready_time};
use super::set::EpollSet;
use super::wakeup::note_switch;
use crate::connection::{Connection, EdgeCounters};
use crate::descriptor::table::{self, Kind};
use crate::listener::Listener;
use crate::process::blocking;
use std::os::fd::RawFd;

pub(super) const EDGE: u32 = libc::EPOLLET as u32;
pub(super) const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub(super) const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// The bits of an event that are requested events; the other bits are flags.
const WANTED: u32 = 0x3fdf;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM;

/// The object behind a registered descriptor.
#[derive(Clone, Copy)]
pub(super) enum Target {
    /// Polled in memory; its lifeline is in the inner epoll instance.
    Connection(&'static Connection),
    /// The TCP listener is in the program's instance under the program's data, the lane listener in the inner one.
    Listener(&'static Listener),
    /// Another set, registered in the program's instance.
    Nested(&'static EpollSet),
    /// A plain TCP socket, recorded because `connect` or `listen` may turn it into one of the others.
    Stream,
}

impl Target {
    /// Returns whether both are the same object.
    pub fn is(self, other: Self) -> bool {
        match (self, other) {
            (Self::Connection(one), Self::Connection(other)) => std::ptr::eq(one, other),
            (Self::Listener(one), Self::Listener(other)) => std::ptr::eq(one, other),
            (Self::Nested(one), Self::Nested(other)) => std::ptr::eq(one, other),
            _ => false,
        }
    }

    /// Returns the program's descriptors of the object; none for a plain TCP socket, whose descriptors are not tracked.
    pub fn descriptors(self) -> Vec<RawFd> {
        match self {
            Self::Connection(connection) => connection.with_descriptors(<[RawFd]>::to_vec),
            Self::Listener(listener) => listener.with_descriptors(<[RawFd]>::to_vec),
            Self::Nested(set) => set.with(|ready_list| ready_list.descriptors.clone()),
            Self::Stream => Vec::new(),
        }
    }

    /// Returns the object of `fd` if sets treat it differently from the kernel.
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

    /// Returns whether the descriptor no longer refers to the object that was registered under it.
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

/// What the kernel is asked about the lifeline of a connection, and what the lifeline can report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LifelineState {
    /// It is not registered in the inner epoll instance.
    Unregistered,
    /// The connection's data travels over it; registered edge-triggered.
    CarriesData,
    /// It carries wakeups, which this process consumes.
    Wakes,
    /// It carries wakeups, which stay in it because other processes wait for them too; registered edge-triggered.
    Shared,
    /// The peer is gone. It is not registered, because the kernel would report the hang-up again and again.
    Ended,
    /// It is shut down for reading here, so that the peer cannot wake this process; not registered.
    Unwakeable,
}

/// How the set learns that a registration has something to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watch {
    /// It has nothing to report until the kernel reports it or the program changes it.
    Off,
    /// Every wait polls it.
    Hot,
    /// It was found ready at this time and is queued to be reported.
    Queued(ReadyTime),
    /// Its peer has been asked for a wakeup.
    Parked,
    /// Its peer cannot send wakeups; each wait polls a few of these connections.
    Unparkable,
}

/// One registered descriptor.
pub(super) struct Registration {
    /// The number under which the program registered it. An orphan's number has been closed since.
    pub fd: RawFd,
    /// The descriptor of the same object that the kernel knows; -1 if there is none.
    pub kernel_fd: RawFd,
    pub target: Target,
    /// The requested events and flags, as the program passed them.
    pub events: u32,
    /// The event data, as the program passed it.
    pub data: u64,
    pub lifeline: LifelineState,
    /// False after a one-shot report.
    pub is_enabled: bool,
    pub watch: Watch,
    /// Whether the peer has been asked for a wakeup.
    pub is_parked: bool,
    /// Whether it was registered before a fork, so that another process shares the kernel's part of it.
    pub is_inherited: bool,
    /// Whether a child process has inherited it and may still hold it.
    pub may_be_in_child: bool,
    /// Whether the kernel has reported a listener or nested set since the last report to the program.
    pub is_pending: bool,
    /// Whether it is reported by the wait that is about to return.
    pub was_reported: bool,
    /// Whether the current scan has found it ready.
    pub is_found: bool,
    /// The set's number of scans with reports when this was last reported, or became hot.
    pub active_at: u32,
    /// Whether it has been reported since it was added.
    pub was_ever_reported: bool,
    /// The earliest time at which it can have joined the ready list: when it was added, modified or last reported.
    eligible_at: ReadyTime,
    /// When it joined the ready list; set from when it is found ready until it is reported.
    listed_at: Option<ReadyTime>,
    /// When the kernel reported it, if it has no timestamp and has not been found ready since.
    kernel_reported_at: Option<ReadyTime>,
    /// Whether each poll since the last report found it ready.
    stays_ready: bool,
    /// Whether nothing has been reported since it was added or modified.
    is_fresh: bool,
    /// For edge-triggered registrations: the events of the last report that have held ever since.
    last_ready: i16,
    edges_reported: EdgeCounters,
    edges_seen: EdgeCounters,
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
            edges_reported: EdgeCounters::default(),
            edges_seen: EdgeCounters::default(),
        }
    }

    /// Applies `EPOLL_CTL_MOD`.
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

    /// Returns the events to report now. Unless `thorough`, it avoids system calls and clock reads, and may miss what
    /// only the kernel knows.
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
            // Room to send that has been reported is not a new event unless a send was refused since, which the
            // connection records.
            let known = if self.is_edge() && !self.is_fresh { self.last_ready & OUTPUT } else { 0 };
            if !connection.may_be_ready(wanted & !known) {
                return 0;
            }
        }
        let ready = self.readiness_of(connection, wanted);
        if ready & libc::POLLERR != 0 && !connection.is_open() {
            // A signal handler has closed the connection during this wait; the registration is about to be removed.
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

    /// Returns the readiness of the connection. The poll may receive the message by which it switches to lanes.
    #[inline]
    fn readiness_of(&self, connection: &'static Connection, wanted: i16) -> i16 {
        let was_on_lifeline = connection.is_on_lifeline();
        let ready = connection.readiness(wanted);
        if was_on_lifeline && !connection.is_on_lifeline() && connection.is_parked_by_others(self.is_parked) {
            note_switch(connection);
        }
        ready
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

    /// As [`Registration::check`]; also takes it off the ready list if it is not ready.
    #[inline]
    pub fn poll(&mut self, thorough: bool) -> i16 {
        let ready = self.check(thorough);
        if ready == 0 && (thorough || !self.is_on_lifeline()) {
            (self.listed_at, self.kernel_reported_at, self.stays_ready) = (None, None, false);
        }
        ready
    }

    /// Returns whether the connection's data travels over its lifeline, so that only the kernel knows what has arrived.
    pub fn is_on_lifeline(&self) -> bool {
        matches!(self.target, Target::Connection(connection) if connection.is_on_lifeline())
    }

    /// Returns whether the kernel can report the next event, and no event is unreported now.
    pub fn can_be_left_to_kernel(&self) -> bool {
        let waits_for_room = self.wanted() & OUTPUT != 0 && !self.is_edge() && self.is_enabled;
        // A program that has just learned that data arrived may read until the rest comes by a lane, which the kernel
        // does not see.
        let has_news = self.listed_at.is_some() || self.kernel_reported_at.is_some() || self.stays_ready;
        self.is_on_lifeline() && !has_news && !waits_for_room && !self.lacks_lane_wakeup()
    }

    /// As [`Registration::can_be_left_to_kernel`], for one that has just been added or modified.
    pub fn can_be_left_to_kernel_at_once(&self) -> bool {
        self.wanted() & OUTPUT == 0 && self.can_be_left_to_kernel()
    }

    /// Notes the time of a report by the kernel. The first one counts, because the kernel reports in order.
    pub fn note_kernel_report(&mut self, at: ReadyTime) {
        self.kernel_reported_at.get_or_insert(at);
    }

    /// Returns whether no wakeup announces the awaited event, although the lifeline can carry wakeups.
    pub fn lacks_wakeup(&self) -> bool {
        matches!(self.target, Target::Connection(connection) if connection.must_poll_for_room(self.wanted()))
    }

    /// See [`Connection::poll_for_hang_up`].
    pub fn poll_for_hang_up(&self) {
        if let Target::Connection(connection) = self.target {
            connection.poll_for_hang_up();
        }
    }

    /// Returns whether nothing wakes a sleeper for it, after an attempt to park it and a poll, so that it must be
    /// polled from time to time.
    ///
    /// Whether it could be parked now does not count. Another thread may have received the peer's message since, but
    /// the peer was not asked for a wakeup.
    pub fn needs_polling(&self, is_parked: bool) -> bool {
        self.is_connection() && self.lifeline != LifelineState::Ended && (!is_parked || self.lacks_wakeup())
    }

    /// As [`Registration::lacks_wakeup`], for room in a lane only: the kernel reports room in the lifeline.
    fn lacks_lane_wakeup(&self) -> bool {
        matches!(self.target, Target::Connection(connection) if connection.sends_by_lane()) && self.lacks_wakeup()
    }

    /// Returns when a ready registration joined the ready list.
    #[inline]
    pub fn ready_since(&mut self, ready: i16, now: ReadyTime) -> ReadyTime {
        if let Some(listed) = self.listed_at {
            return listed;
        }
        let stamp = if ready & INPUT == 0 { None } else { self.arrival_stamp() };
        let seen = if self.stays_ready { self.eligible_at } else { self.kernel_reported_at.unwrap_or(now) };
        *self.listed_at.insert(ready_time(stamp, seen, self.eligible_at, now))
    }

    /// Returns when the first unread record was sent, if known, after processing messages on the lifeline, which may
    /// start the lanes.
    pub fn arrived_or_arrives(&self) -> Option<ReadyTime> {
        if let Target::Connection(connection) = self.target
            && connection.is_on_lifeline()
        {
            self.readiness_of(connection, libc::POLLIN);
        }
        self.arrived()
    }

    /// Returns when the first unread record was sent, if known.
    fn arrived(&self) -> Option<ReadyTime> {
        self.arrival_stamp().map(|stamp| ReadyTime::from_stamp(stamp, ReadyTime::now()))
    }

    /// Returns whether its first unread record carries a timestamp.
    pub fn has_stamp(&self) -> bool {
        self.arrival_stamp().is_some()
    }

    /// Returns the timestamp of the first unread record.
    fn arrival_stamp(&self) -> Option<u64> {
        #[cfg(test)]
        if let Some(stamp) = super::tests::test_stamp(self.fd) {
            return Some(stamp);
        }
        match self.target {
            Target::Connection(connection) => connection.arrival_stamp(),
            Target::Listener(_) | Target::Nested(_) | Target::Stream => None,
        }
    }

    /// Notes a report to the program at time `now`. If the registration stays ready, it joins the list again at that
    /// time.
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

    /// As [`Registration::note_report`], for a set that polls nothing else. It keeps its time, because anything that
    /// becomes ready later sorts behind it anyway.
    #[inline]
    pub fn note_report_of_single(&mut self, ready: i16) {
        self.note_report(ready, self.eligible_at);
    }

    pub fn is_connection(&self) -> bool {
        matches!(self.target, Target::Connection(_))
    }

    /// Returns whether waits must continue to poll it.
    #[inline]
    pub fn stays_hot(&self) -> bool {
        self.is_enabled
            && match self.target {
                Target::Connection(_) | Target::Nested(_) => true,
                Target::Listener(_) => self.is_pending,
                Target::Stream => false,
            }
    }

    /// Returns whether the kernel reports its lifeline.
    pub fn can_wake(&self) -> bool {
        matches!(self.lifeline, LifelineState::CarriesData | LifelineState::Wakes | LifelineState::Shared)
    }

    /// Asks the peer of a connection for a wakeup. Returns `false` if the lifeline cannot carry one.
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

    /// Returns the time after which a held record becomes readable without a wakeup, if the sender holds one.
    pub fn held_left_ns(&self) -> Option<u64> {
        if let Target::Connection(connection) = self.target { connection.held_left_ns() } else { None }
    }

    /// See [`Connection::publish_held`].
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
