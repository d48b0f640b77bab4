//! Polls the hot registrations and reports the ready ones in the order in which they became ready.
//!
//! A scan polls all hot registrations once and sorts the ready ones by [`ReadyTime`]. Data stored before the data that
//! the scan has found may lie in a connection that was polled too early, or that has sent a wakeup since the inner
//! epoll instance was last read. A scan that has found something therefore reads the inner instance and polls again the
//! connections that were polled before its last find. Timestamps do not make this unnecessary, because a sender's clock
//! may lag. Of what the second poll finds, the scan only accepts what is not newer than its first finds: the rest is
//! left to the next scan.
//!
//! The number of hot connections is bounded. When one more becomes hot, the one that has been idle for longest is
//! parked or, if it is ready, *queued*. The queue is not polled as a whole, because a scan takes no more from its front
//! than it can report.

use super::{HOT_BEGIN, HeldRecords, ReadyEntry, ReadyList, Slot};
use crate::epoll::event_buffer::EventBuffer;
use crate::epoll::ready_time::ReadyTime;
use crate::epoll::registration::{LifelineState, Registration, Target, Watch};
use crate::epoll::set::EpollSet;

/// The largest bound on the number of hot connections. The bound is raised by one for each connection that becomes busy
/// again within [`IDLE_REPORTS_MAX`] reports after it was parked for lack of room, and lowered by one for each
/// connection that is parked because it is idle. Measured: with a fixed bound of 64, a round trip of 100 connections at
/// once takes 120 us; with 100 hot connections, 30 us.
const HOT_MAX: usize = 1024;
/// Number of connections that stay hot however long they are idle: reading their wakeups from the inner epoll instance
/// takes as long as polling them.
const HOT_MIN: usize = 8;
/// A connection is idle if it was not among the last 256 reports. Parking it and being woken for it takes 4 us, and a
/// poll that finds nothing 15 ns (measured); parking it too early thus costs no more than having polled it for that
/// long.
const IDLE_REPORTS_MAX: u32 = 256;
/// How many of the connections that cannot be woken for are polled by each scan, in turn.
const UNPARKABLE_POLLS: usize = 4;

/// The state of the current scan.
struct Scan {
    thorough: bool,
    /// When it first found something. Scans that find nothing do not read the clock.
    found_at: Option<ReadyTime>,
}

impl Scan {
    #[inline]
    fn found_at(&mut self) -> ReadyTime {
        *self.found_at.get_or_insert_with(ReadyTime::now)
    }
}

fn in_use(slots: &mut [Slot], index: u32) -> &mut Registration {
    slots[index as usize].registration.as_mut().expect("an index in use")
}

impl ReadyList {
    /// Makes every wait poll a registration. The caller calls [`ReadyList::trim`] afterwards.
    pub(super) fn make_hot_untrimmed(&mut self, index: u32) {
        let reports = self.reports;
        let registration = self.at_mut(index);
        if !registration.stays_hot() || matches!(registration.watch, Watch::Hot | Watch::Queued(_)) {
            return;
        }
        let is_busy =
            registration.was_ever_reported && reports.wrapping_sub(registration.active_at) <= IDLE_REPORTS_MAX;
        registration.active_at = reports;
        if is_busy && self.hot.len() >= self.hot_limit() {
            self.hot_extra = (self.hot_extra + 1).min(HOT_MAX - HOT_BEGIN);
        }
        self.set_watch(index, Watch::Hot);
    }

    /// Returns the bound on the number of hot connections.
    fn hot_limit(&self) -> usize {
        HOT_BEGIN + self.hot_extra
    }

    /// Makes every wait poll a registration, and parks or queues others to keep the bound.
    pub fn make_hot(&mut self, index: u32) {
        self.make_hot_untrimmed(index);
        self.trim();
    }

    /// Moves a registration to the list that belongs to `watch`.
    pub(super) fn set_watch(&mut self, index: u32, watch: Watch) {
        let registration = self.at_mut(index);
        let is_connection = registration.is_connection();
        match std::mem::replace(&mut registration.watch, watch) {
            Watch::Off => {}
            Watch::Hot if is_connection => self.hot.retain(|&other| other != index),
            Watch::Hot => self.hot_others.retain(|&other| other != index),
            Watch::Queued(since) => drop(self.queue.remove(&(since, index))),
            Watch::Parked => self.parked_count -= 1,
            Watch::Unparkable => self.unparkable.retain(|&other| other != index),
        }
        match watch {
            Watch::Off => {}
            Watch::Hot if is_connection => self.hot.push(index),
            Watch::Hot => self.hot_others.push(index),
            Watch::Queued(since) => drop(self.queue.insert((since, index))),
            Watch::Parked => self.parked_count += 1,
            Watch::Unparkable => self.unparkable.push_back(index),
        }
    }

