//! The connections of a set, and which of them have events.

use super::buffer::{Buffer, Place};
use super::registry::Registration;
use crate::connection::{Connection, Edges, LaneReport};
use std::os::fd::RawFd;

/// Events that every registration reports.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
/// Flags, which are no events.
const FLAGS: u32 = (libc::EPOLLET | libc::EPOLLONESHOT | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;
const OUTPUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
/// Members that stay hot however long they are idle: to read their rings from the inner instance takes as long as to
/// poll them.
const HOT_MIN: usize = 8;
/// Most hot members.
const HOT_MAX: usize = 256;
/// A member is idle if it was not among this number of reports. To park it and be woken for it takes some microseconds,
/// a poll that finds nothing some nanoseconds.
const IDLE_REPORTS_MAX: u32 = 256;

/// How a member is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watch {
    /// Every wait polls it.
    Hot,
    /// Its peer has been asked to ring.
    Parked,
    /// Only the kernel reports events, until the program changes the registration: an event was reported once
    /// (`EPOLLONESHOT`), or only the kernel knows whether one was.
    Off,
}

/// What the lanes of a member have.
#[derive(Clone, Copy)]
struct Found {
    ready: u32,
    /// The kernel may have other events.
    asks_kernel: bool,
    /// For an edge-triggered registration: the counters before which everything that has happened is in `ready`.
    edges: Option<Edges>,
}

/// A connection of a set.
pub(super) struct Member {
    pub connection: &'static Connection,
    pub fd: RawFd,
    /// The program's events, flags and data.
    pub events: u32,
    pub data: u64,
    /// The events that the kernel's registration has.
    pub in_kernel: u32,
    watch: Watch,
    /// The program has removed the registration, and the kernel still has it. A program that removes a registration
    /// often adds it again soon.
    is_removed: bool,
    /// The descriptor was closed, and the kernel keeps the registration.
    is_orphan: bool,
    /// Only the kernel knows whether the event of a one-shot registration was reported, until the program changes it.
    awaits_change: bool,
    /// What was last reported to an edge-triggered registration; `None` if nothing was since it was made.
    seen: Option<Edges>,
    /// The number of the last report with this member.
    active_at: u32,
    /// Where it was last reported.
    pub place: Place,
}

impl Member {
    pub fn new(connection: &'static Connection, fd: RawFd, registration: Registration) -> Self {
        let Registration { events, data, .. } = registration;
        Self {
            connection,
            fd,
            events,
            data,
            in_kernel: events,
            watch: Watch::Parked,
            is_removed: false,
            awaits_change: false,
            is_orphan: false,
            seen: None,
            active_at: 0,
            place: Place::default(),
        }
    }

    /// Returns whether a report ends the registration until the program changes it.
    pub fn is_one_shot(&self) -> bool {
        self.events & libc::EPOLLONESHOT as u32 != 0
    }

    /// Returns whether the program has removed the registration.
    pub fn is_removed(&self) -> bool {
        self.is_removed
    }

