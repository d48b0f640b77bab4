//! The waiting policy: when a wait spins, when it yields, and when it blocks.
//!
//! Waits on lanes in shared memory and in windows, calls that wait for many connections, and the threads of proxies all
//! follow it. A wait ([`Spin`]) has three phases:
//!
//! 1. It spins: it polls without a pause, for about 10 us.
//! 2. It alternates polls and `sched_yield`, and polls the kernel every 5 us, until it has been awake for 50 us. Short
//!    yields, in which other threads ran, do not count; 300 us is the limit.
//! 3. It blocks until it is woken.
//!
//! With idle processors this is all that happens. A waiter cannot know whether another thread needs its processor. Four
//! measurements tell, and each changes later waits:
//!
//! * **The length of yields**, in the whole process. A yield of 0.7 to 100 us is *short*: another thread ran for a
//!   moment, perhaps the one that this wait is for. A shorter one returned at once, because no other thread was ready;
//!   in a longer one a CPU-bound thread ran. When most yields of a wait were short and it ended with data, the next
//!   2048 waits begin in phase 2, until 16 in a row gain nothing. Four programs that alternate on two processors see
//!   single waits without short yields all the time; to fall back to phase 1 for one of them would cost the better part
//!   of both processors.
//! * **Oversubscription** of the machine: the kernel's count of runnable threads, sampled every 4 ms. With more of them
//!   than processors, the scheduler runs a spinning thread last when its data comes, and a blocked one at once. Waits
//!   then skip phase 2 unless their yields are short. After 16 waits one probes its yields; the interval doubles, up to
//!   1024, with each probe in vain.
//! * **Failed spins** in a row at one wait site ([`AdaptiveSpin`]). Where 8 in a row ended in a long block, data does
//!   not come within 50 us there, and waits block at once. One in 32 spins nevertheless, and while that succeeds, all
//!   do.
//! * **CPU contention** ([`crate::contention`]), in the whole process: how long a thread lost its processor in a yield,
//!   or between two polls of a server thread. Milliseconds nearly all the time mean a CPU-bound thread. Waits then do
//!   not yield for a while, and after a failed spin some waits at its site block at once: twice as many each time, at
//!   most 32. A server thread skips phase 2.
//!
//! Each measurement covers what the others miss. Yields cost the waiter its time slice, so they are not tried where the
//! kernel reports CPU-bound threads. The kernel's count does not tell which threads block again soon, nor on which
//! processor they run. And data may never come, on the idlest machine. Each wait is decided in one place when it begins
//! (`SpinMode::choose`) and in one after each poll (`Spin::next_step`).

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use volmem::{TICKS_PER_MICROSECOND, ticks};

use crate::contention::CpuContention;
use crate::oversubscription;

/// Polls of phase 1: about ten microseconds.
const SPIN_POLLS_MAX: u32 = 1500;
/// Number of waits that begin in phase 2 after one whose yields were short.
const YIELD_MODE_WAITS: u32 = 2048;
/// Number of waits in a row without short yields that end this.
const FAILED_YIELD_WAITS_MAX: u32 = 16;
/// Number of waits, on an oversubscribed machine, between two that probe the length of yields.
const YIELD_PROBE_INTERVAL: RangeInclusive<u32> = 16..=1024;
/// In a longer yield a CPU-bound thread ran, which keeps the processor for milliseconds: a thread that waits or copies
/// a message is done sooner.
const SHORT_YIELD_US_MAX: u64 = 100;
/// A shorter yield returned at once, because no other thread was ready to run.
const SHORT_YIELD_TICKS_MIN: u64 = 7 * TICKS_PER_MICROSECOND / 10;
/// How long a wait stays awake before it blocks. A wake-up across cores costs 20 us and more, so spinning for about
/// twice that is never much worse than the best choice in hindsight (Karlin et al. 1990).
const AWAKE_US: u64 = 50;
/// The limit including short yields, which do not count: the other thread may produce what the wait is for.
const AWAKE_US_MAX: u64 = 300;
/// Interval of polls of the lifeline, each of which is a system call.
const KERNEL_POLL_US: u64 = 5;
/// Number of failed spins in a row after which waits block at once.
const FAILED_SPINS_MAX: u32 = 8;
/// One wait in this number spins in spite of failed spins. Two endpoints that both block at once find out by it that
/// neither has to.
const SPIN_PROBE_INTERVAL: u32 = 32;
/// A block that ended sooner, wake-up included, is one that spinning would have saved.
const SHORT_BLOCK_US: u64 = AWAKE_US;
/// Number of waits at a site that block at once after a spin failed under CPU contention. Two endpoints with a
/// processor each lose it at times and are fast in between; those that share one with the thread they wait for must not
/// spin.
const BLOCK_WAITS: RangeInclusive<u32> = 1..=32;