    /// Parks or queues the connections that have been idle for longest until the bound is kept.
    pub(super) fn trim(&mut self) {
        let excess = self.hot.len().saturating_sub(self.hot_limit());
        if excess > 0 {
            let evicted: Vec<u32> = self.hot.drain(..excess).collect();
            evicted.into_iter().for_each(|index| self.evict(index));
        }
    }

    /// Parks the connection that has been idle for longest, if it has been idle long enough.
    fn park_idle(&mut self) {
        let Some(&index) = self.hot.first() else { return };
        if self.reports.wrapping_sub(self.at(index).active_at) > IDLE_REPORTS_MAX {
            self.hot.remove(0);
            self.hot_extra = self.hot_extra.saturating_sub(1);
            self.evict(index);
        }
    }

    /// Parks or queues a connection that has just been removed from the hot ones.
    fn evict(&mut self, index: u32) {
        let registration = self.at_mut(index);
        registration.watch = Watch::Off;
        let mut ready = registration.poll(true);
        if ready == 0 {
            #[cfg(test)]
            crate::epoll::tests::while_parking();
            if !self.park_unless_ready(index, HeldRecords::Published) {
                return;
            }
            ready = self.at_mut(index).poll(true);
        }
        let since = self.at_mut(index).ready_since(ready, ReadyTime::now());
        self.set_watch(index, Watch::Queued(since));
    }

    /// Parks a connection that is in no list, and polls it once more. Returns `true` if it is ready; it is then still
    /// in no list.
    fn park_unless_ready(&mut self, index: u32, held: HeldRecords) -> bool {
        let is_parked = self.park(index);
        if held == HeldRecords::Published {
            self.at(index).publish_held();
        }
        if self.at_mut(index).poll(true) != 0 {
            return true;
        }
        // The poll may have found that it waits for room, of which the peer does not notify it.
        let is_parked = is_parked && !self.at(index).lacks_wakeup();
        self.set_watch(index, if is_parked { Watch::Parked } else { Watch::Unparkable });
        false
    }

    /// Reports ready registrations, oldest first.
    #[inline]
    pub fn scan(&mut self, buffer: &mut EventBuffer, thorough: bool) {
        match self.single_lane() {
            Some(index) => self.scan_single(index, buffer, thorough),
            None => self.scan_all(buffer, thorough),
        }
    }

    /// Returns the connection that is the only one to poll, if it uses a lane.
    #[inline(always)]
    fn single_lane(&self) -> Option<u32> {
        let [index] = self.hot[..] else { return None };
        let is_alone = self.parked_count + self.hot_others.len() + self.unparkable.len() + self.queue.len() == 0;
        (is_alone && !self.at(index).is_on_lifeline()).then_some(index)
    }

    /// As [`ReadyList::scan_all`], for a single connection: it needs no order, and so reads neither clock nor
    /// timestamp.
    #[inline(always)]
    fn scan_single(&mut self, index: u32, buffer: &mut EventBuffer, thorough: bool) {
        let registration = in_use(&mut self.slots, index);
        let ready = registration.poll(thorough);
        if ready == 0 || buffer.is_full() || !buffer.push(registration, ready) {
            return;
        }
        self.reports = self.reports.wrapping_add(1);
        (registration.active_at, registration.was_ever_reported) = (self.reports, true);
        registration.note_report_of_single(ready);
        if !registration.stays_hot() {
            self.set_watch(index, Watch::Off);
        }
    }

    #[inline(never)]
    fn scan_all(&mut self, buffer: &mut EventBuffer, thorough: bool) {
        let mut scan = Scan { thorough, found_at: None };
        let last_find = self.poll_all(&mut scan);
        if !self.found.is_empty() {
            self.poll_again(&mut scan, last_find);
        }
        if !self.found.is_empty() || !self.queue.is_empty() {
            self.report(buffer, &mut scan);
            if self.hot.len() > HOT_MIN {
                self.park_idle();
            }
        }
        if std::mem::take(&mut self.has_polled_lifeline) {
            self.leave_lifelines_to_kernel();
        }
        self.trim();
    }

    /// Leaves connections without unreported events to the kernel if their data travels over lifelines: polling them
    /// costs system calls, and the kernel knows their order.
    fn leave_lifelines_to_kernel(&mut self) {
        let mut hot = std::mem::take(&mut self.hot);
        hot.retain(|&index| !self.at(index).can_be_left_to_kernel() || !self.leave_to_kernel(index, false));
        self.hot = hot;
    }

    /// Polls all hot registrations. Returns the index of the last find among the hot connections; those from there on
    /// were polled before it.
    #[inline]
    fn poll_all(&mut self, scan: &mut Scan) -> usize {
        let mut last_find = self.hot.len();
        // The connections that were busy last come first, so that few have to be polled again.
        for place in (0..self.hot.len()).rev() {
            if self.poll(self.hot[place], scan, None) {
                last_find = place;
            }
        }
        if (!self.hot_others.is_empty() || !self.unparkable.is_empty()) && self.poll_others(scan) {
            return 0;
        }
        last_find
    }