    /// Returns whether the kernel need not know at once what the program changes: the lanes have what it waits for, and
    /// superfluous events of the kernel are recognized. An edge-triggered registration reports again what is there.
    pub fn is_lazy(&self) -> bool {
        const EAGER: u32 = (libc::EPOLLET | libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;
        self.events & EAGER == 0 && self.connection.is_by_lanes()
    }

    /// Returns whether the kernel's registration has all events that only the kernel can report.
    pub fn is_known_to_kernel(&self) -> bool {
        const OF_LANES: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32 | OUTPUT;
        self.kernel_events() & !OF_LANES & !self.in_kernel == 0
    }

    /// Returns whether only the kernel reports events.
    pub fn is_off(&self) -> bool {
        self.watch == Watch::Off && !self.is_orphan
    }

    fn is_edge_triggered(&self) -> bool {
        self.events & libc::EPOLLET as u32 != 0
    }

    /// Returns the events without flags that the registration wants.
    fn wanted(&self) -> u32 {
        (self.events & !FLAGS) | ALWAYS
    }

    /// Returns the events to ask the kernel for: TCP has room whenever sends go by a lane. That is no edge, so that an
    /// edge-triggered registration stays as it is: with each change the kernel would report again what is there.
    pub fn kernel_events(&self) -> u32 {
        let masks_room = !self.is_edge_triggered() && self.connection.sends_by_lane();
        if masks_room { self.events & !OUTPUT } else { self.events }
    }

    /// Returns what the lanes have to report now.
    #[inline]
    fn poll(&self) -> Found {
        let found = self.report_with_edges();
        let is_old = found.edges.zip(self.seen).is_some_and(|(edges, seen)| !edges.has_event_since(seen));
        if is_old { Found { ready: 0, ..found } } else { found }
    }

    /// Returns everything that the lanes have, also what an edge-triggered registration was told of before.
    #[inline]
    fn report_with_edges(&self) -> Found {
        let mut report = self.report();
        let mut edges = None;
        if report.ready != 0 && self.is_edge_triggered() {
            edges = Some(self.connection.edges());
            // What has arrived before the edges were taken counts as seen, so the report must contain it.
            let again = self.report();
            report.ready |= again.ready;
            report.asks_kernel |= again.asks_kernel;
        }
        Found { ready: report.ready as u16 as u32, asks_kernel: report.asks_kernel, edges }
    }

    #[inline]
    fn report(&self) -> LaneReport {
        if self.watch == Watch::Off {
            return LaneReport::default();
        }
        self.connection.lane_report(self.fd, (self.wanted() & 0xffff) as i16)
    }

    /// Notes a report of lane events.
    fn note_report(&mut self, reports: u32, found: Found) {
        self.active_at = reports;
        self.seen = found.edges.or(self.seen);
    }

    /// Changes the program's events and data.
    pub fn change(&mut self, events: u32, data: u64) {
        (self.events, self.data, self.seen) = (events, data, None);
        self.is_removed = false;
        if self.watch == Watch::Off {
            self.watch = Watch::Parked;
        }
    }

    /// Returns which of the kernel's events the program is to see.
    pub fn filter(&self, events: u32) -> u32 {
        let events = if self.connection.sends_by_lane() { events & !OUTPUT } else { events };
        events & self.wanted()
    }
}

/// The members of a set, by their index.
#[derive(Default)]
pub(super) struct Members {
    slots: Vec<Option<Member>>,
    free: Vec<u32>,
    hot: Vec<u32>,
    /// By descriptor: the index of its member plus one, or 0.
    by_fd: Vec<u32>,
    /// Number of polls that have reported something.
    reports: u32,
    /// A hot member received by a lane in the last poll.
    has_lanes: bool,
    /// Where the next poll begins, so that a small array does not starve the members behind the first ones.
    begin: usize,
}

impl Members {
    /// Returns the number of hot members, or 0 if none of them received by a lane in the last poll: then the kernel
    /// reports what comes next.
    pub fn polled_count(&self) -> usize {
        if self.has_lanes { self.hot.len() } else { 0 }
    }

