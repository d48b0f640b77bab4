//! Whether this process has more than one thread. Most programs for which latency matters have one thread, and a locked
//! instruction would cost them as much as the transfer of a cache line.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

static MANY: u8 = 0;
/// libc's variable (`__libc_single_threaded`, glibc 2.32 and later), or a zero byte, which always means several
/// threads.
static IS_SINGLE: AtomicPtr<u8> = AtomicPtr::new((&raw const MANY).cast_mut());

/// Finds libc's variable. Without this call, every process counts as one with several threads.
pub fn find_single_threaded() {
    // SAFETY: the name is a C string literal, and `dlsym` only reads it.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !found.is_null() {
        IS_SINGLE.store(found.cast(), Ordering::Release);
    }
}

/// Returns whether this thread is the only one. Becomes false before a second thread runs.
#[inline]
pub fn is_single() -> bool {
    // SAFETY: the pointer is that of `MANY` or of libc's variable, both of one byte that lives as long as the process;
    // the read is volatile because libc changes its variable.
    unsafe { IS_SINGLE.load(Ordering::Relaxed).read_volatile() != 0 }
}

/// Adds to a word that only the threads of this process change. Returns the value before.
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

/// Returns a number that no other live thread of this process has: even and not 0.
#[inline]
pub fn current() -> u32 {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: on x86-64 Linux, `fs` points to the thread control block, whose first word is its own address; it is only
    // read.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reading the thread pointer register has no side effects.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags));
    }
    // Control blocks lie at least a page of stack apart, so their addresses differ above the lowest bits.
    ((pointer >> 6) as u32) << 1 | 2
}