/// What the waits of a process have measured.
#[derive(Debug)]
struct ProcessHistory {
    yield_waits_left: AtomicU32,
    /// Waits in a row without short yields.
    failed_yield_waits: AtomicU32,
    /// Waits until the next that probes yields.
    waits_to_yield_probe: AtomicU32,
    yield_probe_interval: Backoff,
    /// Returns whether the machine is oversubscribed; takes the time in ticks.
    is_oversubscribed: fn(u64) -> bool,
    contention: CpuContention,
}

static HISTORY: ProcessHistory = ProcessHistory::new(oversubscription::is_oversubscribed);

impl ProcessHistory {
    const fn new(is_oversubscribed: fn(u64) -> bool) -> Self {
        Self {
            yield_waits_left: AtomicU32::new(0),
            failed_yield_waits: AtomicU32::new(0),
            waits_to_yield_probe: AtomicU32::new(0),
            yield_probe_interval: Backoff::new(YIELD_PROBE_INTERVAL),
            is_oversubscribed,
            contention: CpuContention::new(),
        }
    }

    #[inline]
    fn take_yield_wait(&self) -> bool {
        take_one(&self.yield_waits_left)
    }

    /// Records the end of a wait that has yielded.
    #[cold]
    fn record(&self, wait: &Spin) {
        if wait.yields.are_mostly_short() && !wait.ends_blocked {
            self.failed_yield_waits.store(0, Ordering::Relaxed);
            self.yield_probe_interval.reset();
            self.waits_to_yield_probe.store(0, Ordering::Relaxed);
            return self.yield_waits_left.store(YIELD_MODE_WAITS, Ordering::Relaxed);
        }
        let failed = self.failed_yield_waits.load(Ordering::Relaxed).saturating_add(1);
        self.failed_yield_waits.store(failed, Ordering::Relaxed);
        if failed >= FAILED_YIELD_WAITS_MAX {
            self.yield_waits_left.store(0, Ordering::Relaxed);
        }
        if wait.is_yield_probe {
            self.waits_to_yield_probe.store(self.yield_probe_interval.next(), Ordering::Relaxed);
        }
    }
}

/// An exponential backoff, counted in waits.
#[derive(Debug)]
struct Backoff {
    range: RangeInclusive<u32>,
    next: AtomicU32,
}

impl Backoff {
    const fn new(range: RangeInclusive<u32>) -> Self {
        let next = AtomicU32::new(*range.start());
        Self { range, next }
    }

    fn next(&self) -> u32 {
        let next = self.next.load(Ordering::Relaxed);
        self.next.store((2 * next).min(*self.range.end()), Ordering::Relaxed);
        next
    }

    fn reset(&self) {
        self.next.store(*self.range.start(), Ordering::Relaxed);
    }
}

/// Counts down; returns `false` if none was left. Two threads that count at once may count as one.
#[inline]
fn take_one(left: &AtomicU32) -> bool {
    let count = left.load(Ordering::Relaxed);
    if count > 0 {
        left.store(count - 1, Ordering::Relaxed);
    }
    count > 0
}

