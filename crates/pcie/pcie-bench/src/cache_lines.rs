//! Flushes cache lines of this machine.

/// Whether this program can flush lines to memory.
pub(crate) const CAN_FLUSH: bool = cfg!(target_arch = "x86_64");

/// Flushes every line of a span from all caches to memory; does nothing where [`CAN_FLUSH`] is false.
///
/// # Safety
/// The `bytes` bytes from `base` must be mapped.
pub(crate) unsafe fn flush(base: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        for offset in (0..bytes).step_by(pcie::test::LINE_BYTES as usize) {
            // SAFETY: `offset < bytes`, and the contract of this function says that all `bytes` are mapped. A flush
            // changes no contents.
            unsafe { core::arch::x86_64::_mm_clflush(base.add(offset)) };
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst); // only fences order flushes
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (base, bytes);
}