    /// Records a registration if it is ready and not newer than `newest`. One without a timestamp is never newer.
    #[inline]
    fn poll(&mut self, index: u32, scan: &mut Scan, newest: Option<ReadyTime>) -> bool {
        let registration = in_use(&mut self.slots, index);
        let is_on_lifeline = registration.is_on_lifeline();
        self.has_polled_lifeline |= is_on_lifeline;
        let ready = registration.poll(scan.thorough || is_on_lifeline);
        if ready == 0 {
            return false;
        }
        let since = registration.ready_since(ready, scan.found_at());
        if newest.is_some_and(|newest| since > newest && registration.has_stamp()) {
            return false;
        }
        registration.is_found = true;
        self.found.push(ReadyEntry { since, index, ready });
        true
    }

    /// Polls what is not a hot connection; returns whether something is ready.
    fn poll_others(&mut self, scan: &mut Scan) -> bool {
        let before = self.found.len();
        for place in 0..self.hot_others.len() {
            self.poll(self.hot_others[place], scan, None);
        }
        let Self { hot_others, slots, .. } = self;
        hot_others.retain(|&index| {
            let registration = in_use(slots, index);
            registration.watch = if registration.stays_hot() { Watch::Hot } else { Watch::Off };
            registration.watch == Watch::Hot
        });
        for _ in 0..self.unparkable.len().min(UNPARKABLE_POLLS) {
            let Some(index) = self.unparkable.pop_front() else { break };
            if self.poll(index, scan, None) {
                let reports = self.reports;
                let registration = self.at_mut(index);
                (registration.watch, registration.active_at) = (Watch::Hot, reports);
                self.hot.push(index);
            } else {
                self.unparkable.push_back(index);
            }
        }
        self.found.len() > before
    }

    /// Finds what became ready before the finds of the first poll: among connections that have sent wakeups, and those
    /// that were polled before the last find.
    #[inline]
    fn poll_again(&mut self, scan: &mut Scan, last_find: usize) {
        let newest = self.found.iter().map(|found| found.since).max();
        let others_polled = self.hot_others.len();
        if self.parked_count > 0 {
            self.collect_events();
        }
        for place in (last_find..self.hot.len()).rev() {
            if !self.at(self.hot[place]).is_found {
                self.poll(self.hot[place], scan, newest);
            }
        }
        for place in others_polled..self.hot_others.len() {
            self.poll(self.hot_others[place], scan, newest);
        }
    }

    /// Fills the program's array, oldest first.
    fn report(&mut self, buffer: &mut EventBuffer, scan: &mut Scan) {
        if !self.queue.is_empty() {
            self.take_queued(buffer.room(), scan);
        }
        let mut found = std::mem::take(&mut self.found);
        if found.len() > 1 {
            found.sort_unstable_by_key(|one| (one.since, one.index));
        }
        self.reports = self.reports.wrapping_add(1);
        for (place, one) in found.iter_mut().enumerate() {
            let registration = in_use(&mut self.slots, one.index);
            if !buffer.is_full() && buffer.push(registration, one.ready) {
                one.since = scan.found_at().behind(place);
                (registration.active_at, registration.was_ever_reported) = (self.reports, true);
                registration.note_report(one.ready, one.since);
            } else if registration.watch == Watch::Hot {
                registration.is_found = false;
            }
        }
        self.put_back(&found);
        found.clear();
        self.found = found;
    }

    /// Moves entries from the front of the queue to the finds, at most `room` of them.
    fn take_queued(&mut self, mut room: usize, scan: &mut Scan) {
        while room > 0
            && let Some((queued_since, index)) = self.queue.pop_first()
        {
            self.at_mut(index).watch = Watch::Off;
            if !self.poll(index, scan, None) {
                self.set_watch(index, Watch::Hot);
            } else if self.found.last().is_some_and(|one| one.since == queued_since) {
                room -= 1;
            }
            // Otherwise it was read and became ready again since, so that others in the queue may be due before it.
        }
    }

    /// After a report, moves reported hot connections behind the other hot ones, and returns queued ones to the queue.
    fn put_back(&mut self, found: &[ReadyEntry]) {
        if let [one] = found
            && self.hot.last() == Some(&one.index)
            && self.at(one.index).stays_hot()
        {
            self.at_mut(one.index).is_found = false;
            return;
        }
        let Self { hot, slots, .. } = self;
        hot.retain(|&index| !in_use(slots, index).is_found);
        let room = self.hot_limit();
        for one in found {
            let registration = in_use(&mut self.slots, one.index);
            if !std::mem::take(&mut registration.is_found) || !registration.is_connection() {
                continue;
            }
            let was_queued = registration.watch == Watch::Off;
            registration.watch = Watch::Off;
            if !registration.stays_hot() {
                continue;
            }
            if was_queued && !registration.is_edge() && self.hot.len() >= room {
                self.set_watch(one.index, Watch::Queued(one.since));
            } else {
                registration.watch = Watch::Hot;
                self.hot.push(one.index);
            }
        }
    }