/// The history of the waits at one site, such as one connection: whether spinning there obtains data.
#[derive(Debug)]
pub struct AdaptiveSpin {
    is_server: bool,
    /// Waits in a row that ended in a long block.
    failed_spins: AtomicU32,
    /// Waits that blocked.
    blocks: AtomicU32,
    /// Time in ticks at which the last of them blocked.
    blocked_at: AtomicU64,
    /// Waits that are still to block at once.
    block_waits_left: AtomicU32,
    block_waits: Backoff,
}

impl AdaptiveSpin {
    /// Returns the history of a site without waits.
    pub const fn new() -> Self {
        Self {
            is_server: false,
            failed_spins: AtomicU32::new(0),
            blocks: AtomicU32::new(0),
            blocked_at: AtomicU64::new(0),
            block_waits_left: AtomicU32::new(0),
            block_waits: Backoff::new(BLOCK_WAITS),
        }
    }

    /// Returns the history of a thread that serves many others. It detects contention by polls that come late
    /// ([`Spin::note_poll`]) and does not count failed spins, because its events come from any of them.
    pub const fn for_server() -> Self {
        Self { is_server: true, ..Self::new() }
    }

    /// Forgets the failed spins.
    pub fn reset(&self) {
        self.failed_spins.store(0, Ordering::Relaxed);
    }

    /// Returns whether this process has measured that other threads need its processors.
    pub fn is_core_shared(&self) -> bool {
        HISTORY.contention.may_be_present() || self.has_useful_yields()
    }

    /// Returns whether it has measured so by short yields, and not by CPU contention.
    pub fn has_useful_yields(&self) -> bool {
        !HISTORY.contention.may_be_present() && HISTORY.yield_waits_left.load(Ordering::Relaxed) > 0
    }

    #[inline]
    fn is_spinning_vain(&self) -> bool {
        self.failed_spins.load(Ordering::Relaxed) >= FAILED_SPINS_MAX
    }

    #[inline]
    fn is_spin_probe(&self) -> bool {
        !self.is_server && self.blocks.load(Ordering::Relaxed).is_multiple_of(SPIN_PROBE_INTERVAL)
    }

    #[cold]
    fn note_block(&self, now: u64) {
        if self.is_server {
            return;
        }
        // Threads that count at once may count as one.
        let failed_spins = self.failed_spins.load(Ordering::Relaxed);
        self.failed_spins.store(failed_spins.saturating_add(1), Ordering::Relaxed);
        self.blocks.store(self.blocks.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.blocked_at.store(now, Ordering::Relaxed);
    }

    /// Records the end of the block that a [`Spin`] ended with.
    pub fn note_wakeup(&self) {
        self.note_wakeup_at(ticks());
    }

    fn note_wakeup_at(&self, now: u64) {
        let slept = now.wrapping_sub(self.blocked_at.load(Ordering::Relaxed));
        if slept < SHORT_BLOCK_US * TICKS_PER_MICROSECOND {
            self.reset();
        }
    }

    fn block_next_waits(&self) {
        self.block_waits_left.store(self.block_waits.next(), Ordering::Relaxed);
    }
}

impl Default for AdaptiveSpin {
    fn default() -> Self {
        Self::new()
    }
}

/// The phase in which a wait begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpinMode {
    /// Phase 1.
    Spin,
    /// Phase 2: it yields after its first poll.
    Yield,
    /// It blocks after its first poll.
    Block,
}

impl SpinMode {
    /// Chooses the phase in which a wait begins, and whether it spins in spite of oversubscription.
    #[inline]
    fn choose(history: &ProcessHistory, site: Option<&AdaptiveSpin>) -> (Self, bool) {
        if site.is_some_and(|site| take_one(&site.block_waits_left)) {
            return (Self::Block, false);
        }
        if history.contention.may_be_present() && history.contention.is_present(ticks()) {
            return (Self::Spin, site.is_none_or(|site| !site.is_server));
        }
        let awake = if history.take_yield_wait() { Self::Yield } else { Self::Spin };
        match site {
            Some(site) if site.is_spin_probe() => (awake, true),
            Some(site) if site.is_spinning_vain() => (Self::Block, false),
            _ => (awake, false),
        }
    }
}

