//! Detects that more threads are runnable than there are processors.
//!
//! A spinning waiter uses the processor time that its peer needs, and the fair scheduler then makes it wait when its
//! data comes; a blocked one runs as soon as it is woken. The kernel's count covers all processors together: it does
//! not show what happens inside one cpuset or control group.

use std::ffi::CStr;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use volmem::{TICKS_PER_MICROSECOND, ticks};

/// Interval of samples: one takes a few microseconds.
const SAMPLE_US: u64 = 4_000;
/// Two endpoints that share one processor are not oversubscription: yielding serves them well.
const PROCESSORS_MIN: u32 = 2;

static SAMPLED_TICKS: AtomicU64 = AtomicU64::new(0);
static IS_OVERSUBSCRIBED: AtomicBool = AtomicBool::new(false);
static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// Returns whether the machine was oversubscribed when it was last sampled; `now` is in ticks.
pub fn is_oversubscribed(now: u64) -> bool {
    if now.wrapping_sub(SAMPLED_TICKS.load(Ordering::Relaxed)) > SAMPLE_US * TICKS_PER_MICROSECOND {
        IS_OVERSUBSCRIBED
            .store(running().is_some_and(|running| running > processors().max(PROCESSORS_MIN)), Ordering::Relaxed);
        SAMPLED_TICKS.store(ticks(), Ordering::Relaxed);
    }
    IS_OVERSUBSCRIBED.load(Ordering::Relaxed)
}

/// Returns the number of runnable threads of this machine, this one included.
fn running() -> Option<u32> {
    let mut line = [0; 128];
    running_in(read_text(c"/proc/loadavg", &mut line)?)
}

/// Returns the 2 of `0.31 0.25 0.30 2/113 4711` (proc_loadavg(5)).
fn running_in(line: &str) -> Option<u32> {
    line.split_ascii_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// Returns the number of online processors.
fn processors() -> u32 {
    let known = PROCESSORS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut list = [0; 1024];
    // An unknown number counts as one that cannot be oversubscribed.
    let count = read_text(c"/sys/devices/system/cpu/online", &mut list).and_then(count_in).unwrap_or(u32::MAX);
    PROCESSORS.store(count, Ordering::Relaxed);
    count
}

/// Returns the number of entries in a list such as `0-3,6`.
fn count_in(list: &str) -> Option<u32> {
    list.trim_ascii().split(',').try_fold(0_u32, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

/// Returns the beginning of a file of the kernel.
fn read_text<'a>(path: &CStr, bytes: &'a mut [u8]) -> Option<&'a str> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let length = rustix::io::read(&file, &mut *bytes);
    // SAFETY: the descriptor was opened above and is given up here, so that nothing else closes it. Dropping it would
    // call libc's `close`, which the preloaded library replaces.
    unsafe { rustix::io::close(file.into_raw_fd()) };
    std::str::from_utf8(&bytes[..length.ok()?]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts_runnable_threads_and_processors() {
        assert!(running().is_some_and(|running| running > 0));
        assert!((1..u32::MAX).contains(&processors()));
    }

    #[test]
    fn files_of_the_kernel_are_parsed() {
        assert_eq!(running_in("0.31 0.25 0.30 2/113 4711\n"), Some(2));
        assert_eq!(count_in("0\n"), Some(1));
        assert_eq!(count_in("0-3,6,8-9\n"), Some(7));
        for nonsense in ["", "0.31 0.25", "a b c d", "3-1", "0-4294967295", "0-3,", "-"] {
            assert_eq!((running_in(nonsense), count_in(nonsense)), (None, None), "{nonsense}");
        }
    }

    #[test]
    fn a_sample_holds_for_a_while() {
        let now = ticks();
        let first = is_oversubscribed(now);
        assert_eq!(is_oversubscribed(SAMPLED_TICKS.load(Ordering::Relaxed)), first);
    }
}
