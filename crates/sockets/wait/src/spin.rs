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
//! A waiter cannot know whether another thread needs its processor, nor whether its data will come soon. The lengths of
//! its yields are evidence of the former, and put the process into one of three states:
//!
//! | state | entered | phases of a wait |
//! |---|---|---|
//! | alone | at first; from *shared* after 16 waits in a row without a gain by yields | 1, 2, 3 |
//! | shared | after a wait of mostly *short* yields that ended with data | 2, 3 |
//! | contended | for 64 ms to 4 s after three long preemptions ([`crate::contention`]) | 1, 2 without yields, 3 |
//!
//! Contended, the threads of proxies block at once: a message passes four threads there, and one that spins delays the
//! others.
//!
//! A yield of 0.7 to 100 us is short: another thread ran for a moment, perhaps the one that this wait is for. A yield
//! that took less returned at once, because no other thread was ready to run; in a longer one a CPU-bound thread ran,
//! and then the scheduler prefers threads that were blocked. A thread that yields forfeits the rest of its time slice
//! (Linux 6.18), so processes that share a processor are served alike only while all of them yield or all block.
//!
//! The outcomes of earlier waits at the same site ([`AdaptiveSpin`]) are evidence of the latter. After 8 waits in a row
//! that ended in a block, waits at that site block at once. One in 32 is awake nevertheless; if it obtains data, all of
//! them are awake again.
//!
//! docs/results/waiting.md has the measurements behind each number.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use volmem::{TICKS_PER_MICROSECOND, ticks};

use crate::contention::CpuContention;

/// Polls of phase 1: about ten microseconds.
const SPIN_POLLS_MAX: u32 = 1500;
/// Number of waits in a row without a gain by yields after which a process is alone. Four programs that alternate on
/// two processors see single ones all the time.
const FAILED_YIELD_WAITS_MAX: u32 = 16;
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
/// Interval of polls of the bell, each of which is a system call.
const KERNEL_POLL_US: u64 = 5;
/// Number of waits in a row that were awake and then blocked, after which waits block at once.
const FAILED_SPINS_MAX: u64 = 8;
/// One wait in this number is awake in spite of that. Two endpoints that both block at once find out by it that neither
/// has to.
const SPIN_PROBE_INTERVAL: u64 = 32;

/// What the waits of a process have measured.
#[derive(Debug)]
struct ProcessHistory {
    /// Number of waits in a row without a gain by yields that are left before the process is alone; zero if it is.
    yield_waits_left: AtomicU32,
    contention: CpuContention,
}

static HISTORY: ProcessHistory = ProcessHistory::new();

impl ProcessHistory {
    const fn new() -> Self {
        Self { yield_waits_left: AtomicU32::new(0), contention: CpuContention::new() }
    }

    #[inline]
    fn is_shared(&self) -> bool {
        self.yield_waits_left.load(Ordering::Relaxed) != 0
    }

    /// Records the end of a wait that has yielded. Two threads that record at once may count as one.
    #[cold]
    fn record(&self, wait: &Spin) {
        let left = match wait.yields.are_mostly_short() && !wait.ends_blocked {
            true => FAILED_YIELD_WAITS_MAX,
            false => self.yield_waits_left.load(Ordering::Relaxed).saturating_sub(1),
        };
        self.yield_waits_left.store(left, Ordering::Relaxed);
    }
}

/// Returns whether this process has measured that other threads need its processors.
pub fn is_core_shared() -> bool {
    HISTORY.contention.may_be_present() || HISTORY.is_shared()
}

/// Returns what this process has measured of CPU-bound threads.
pub(crate) fn cpu_contention() -> &'static CpuContention {
    &HISTORY.contention
}

/// Returns whether another thread ran for a moment in a yield of this length.
pub(crate) fn is_short_yield(ticks: u64) -> bool {
    (SHORT_YIELD_TICKS_MIN..SHORT_YIELD_US_MAX * TICKS_PER_MICROSECOND).contains(&ticks)
}

/// The history of the waits at one site, such as one connection: whether data comes there while a wait is awake.
#[derive(Debug)]
pub struct AdaptiveSpin {
    /// Waits that blocked since the last that obtained data while it was awake.
    blocks: AtomicU64,
}

impl AdaptiveSpin {
    /// Returns the history of a site without waits.
    pub const fn new() -> Self {
        Self { blocks: AtomicU64::new(0) }
    }