/// What a waiter does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Poll memory again.
    Poll,
    /// Poll memory, and the kernel for events that memory does not show.
    PollKernel,
    /// Block.
    Block,
}

/// What a wait does in phase 2 before its next poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Block,
    PollKernel,
    Yield,
    Poll,
}

/// Returns what this process has measured of CPU-bound threads.
pub(crate) fn cpu_contention() -> &'static CpuContention {
    &HISTORY.contention
}

/// Returns whether another thread ran for a moment in a yield of this length.
pub(crate) fn is_short_yield(ticks: u64) -> bool {
    (SHORT_YIELD_TICKS_MIN..SHORT_YIELD_US_MAX * TICKS_PER_MICROSECOND).contains(&ticks)
}

/// The yields of one wait.
#[derive(Debug, Clone, Copy, Default)]
struct Yields {
    count: u32,
    /// The short ones.
    short: u32,
    /// Ticks of the short ones.
    short_ticks: u64,
}

impl Yields {
    fn note(&mut self, ticks: u64) {
        self.count = self.count.saturating_add(1);
        if is_short_yield(ticks) {
            self.short = self.short.saturating_add(1);
            self.short_ticks += ticks;
        }
    }

    /// Returns whether most were short.
    fn are_mostly_short(&self) -> bool {
        2 * u64::from(self.short) > u64::from(self.count)
    }
}

/// One wait. Call [`Spin::iterate`] after every poll that found nothing. The module says what it does when.
#[derive(Debug)]
pub struct Spin {
    polls: u32,
    /// Time in ticks at which phase 2 began; 0 before.
    started: u64,
    kernel_polled: u64,
    yields: Yields,
    mode: SpinMode,
    /// It spins in spite of failed spins and of oversubscription, and does not yield there.
    is_spin_probe: bool,
    /// It probes the length of yields on an oversubscribed machine.
    is_yield_probe: bool,
    ends_blocked: bool,
    history: &'static ProcessHistory,
    site: Option<&'static AdaptiveSpin>,
    /// Time in ticks of the last poll that was noted; 0 before.
    polled: u64,
}

impl Spin {
    /// Begins a wait.
    #[inline]
    pub fn new() -> Self {
        Self::begin(&HISTORY, None)
    }

    /// Begins a wait at a site. If it blocks, [`AdaptiveSpin::note_wakeup`] must follow.
    #[inline]
    pub fn with(site: &'static AdaptiveSpin) -> Self {
        Self::begin(&HISTORY, Some(site))
    }

    #[inline]
    fn begin(history: &'static ProcessHistory, site: Option<&'static AdaptiveSpin>) -> Self {
        let (mode, is_spin_probe) = SpinMode::choose(history, site);
        Self {
            polls: if mode == SpinMode::Spin { 0 } else { SPIN_POLLS_MAX },
            started: 0,
            kernel_polled: 0,
            yields: Yields::default(),
            mode,
            is_spin_probe,
            is_yield_probe: false,
            ends_blocked: false,
            history,
            site,
            polled: 0,
        }
    }

    /// Returns whether its first iteration blocks: a caller that polls many connections may skip the poll.
    pub fn blocks_immediately(&self) -> bool {
        self.mode == SpinMode::Block
    }

    /// Records a poll of a server thread. Returns the time in ticks.
    pub fn note_poll(&mut self) -> u64 {
        let now = ticks();
        self.note_poll_at(now);
        now
    }

    fn note_poll_at(&mut self, now: u64) {
        let before = std::mem::replace(&mut self.polled, now);
        if before != 0 {
            self.history.contention.note_preemption(before, now);
        }
    }

