//! Flushes cache lines of this machine.

use pcie::test::Cache;

use crate::error::{Error, Result};

/// Whether this program can flush lines to memory.
const CAN_FLUSH: bool = cfg!(target_arch = "x86_64");

/// Checks that this program can bring the caches into the state that a test requires.
pub(crate) fn check(device: &str, cache: Cache) -> Result<()> {
    if CAN_FLUSH || cache != Cache::Cold {
        return Ok(());
    }
    Error::wrong_use(format!(
        "{device}: --cache cold needs an instruction that this program uses on x86-64 only; \
         choose host-warm or device-warm"
    ))
}

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