    /// Returns whether something is ready, without reporting it.
    pub fn peek(&mut self, thorough: bool) -> bool {
        let Self { hot, hot_others, unparkable, slots, .. } = self;
        let others = unparkable.iter().take(if thorough { usize::MAX } else { UNPARKABLE_POLLS });
        let mut polled = hot.iter().rev().chain(&*hot_others).chain(others);
        let is_ready = polled.any(|&index| in_use(slots, index).check(thorough) != 0) || self.has_queued(thorough);
        self.trim();
        is_ready
    }

    /// Returns whether a queued connection is ready; makes those that no longer are hot.
    fn has_queued(&mut self, thorough: bool) -> bool {
        while let Some(&(_, index)) = self.queue.first() {
            if self.at_mut(index).poll(thorough) != 0 {
                return true;
            }
            self.set_watch(index, Watch::Hot);
        }
        false
    }

    /// Before a sleep, requests wakeups from the peers of all hot connections, polls them once more, and keeps only the
    /// ready ones hot. Nested sets do the same and add themselves to `asleep`. Returns `false` if something is ready.
    pub fn park_all(&mut self, asleep: &mut Vec<&'static EpollSet>, held: HeldRecords) -> bool {
        let mut is_quiet = !self.has_queued(true);
        self.has_unwakeable = false;
        self.poll_held();
        for &index in &self.hot_others {
            let registration = in_use(&mut self.slots, index);
            if let Target::Nested(set) = registration.target {
                self.has_unwakeable |= set.add_sleeper(asleep);
            }
            registration.was_reported = false;
            is_quiet &= registration.check(true) == 0;
        }
        let mut hot = std::mem::take(&mut self.hot);
        hot.extend(std::mem::take(&mut self.unparkable));
        hot.retain(|&index| {
            let registration = self.at_mut(index);
            registration.was_reported = false;
            registration.watch = Watch::Off;
            let is_ready = self.park_unless_ready(index, held);
            if is_ready {
                self.at_mut(index).watch = Watch::Hot;
            } else if let Some(left_ns) = self.at(index).held_left_ns() {
                self.held.push(index);
                self.held_left_ns = Some(self.held_left_ns.map_or(left_ns, |first_ns| first_ns.min(left_ns)));
            }
            is_ready
        });
        is_quiet &= hot.is_empty();
        self.hot = hot;
        // Not whether they could be parked by now: the peers have not been asked.
        self.has_unwakeable |= self.unparkable.iter().any(|&index| self.at(index).lifeline != LifelineState::Ended);
        is_quiet
    }

    /// At the end of a wait while other threads sleep on the set: requests wakeups for later events, and wakes the
    /// threads for events that are there already.
    pub fn hand_over_to_sleepers(&mut self) {
        // The registrations that were just reported are behind the rest of the queue.
        let next = self.queue.first().map(|&(_, index)| index);
        let mut rings = next.is_some_and(|index| !std::mem::take(&mut self.at_mut(index).was_reported));
        for place in 0..self.hot.len() {
            let index = self.hot[place];
            let is_parked = self.park(index);
            let registration = self.at_mut(index);
            // The sleeping threads know neither when held records are due nor of a connection that cannot be woken for.
            registration.publish_held();
            rings |= !std::mem::take(&mut registration.was_reported) && registration.check(true) != 0;
            rings |= registration.needs_polling(is_parked);
        }
        for &index in &self.hot_others {
            let registration = in_use(&mut self.slots, index);
            rings |= !std::mem::take(&mut registration.was_reported) && registration.check(true) != 0;
        }
        if rings {
            self.wake_sleepers();
        }
    }

    /// As [`ReadyList::hand_over_to_sleepers`], for one that was just added or modified. The poll may have consumed
    /// what the kernel was to report from the lifeline; the thread that wakes up therefore polls it. A nested set is
    /// always polled, because its connections have not been asked for wakeups.
    pub fn announce(&mut self, index: u32) {
        let is_parked = self.park(index);
        let registration = self.at_mut(index);
        registration.publish_held();
        let is_ready = registration.check(true) != 0;
        if is_ready || registration.needs_polling(is_parked) || matches!(registration.target, Target::Nested(_)) {
            self.unpark_for_poll(index);
            self.wake_sleepers();
        }
    }
}