    /// Performs one spin iteration. Returns what to do next.
    #[inline]
    pub fn iterate(&mut self) -> Action {
        self.iterate_by(1)
    }

    /// Performs one spin iteration after a poll that took as long as `polls` ordinary ones.
    #[inline]
    pub fn iterate_by(&mut self, polls: u32) -> Action {
        self.polls = self.polls.saturating_add(polls);
        if self.polls < SPIN_POLLS_MAX { Action::Poll } else { self.iterate_slowly() }
    }

    #[cold]
    fn iterate_slowly(&mut self) -> Action {
        let now = ticks();
        match self.next_step(now) {
            Step::Block => {
                if let Some(site) = self.site.take() {
                    if self.mode != SpinMode::Block && self.history.contention.may_be_present() {
                        site.block_next_waits();
                    }
                    site.note_block(now);
                }
                self.ends_blocked = true;
                Action::Block
            }
            Step::PollKernel => {
                self.kernel_polled = now;
                Action::PollKernel
            }
            Step::Yield => {
                rustix::thread::sched_yield();
                let after = ticks();
                self.yields.note(after.wrapping_sub(now));
                self.history.contention.note_preemption(now, after);
                Action::Poll
            }
            Step::Poll => Action::Poll,
        }
    }

    /// Returns the next step of phase 2.
    fn next_step(&mut self, now: u64) -> Step {
        if self.mode == SpinMode::Block || self.is_over(now) {
            return Step::Block;
        }
        let is_contended = self.is_contended(now);
        if is_contended && !self.is_spin_probe {
            return Step::Block;
        }
        if self.started == 0 {
            (self.started, self.kernel_polled) = (now, now);
            if self.mode == SpinMode::Spin {
                return Step::PollKernel;
            }
        }
        match () {
            () if now.wrapping_sub(self.kernel_polled) > KERNEL_POLL_US * TICKS_PER_MICROSECOND => Step::PollKernel,
            () if is_contended => Step::Poll,
            () => Step::Yield,
        }
    }

    /// Returns whether it has been awake for as long as it may.
    fn is_over(&self, now: u64) -> bool {
        let limit_ticks = AWAKE_US * TICKS_PER_MICROSECOND + self.yields.short_ticks;
        let limit_ticks = limit_ticks.min(AWAKE_US_MAX * TICKS_PER_MICROSECOND);
        self.started != 0 && now.wrapping_sub(self.started) > limit_ticks
    }

    /// Returns whether other threads than such with short yields need the processor, as far as is known: the length of
    /// yields is only probed now and then.
    fn is_contended(&mut self, now: u64) -> bool {
        if self.history.contention.is_present(now) {
            return true;
        }
        let is_oversubscribed = self.history.is_oversubscribed;
        if self.mode == SpinMode::Yield || self.is_yield_probe {
            return self.yields.count > 0 && !self.yields.are_mostly_short() && is_oversubscribed(now);
        }
        if !is_oversubscribed(now) {
            return false;
        }
        self.is_yield_probe = !take_one(&self.history.waits_to_yield_probe);
        !self.is_yield_probe
    }
}

impl Drop for Spin {
    #[inline]
    fn drop(&mut self) {
        if self.yields.count > 0 {
            self.history.record(self);
        }
        // Data that was there at the first poll says nothing about waits.
        let Some(site) = self.site.filter(|_| self.polls != 0 && !self.blocks_immediately()) else { return };
        if site.failed_spins.load(Ordering::Relaxed) != 0 {
            site.reset();
        }
        if self.history.contention.may_be_present() {
            site.block_waits.reset();
        }
    }
}

impl Default for Spin {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT_TICKS: u64 = 2 * TICKS_PER_MICROSECOND;
    const IDLE_TICKS: u64 = SHORT_YIELD_TICKS_MIN - 1;
    const LONG_TICKS: u64 = SHORT_YIELD_US_MAX * TICKS_PER_MICROSECOND;

