//! Whether more programs want to run than there are processors.
//!
//! Who waits awake uses the processor up that the peer, or anybody, needs, and the kernel's fairness then makes it wait
//! when it has something to do; who sleeps is run as soon as it wakes. The kernel counts who wants to run, for all
//! processors together: what goes on in a cpuset or a control group of our own is not seen.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::system::read_text;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How long an answer of the kernel holds: asking takes a few microseconds.
const ASK_MICROSECONDS: u64 = 4_000;
/// Two ends that share one processor are no crowd: yielding serves them well.
const ALONE: u32 = 2;

static ASKED_TICKS: AtomicU64 = AtomicU64::new(0);
static IS_THERE: AtomicBool = AtomicBool::new(false);
static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// Whether there was a crowd a few milliseconds ago, at most; `now` in ticks.
pub fn is_there(now: u64) -> bool {
    if now.wrapping_sub(ASKED_TICKS.load(Ordering::Relaxed)) > ASK_MICROSECONDS * TICKS_PER_MICROSECOND {
        IS_THERE.store(running().is_some_and(|running| running > processors().max(ALONE)), Ordering::Relaxed);
        ASKED_TICKS.store(ticks(), Ordering::Relaxed);
    }
    IS_THERE.load(Ordering::Relaxed)
}

/// Threads of this machine that run or could, this one among them.
fn running() -> Option<u32> {
    let mut line = [0; 128];
    running_in(read_text(c"/proc/loadavg", &mut line)?)
}

/// Of `0.31 0.25 0.30 2/113 4711`, the 2.
fn running_in(line: &str) -> Option<u32> {
    line.split_ascii_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// Processors of this machine.
fn processors() -> u32 {
    let known = PROCESSORS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut list = [0; 1024];
    // Unknown is more than can be crowded.
    let count = read_text(c"/sys/devices/system/cpu/online", &mut list).and_then(count_in).unwrap_or(u32::MAX);
    PROCESSORS.store(count, Ordering::Relaxed);
    count
}

/// How many numbers a list such as `0-3,6` has.
fn count_in(list: &str) -> Option<u32> {
    list.trim_ascii().split(',').try_fold(0_u32, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_who_runs_and_how_many_processors_there_are() {
        assert!(running().is_some_and(|running| running > 0));
        assert!((1..u32::MAX).contains(&processors()));
    }

    #[test]
    fn lists_and_loads_are_read_as_the_kernel_writes_them() {
        assert_eq!(running_in("0.31 0.25 0.30 2/113 4711\n"), Some(2));
        assert_eq!(count_in("0\n"), Some(1));
        assert_eq!(count_in("0-3,6,8-9\n"), Some(7));
        for nonsense in ["", "0.31 0.25", "a b c d", "3-1", "0-4294967295", "0-3,", "-"] {
            assert_eq!((running_in(nonsense), count_in(nonsense)), (None, None), "{nonsense}");
        }
    }

    #[test]
    fn an_answer_holds_for_a_while() {
        let now = ticks();
        let first = is_there(now);
        assert_eq!(is_there(ASKED_TICKS.load(Ordering::Relaxed)), first);
    }
}