    /// Forgets the failed spins.
    pub fn reset(&self) {
        self.blocks.store(0, Ordering::Relaxed);
    }

    /// Returns whether the next wait blocks at once.
    #[inline]
    fn blocks_immediately(&self) -> bool {
        let blocks = self.blocks.load(Ordering::Relaxed);
        blocks >= FAILED_SPINS_MAX && !blocks.is_multiple_of(SPIN_PROBE_INTERVAL)
    }

    fn note_block(&self) {
        // Threads that count at once may count as one.
        self.blocks.store(self.blocks.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    #[inline]
    fn note_data(&self) {
        if self.blocks.load(Ordering::Relaxed) != 0 {
            self.reset();
        }
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
    #[inline]
    fn choose(history: &ProcessHistory, site: Option<&AdaptiveSpin>) -> Self {
        match () {
            () if site.is_some_and(AdaptiveSpin::blocks_immediately) => Self::Block,
            () if history.is_shared() && !history.contention.may_be_present() => Self::Yield,
            () => Self::Spin,
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
    ends_blocked: bool,
    history: &'static ProcessHistory,
    site: Option<&'static AdaptiveSpin>,
    /// Time in ticks of the last poll that was noted; 0 before.
    polled: u64,
}

impl Spin {
    /// Begins a wait that belongs to no site.
    #[inline]
    pub fn new() -> Self {
        Self::begin(&HISTORY, None)
    }

    /// Begins a wait at a site.
    #[inline]
    pub fn with(site: &'static AdaptiveSpin) -> Self {
        Self::begin(&HISTORY, Some(site))
    }

    /// Begins a wait of a thread that serves many others. Its events come from any of them, so earlier waits predict
    /// nothing, and it blocks at once under CPU contention.
    pub fn of_server() -> Self {
        Self::begin_of_server(&HISTORY)
    }

    fn begin_of_server(history: &'static ProcessHistory) -> Self {
        let is_contended = history.contention.may_be_present() && history.contention.is_present(ticks());
        Self::begin_in(if is_contended { SpinMode::Block } else { SpinMode::choose(history, None) }, history, None)
    }

    /// Returns whether its first iteration blocks: a caller that polls many connections may skip the poll.
    pub fn blocks_immediately(&self) -> bool {
        self.mode == SpinMode::Block
    }

    #[inline]
    fn begin(history: &'static ProcessHistory, site: Option<&'static AdaptiveSpin>) -> Self {
        Self::begin_in(SpinMode::choose(history, site), history, site)
    }

    #[inline]
    fn begin_in(mode: SpinMode, history: &'static ProcessHistory, site: Option<&'static AdaptiveSpin>) -> Self {
        Self {
            polls: if mode == SpinMode::Spin { 0 } else { SPIN_POLLS_MAX },
            started: 0,
            kernel_polled: 0,
            yields: Yields::default(),
            mode,
            ends_blocked: false,
            history,
            site,
            polled: 0,
        }
    }

    /// Records a poll of a thread that polls for others, so that one that comes late shows contention. Returns the time
    /// in ticks.
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
                    site.note_block();
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
        if self.started == 0 {
            (self.started, self.kernel_polled) = (now, now);
            if self.mode == SpinMode::Spin {
                return Step::PollKernel;
            }
        }
        if now.wrapping_sub(self.kernel_polled) > KERNEL_POLL_US * TICKS_PER_MICROSECOND {
            return Step::PollKernel;
        }
        if self.history.contention.is_present(now) { Step::Poll } else { Step::Yield }
    }

    /// Returns whether it has been awake for as long as it may.
    fn is_over(&self, now: u64) -> bool {
        let limit_ticks = AWAKE_US * TICKS_PER_MICROSECOND + self.yields.short_ticks;
        let limit_ticks = limit_ticks.min(AWAKE_US_MAX * TICKS_PER_MICROSECOND);
        self.started != 0 && now.wrapping_sub(self.started) > limit_ticks
    }
}

impl Drop for Spin {
    #[inline]
    fn drop(&mut self) {
        if self.yields.count > 0 {
            self.history.record(self);
        }
        // Data that was there at the first poll says nothing about waits.
        if let Some(site) = self.site.filter(|_| self.polls != 0 && self.mode != SpinMode::Block) {
            site.note_data();
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

    fn wait_on(history: &'static ProcessHistory) -> Spin {
        Spin::begin(history, None)
    }

    /// A wait at a site, without the history of other tests.
    fn wait_at(site: &'static AdaptiveSpin) -> Spin {
        static HISTORY: ProcessHistory = ProcessHistory::new();
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
        let awake = (0..4 * SPIN_PROBE_INTERVAL).filter(|_| {
            let is_awake = wait_at(&SITE).mode != SpinMode::Block;
            fail_to_spin(&SITE);
            is_awake
        });
        let probes = [SPIN_PROBE_INTERVAL, 2 * SPIN_PROBE_INTERVAL, 3 * SPIN_PROBE_INTERVAL];
        assert_eq!(awake.collect::<Vec<_>>(), (0..FAILED_SPINS_MAX).chain(probes).collect::<Vec<_>>());
    }

    #[test]
    fn a_wait_that_obtains_data_makes_waits_spin_again() {
        static SITE: AdaptiveSpin = AdaptiveSpin::new();
        (0..FAILED_SPINS_MAX).for_each(|_| fail_to_spin(&SITE));
        // A wait that only blocks does not, nor does one that found data at its first poll.
        fail_to_spin(&SITE);
        drop(wait_at(&SITE));
        assert_eq!(wait_at(&SITE).mode, SpinMode::Block);
        let mut spin = wait_at(&SITE);
        spin.mode = SpinMode::Spin;
        drop(spin);
        assert!(spins_first(&mut wait_at(&SITE)));
    }

    #[test]
    fn waits_yield_first_after_one_with_short_yields_while_they_gain() {
        static HISTORY: ProcessHistory = ProcessHistory::new();
        end_after_yields(wait_on(&HISTORY), &[SHORT_TICKS, SHORT_TICKS]);
        for _ in 0..3 {
            let mut spin = wait_on(&HISTORY);
            assert!(!spins_first(&mut spin) && spin.yields.count > 0);
            spin.yields = Yields::default();
            end_after_yields(spin, &[SHORT_TICKS]);
        }
        // Waits whose data was there do not count.
        (0..2 * FAILED_YIELD_WAITS_MAX).for_each(|_| drop(wait_on(&HISTORY)));
        assert_eq!(wait_on(&HISTORY).mode, SpinMode::Yield);
    }

    #[test]
    fn waits_spin_first_where_yields_are_long_or_empty() {
        for yields in [&[LONG_TICKS][..], &[IDLE_TICKS], &[SHORT_TICKS, IDLE_TICKS], &[SHORT_TICKS, LONG_TICKS]] {
            static HISTORY: ProcessHistory = ProcessHistory::new();
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
    fn waits_spin_first_after_some_that_yielded_and_blocked() {
        static HISTORY: ProcessHistory = ProcessHistory::new();
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
        static HISTORY: ProcessHistory = ProcessHistory::new();
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
    fn contended_waits_do_not_yield_and_those_of_servers_block_at_once() {
        static HISTORY: ProcessHistory = ProcessHistory::new();
        HISTORY.yield_waits_left.store(1, Ordering::Relaxed);
        let mut yielding = wait_on(&HISTORY);
        // The wait is over after some microseconds, which this test may take.
        let now = ticks();
        assert_eq!(yielding.next_step(now), Step::Yield);
        assert!(!Spin::begin_of_server(&HISTORY).blocks_immediately());
        HISTORY.contention.begin(ticks());
        assert_eq!(yielding.next_step(now), Step::Poll, "also of a wait that began before");
        let mut spin = wait_on(&HISTORY);
        assert!(spins_first(&mut spin));
        while spin.iterate() != Action::Block {}
        assert_eq!(spin.yields.count, 0);
        let mut spin = Spin::begin_of_server(&HISTORY);
        assert!(spin.blocks_immediately() && spin.iterate() == Action::Block);
    }

    #[test]
    fn late_polls_show_contention() {
        static HISTORY: ProcessHistory = ProcessHistory::new();
        let mut spin = wait_on(&HISTORY);
        (0..40).for_each(|count| spin.note_poll_at(5 + count * volmem::TICKS_PER_MILLISECOND));
        assert!(!HISTORY.contention.may_be_present());
        (1..40).for_each(|count| spin.note_poll_at((1 << 40) + count * 4 * volmem::TICKS_PER_MILLISECOND));
        assert!(HISTORY.contention.may_be_present());
    }
}