    /// ProcessHistory of a test, on a machine with processors to spare.
    const fn idle() -> ProcessHistory {
        ProcessHistory::new(|_| false)
    }

    fn wait_on(history: &'static ProcessHistory) -> Spin {
        Spin::begin(history, None)
    }

    /// A wait at a site, without the history of other tests.
    fn wait_at(site: &'static AdaptiveSpin) -> Spin {
        static HISTORY: ProcessHistory = idle();
        Spin::begin(&HISTORY, Some(site))
    }

    /// Whether a wait goes through phase 1.
    fn spins_first(spin: &mut Spin) -> bool {
        (1..SPIN_POLLS_MAX).all(|_| spin.iterate() == Action::Poll && spin.started == 0)
    }

    fn end_after_yields(mut spin: Spin, yields: &[u64]) {
        yields.iter().for_each(|&ticks| spin.yields.note(ticks));
    }

    /// Waits until it blocks.
    fn fail_to_spin(site: &'static AdaptiveSpin) {
        let mut spin = wait_at(site);
        spin.started = 1;
        while spin.iterate() != Action::Block {}
    }

    #[test]
    fn after_failed_spins_waits_block_at_once_except_probes() {
        static SITE: AdaptiveSpin = AdaptiveSpin::new();
        for _ in 0..FAILED_SPINS_MAX {
            assert!(!wait_at(&SITE).blocks_immediately());
            SITE.note_block(0);
        }
        let blocks_immediately = |_| {
            let mut spin = wait_at(&SITE);
            let blocks_immediately = spin.blocks_immediately();
            assert_ne!(blocks_immediately, spin.is_spin_probe);
            if blocks_immediately {
                assert_eq!(spin.iterate(), Action::Block);
            } else {
                SITE.note_block(0);
            }
            spin.site.take();
            blocks_immediately
        };
        assert_eq!((0..SPIN_PROBE_INTERVAL).filter(|&wait| !blocks_immediately(wait)).count(), 1);
    }

    #[test]
    fn a_successful_spin_makes_waits_spin_again() {
        static SITE: AdaptiveSpin = AdaptiveSpin::new();
        (0..FAILED_SPINS_MAX).for_each(|_| SITE.note_block(0));
        // A wait that only blocks does not.
        fail_to_spin(&SITE);
        assert!(SITE.is_spinning_vain());
        drop(wait_at(&SITE));
        assert!(SITE.is_spinning_vain());
        let mut spin = wait_at(&SITE);
        spin.mode = SpinMode::Spin;
        drop(spin);
        assert!(!SITE.is_spinning_vain());
    }

    #[test]
    fn probes_continue_while_they_succeed() {
        static SITE: AdaptiveSpin = AdaptiveSpin::new();
        (0..SPIN_PROBE_INTERVAL).for_each(|_| SITE.note_block(0));
        for _ in 0..3 {
            let mut spin = wait_at(&SITE);
            assert!(spin.is_spin_probe && !spin.blocks_immediately() && spin.iterate() == Action::Poll);
        }
        fail_to_spin(&SITE);
        assert!(!wait_at(&SITE).is_spin_probe);
    }

    #[test]
    fn a_short_block_makes_waits_spin_again_and_a_long_one_does_not() {
        static SITE: AdaptiveSpin = AdaptiveSpin::new();
        (0..FAILED_SPINS_MAX).for_each(|_| SITE.note_block(1000));
        SITE.note_wakeup_at(1000 + SHORT_BLOCK_US * TICKS_PER_MICROSECOND);
        assert!(SITE.is_spinning_vain());
        SITE.note_wakeup_at(999 + SHORT_BLOCK_US * TICKS_PER_MICROSECOND);
        assert!(!SITE.is_spinning_vain());
    }