    pub fn insert(&mut self, member: Member) -> u32 {
        let fd = member.fd as usize;
        let index = match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = Some(member);
                index
            }
            None => {
                self.slots.push(Some(member));
                self.slots.len() as u32 - 1
            }
        };
        if self.by_fd.len() <= fd {
            self.by_fd.resize(fd + 1, 0);
        }
        self.by_fd[fd] = index + 1;
        index
    }

    pub fn remove(&mut self, index: u32) -> Option<Member> {
        let removed = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        if let Ok(fd) = usize::try_from(removed.fd) {
            self.by_fd[fd] = 0;
        }
        self.hot.retain(|hot| *hot != index);
        Some(removed)
    }

    pub fn get(&mut self, index: u32) -> Option<&mut Member> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    /// Returns the index of a descriptor's member.
    pub fn find(&self, fd: RawFd) -> Option<u32> {
        self.by_fd.get(usize::try_from(fd).ok()?)?.checked_sub(1)
    }

    /// Returns the indices of a connection's members: one for each of its descriptors in the set.
    pub fn of_connection(&self, connection: &Connection) -> Vec<u32> {
        let is_it = |member: &Member| std::ptr::eq(member.connection, connection);
        let is_its = |index: &u32| self.slots[*index as usize].as_ref().is_some_and(is_it);
        (0..self.slots.len() as u32).filter(is_its).collect()
    }

    /// Notes that the descriptor of a member is closed, while its connection has another one: the kernel keeps the
    /// registration, which cannot be changed any more.
    pub fn note_closed_number(&mut self, index: u32) {
        self.switch_off(index);
        if let Some(member) = self.get(index) {
            let fd = std::mem::replace(&mut member.fd, -1);
            member.is_orphan = true;
            self.by_fd[fd as usize] = 0;
        }
    }

    /// Returns the indices of all members.
    pub fn indices(&self) -> Vec<u32> {
        (0..self.slots.len() as u32).filter(|index| self.slots[*index as usize].is_some()).collect()
    }

    /// Makes every wait poll a member.
    pub fn make_hot(&mut self, index: u32) {
        let reports = self.reports;
        if let Some(member) = self.get(index)
            && member.watch == Watch::Parked
        {
            (member.watch, member.active_at) = (Watch::Hot, reports);
            self.hot.push(index);
            if self.hot.len() > HOT_MAX {
                let idle = self.hot[0];
                self.park(idle);
            }
        }
    }

    /// Asks a member's peer to ring. Returns whether the member has events already, and thus stays hot.
    fn park(&mut self, index: u32) -> bool {
        let Some(member) = self.get(index) else { return false };
        member.connection.ask_for_ring((member.wanted() & 0xffff) as i16);
        if member.poll().ready != 0 {
            return true;
        }
        if member.watch == Watch::Hot {
            member.watch = Watch::Parked;
        }
        self.hot.retain(|hot| *hot != index);
        false
    }

    /// Parks all members. Returns whether one has events already.
    pub fn park_all(&mut self) -> bool {
        let mut is_any_ready = false;
        for index in self.hot.clone() {
            is_any_ready |= self.park(index);
        }
        is_any_ready
    }

    /// Notes that the program has removed a registration that the kernel keeps for now.
    pub fn note_removed(&mut self, index: u32) {
        self.switch_off(index);
        if let Some(member) = self.get(index) {
            member.is_removed = true;
        }
    }

    /// Leaves a member to the kernel until the program changes its registration.
    pub fn await_change(&mut self, index: u32) {
        self.switch_off(index);
        if let Some(member) = self.get(index) {
            member.awaits_change = true;
        }
    }

    /// Ends [`Members::await_change`]. Returns whether it had begun.
    pub fn end_await(&mut self, index: u32) -> bool {
        self.get(index).is_some_and(|member| std::mem::take(&mut member.awaits_change))
    }

    /// Only lets the kernel report events of a member.
    pub fn switch_off(&mut self, index: u32) {
        if let Some(member) = self.get(index) {
            member.watch = Watch::Off;
        }
        self.hot.retain(|hot| *hot != index);
    }

    /// Reports the hot members that have events. Returns those whose registrations end with that.
    pub fn poll(&mut self, buffer: &mut Buffer) -> Vec<u32> {
        let count = self.hot.len();
        let mut spent = Vec::new();
        let mut is_any = false;
        self.has_lanes = false;
        for step in 0..count {
            let index = self.hot[(self.begin + step) % count];
            let reports = self.reports.wrapping_add(1);
            let Some(member) = self.slots[index as usize].as_mut() else { continue };
            let found = member.poll();
            self.has_lanes |= !found.asks_kernel;
            if found.ready == 0 {
                continue;
            }
            buffer.asks_kernel |= found.asks_kernel;
            if !buffer.push_at(&mut member.place, found.ready, member.data) {
                self.begin = (self.begin + step) % count;
                break;
            }
            member.note_report(reports, found);
            is_any = true;
            if member.is_one_shot() {
                spent.push(index);
            }
        }
        if is_any {
            self.reports = self.reports.wrapping_add(1);
            self.park_idle();
        }
        spent
    }

    /// Returns the lane events of a member for which the kernel has reported `of_kernel`: an edge of the kernel's shows
    /// everything that is there.
    pub fn events_with(&mut self, index: u32, of_kernel: u32) -> u32 {
        let reports = self.reports;
        let Some(member) = self.get(index) else { return 0 };
        let found = if of_kernel == 0 { member.poll() } else { member.report_with_edges() };
        if found.ready != 0 {
            member.note_report(reports, found);
        }
        found.ready
    }

    /// Parks the member that has been idle for longest, if it has been for long enough.
    fn park_idle(&mut self) {
        if self.hot.len() <= HOT_MIN {
            return;
        }
        let is_idle = |member: &Member| self.reports.wrapping_sub(member.active_at) > IDLE_REPORTS_MAX;
        let idle = self.hot.iter().find(|index| self.slots[**index as usize].as_ref().is_some_and(is_idle));
        if let Some(index) = idle.copied() {
            self.park(index);
        }
    }
}
