//! Cache lines of this machine's memory.

/// Whether this program can send lines to memory.
pub(crate) const CAN_FLUSH: bool = cfg!(target_arch = "x86_64");

/// Sends every line of a span to memory and out of all caches; where [`CAN_FLUSH`] is false it does nothing.
///
/// # Safety
/// The span is mapped.
pub(crate) unsafe fn flush(base: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        for offset in (0..bytes).step_by(pcie::test::LINE_BYTES as usize) {
            // SAFETY: the caller's; flushing changes no contents.
            unsafe { core::arch::x86_64::_mm_clflush(base.add(offset)) };
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst); // flushes are ordered by fences alone
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (base, bytes);
}