    #[test]
    fn waits_yield_first_after_one_with_short_yields() {
        static HISTORY: ProcessHistory = idle();
        end_after_yields(wait_on(&HISTORY), &[SHORT_TICKS, SHORT_TICKS]);
        for _ in 0..3 {
            let mut spin = wait_on(&HISTORY);
            assert!(!spins_first(&mut spin) && spin.yields.count > 0);
            spin.yields = Yields::default();
            end_after_yields(spin, &[SHORT_TICKS]);
        }
        // Waits whose data was there do not count as failed.
        (0..YIELD_MODE_WAITS).for_each(|_| drop(wait_on(&HISTORY)));
        assert!(spins_first(&mut wait_on(&HISTORY)));
    }

    #[test]
    fn waits_spin_first_where_yields_are_long_or_empty() {
        for yields in [&[LONG_TICKS][..], &[IDLE_TICKS], &[SHORT_TICKS, IDLE_TICKS], &[SHORT_TICKS, LONG_TICKS]] {
            static HISTORY: ProcessHistory = idle();
            end_after_yields(wait_on(&HISTORY), yields);
            assert!(spins_first(&mut wait_on(&HISTORY)), "{yields:?}");
            end_after_yields(wait_on(&HISTORY), &[SHORT_TICKS]);
            for _ in 0..FAILED_YIELD_WAITS_MAX {
                assert_eq!(wait_on(&HISTORY).mode, SpinMode::Yield, "in spite of one with {yields:?}");
                end_after_yields(wait_on(&HISTORY), yields);
            }
            assert!(spins_first(&mut wait_on(&HISTORY)), "again after {yields:?}");
        }
    }

    #[test]
    fn waits_spin_first_while_that_succeeds() {
        static HISTORY: ProcessHistory = idle();
        for _ in 0..3 {
            assert!(spins_first(&mut wait_on(&HISTORY)));
        }
    }

    #[test]
    fn waits_spin_first_after_some_that_yielded_and_blocked() {
        static HISTORY: ProcessHistory = idle();
        end_after_yields(wait_on(&HISTORY), &[SHORT_TICKS]);
        for _ in 0..FAILED_YIELD_WAITS_MAX {
            let mut spin = wait_on(&HISTORY);
            assert_eq!(spin.mode, SpinMode::Yield);
            spin.ends_blocked = true;
            end_after_yields(spin, &[SHORT_TICKS]);
        }
        assert!(spins_first(&mut wait_on(&HISTORY)));
    }

    #[test]
    fn short_yields_do_not_count_as_being_awake_up_to_the_limit() {
        static HISTORY: ProcessHistory = idle();
        let mut spin = wait_on(&HISTORY);
        spin.polls = SPIN_POLLS_MAX;
        assert_eq!(spin.iterate(), Action::PollKernel);
        spin.yields.short_ticks = u64::MAX / 2;
        spin.started = spin.started.wrapping_sub(2 * AWAKE_US * TICKS_PER_MICROSECOND);
        assert_ne!(spin.iterate(), Action::Block);
        spin.started = spin.started.wrapping_sub(AWAKE_US_MAX * TICKS_PER_MICROSECOND);
        assert_eq!(spin.iterate(), Action::Block);
    }

    #[test]
    fn oversubscribed_waits_block_after_phase_1_and_ever_fewer_probe_yields() {
        static HISTORY: ProcessHistory = ProcessHistory::new(|_| true);
        let blocks_before_a_probe = || {
            let blocked = (0..).take_while(|_| wait_on(&HISTORY).is_contended(0)).count();
            let mut spin = wait_on(&HISTORY);
            assert!(!spin.is_contended(0));
            end_after_yields(spin, &[LONG_TICKS]);
            blocked
        };
        let (least, most) = YIELD_PROBE_INTERVAL.into_inner();
        let counts = [0, least, 2 * least, 4 * least].map(|count| count as usize);
        assert_eq!([(); 4].map(|()| blocks_before_a_probe()), counts);
        for _ in 0..10 {
            blocks_before_a_probe();
        }
        assert_eq!(blocks_before_a_probe(), most as usize);
        end_after_yields(wait_on(&HISTORY), &[SHORT_TICKS]);
        (0..FAILED_YIELD_WAITS_MAX).for_each(|_| end_after_yields(wait_on(&HISTORY), &[LONG_TICKS]));
        assert_eq!([(); 2].map(|()| blocks_before_a_probe()), [0, least as usize]);
        let mut spin = wait_on(&HISTORY);
        assert!(spins_first(&mut spin));
        assert_eq!(spin.iterate(), Action::Block);
    }

