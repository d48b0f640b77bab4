//! Lines for the user of a program.

use std::hash::{Hash, Hasher};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of lines that one process prints.
const WARNINGS_MAX: usize = 20;

/// Prints a line to standard error, once: a program that is refused tries again.
pub fn warn_user(message: &std::fmt::Arguments<'_>) {
    static PRINTED: [AtomicU64; WARNINGS_MAX] = [const { AtomicU64::new(0) }; WARNINGS_MAX];
    let line = format!("crosslane: {message}\n");
    let mut hasher = std::hash::DefaultHasher::new();
    line.hash(&mut hasher);
    let hash = hasher.finish().max(1);
    // Finds the entry with this line, or the first free one.
    let is_new = PRINTED.iter().find_map(|printed| {
        match printed.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(true),
            Err(other) => (other == hash).then_some(false),
        }
    });
    if is_new == Some(true) {
        // SAFETY: the descriptor is borrowed for one call, which fails harmlessly if standard error is closed.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, line.as_bytes());
    }
}
