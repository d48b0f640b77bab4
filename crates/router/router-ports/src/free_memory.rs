//! Memory that is free within this process.

/// Returns free memory to the system, also where memory in use lies above it. This visits all free memory: call it
/// rarely.
pub fn return_to_system() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers, and the C library locks its own state.
    unsafe {
        libc::malloc_trim(0);
    }
}