    #[test]
    fn an_oversubscribed_wait_continues_while_its_yields_are_short() {
        static HISTORY: ProcessHistory = ProcessHistory::new(|_| true);
        HISTORY.yield_waits_left.store(2, Ordering::Relaxed);
        for (yields, step) in [(SHORT_TICKS, Step::Yield), (LONG_TICKS, Step::Block)] {
            let mut spin = wait_on(&HISTORY);
            spin.yields.note(yields);
            assert_eq!(spin.next_step(ticks()), step);
            spin.yields = Yields::default();
        }
    }

    #[test]
    fn contended_waits_do_not_yield_and_block_at_once_after_a_failed_spin() {
        static HISTORY: ProcessHistory = idle();
        static SITE: AdaptiveSpin = AdaptiveSpin::new();
        HISTORY.yield_waits_left.store(YIELD_MODE_WAITS, Ordering::Relaxed);
        HISTORY.contention.begin(ticks());
        let wait = || Spin::begin(&HISTORY, Some(&SITE));
        assert!([(); 3].into_iter().all(|()| spins_first(&mut wait())), "while no spin has failed");
        let blocked_after_a_failure = || {
            let mut spin = wait();
            while spin.iterate() != Action::Block {}
            assert_eq!((spin.mode, spin.yields.count), (SpinMode::Spin, 0));
            drop(spin);
            (0..)
                .take_while(|_| SITE.block_waits_left.load(Ordering::Relaxed) > 0 && wait().blocks_immediately())
                .count()
        };
        assert_eq!([(); 7].map(|()| blocked_after_a_failure()), [1, 2, 4, 8, 16, 32, 32]);
        assert!(spins_first(&mut wait()), "which succeeds");
        assert_eq!(blocked_after_a_failure(), 1);
    }

    #[test]
    fn a_wait_that_yields_blocks_when_contention_is_found() {
        static HISTORY: ProcessHistory = idle();
        HISTORY.yield_waits_left.store(1, Ordering::Relaxed);
        let mut spin = wait_on(&HISTORY);
        assert_eq!(spin.next_step(ticks()), Step::Yield);
        HISTORY.contention.begin(ticks());
        assert_eq!(spin.next_step(ticks()), Step::Block);
    }

    #[test]
    fn a_server_detects_contention_by_late_polls_and_then_only_spins() {
        static HISTORY: ProcessHistory = idle();
        static SITE: AdaptiveSpin = AdaptiveSpin::for_server();
        let late_ticks = volmem::TICKS_PER_MILLISECOND;
        let mut spin = Spin::begin(&HISTORY, Some(&SITE));
        (0..40).for_each(|count| spin.note_poll_at(5 + count * late_ticks));
        assert!(!HISTORY.contention.may_be_present());
        (1..40).for_each(|count| spin.note_poll_at((1 << 40) + count * 4 * late_ticks));
        assert!(HISTORY.contention.may_be_present());
        HISTORY.contention.begin(ticks());
        let mut spin = Spin::begin(&HISTORY, Some(&SITE));
        assert!(spins_first(&mut spin));
        assert_eq!(spin.iterate(), Action::Block);
    }

    #[test]
    fn a_server_does_not_count_failed_spins() {
        static SITE: AdaptiveSpin = AdaptiveSpin::for_server();
        (0..2 * FAILED_SPINS_MAX).for_each(|_| fail_to_spin(&SITE));
        assert!(!wait_at(&SITE).blocks_immediately());
    }
}
