//! The kernel's table of descriptors, which has room for 64 numbers at first and is enlarged as soon as one does not
//! fit. In a process with several threads the kernel then waits until no processor reads the table (a grace period of
//! RCU). That takes 5 to 25 ms, longer than all requests of a short-lived client. The first descriptors that are hidden
//! in such a process therefore get numbers that fit.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::FIRST_NUMBER_MAX;
use crate::process::{system, threads};

/// Bytes of `/proc/self/status` that are read: the size of the table is within its first lines.
const STATUS_BYTES: usize = 512;

/// One more than the next number that is tried, from the end of the table to its middle; 0 before the first.
static NEXT: AtomicU32 = AtomicU32::new(0);
/// The number below which none is tried, the middle of the table.
static MIDDLE: AtomicU32 = AtomicU32::new(0);

/// Returns a copy of a descriptor at a free number in the upper half of the table, for which the table need not grow.
/// Each of these numbers is tried once. `None` if none is left, if the table is large already, or if the process has
/// one thread: then the kernel enlarges the table without a wait.
pub fn move_within(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    if threads::is_single() {
        return None;
    }
    if NEXT.load(Ordering::Acquire) == 0 {
        let end = table_end().filter(|end| u64::from(*end) <= FIRST_NUMBER_MAX).unwrap_or(1);
        // A thread that has read another size at the same time may store another middle: that of a size that the table
        // has had, so that fewer numbers are tried, or lower ones.
        MIDDLE.store(end / 2, Ordering::Relaxed);
        let _ = NEXT.compare_exchange(0, end, Ordering::AcqRel, Ordering::Acquire);
    }
    loop {
        let lower = |next: u32| (next > MIDDLE.load(Ordering::Relaxed).max(1)).then(|| next - 1);
        let number = NEXT.fetch_update(Ordering::AcqRel, Ordering::Acquire, lower).ok()? - 1;
        // SAFETY: the call only reads, and fails for a number that is free.
        let is_free = unsafe { rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(number as i32)) } == Err(Errno::BADF);
        if is_free {
            let moved = rustix::io::fcntl_dupfd_cloexec(fd, number as i32).ok()?;
            // Another thread may have taken the number meanwhile.
            if moved.as_raw_fd() as u32 == number {
                return Some(moved);
            }
            super::close(moved);
        }
    }
}

/// Returns how many numbers the table has room for (`FDSize` of proc_pid_status(5)).
fn table_end() -> Option<u32> {
    let mut bytes = [0; STATUS_BYTES];
    let status = system::read_text(c"/proc/self/status", &mut bytes)?;
    status.lines().find_map(|line| line.strip_prefix("FDSize:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_the_table_is_known() {
        let end = table_end().unwrap();
        assert!(end >= 64 && end.is_power_of_two(), "{end}");
    }
}
