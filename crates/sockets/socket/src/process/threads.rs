//! Whether this process has more than one thread. Most programs that count latency have one, and pay for a locked
//! instruction what a cache line costs to move.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

static MANY: u8 = 0;
/// libc's own answer (`__libc_single_threaded`, glibc 2.32 and later), or a zero that always says "many".
static IS_SINGLE: AtomicPtr<u8> = AtomicPtr::new((&raw const MANY).cast_mut());

/// Finds libc's answer. Without this call, every process counts as one with many threads.
pub fn find_single_threaded() {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !found.is_null() {
        IS_SINGLE.store(found.cast(), Ordering::Release);
    }
}

/// Whether this thread is the only one. Becomes false before a second thread runs.
#[inline]
pub fn is_single() -> bool {
    // SAFETY: a byte of libc's, or of ours, that lives as long as the process; libc changes it.
    unsafe { IS_SINGLE.load(Ordering::Relaxed).read_volatile() != 0 }
}

/// Adds to a word that only this process's threads change; returns what it was.
#[inline]
pub fn add(word: &AtomicU32, value: u32) -> u32 {
    if is_single() {
        let before = word.load(Ordering::Relaxed);
        word.store(before.wrapping_add(value), Ordering::Relaxed);
        before
    } else {
        word.fetch_add(value, Ordering::SeqCst)
    }
}

/// A number that no other live thread of this process has: never 0, and even.
#[inline]
pub fn current() -> u32 {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of a thread's control block is the block's address.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads the thread pointer.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    // Control blocks lie at least a page of stack apart, so their addresses differ above the lowest bits.
    ((pointer >> 6) as u32) << 1 | 2
}
