//! The memory of a device.

use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::error::Error;

/// Makes memory of a fixed size with all pages allocated. Neither a client's `ftruncate` nor a machine that runs out of
/// memory later makes an access fatal.
pub fn create(bytes: u64) -> Result<OwnedFd, Error> {
    let available = available_bytes();
    if bytes > available {
        return Err(Error::MemoryTooLarge { bytes, available });
    }
    let failed = |step| move |errno: Errno| Error::Memory { bytes, step, errno };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("crosslane-device", flags).map_err(failed("memfd_create"))?;
    rustix::fs::ftruncate(&memory, bytes).map_err(failed("ftruncate"))?;
    rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, bytes).map_err(failed("fallocate"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals).map_err(failed("sealing"))?;
    Ok(memory)
}

/// Returns the available memory (`MemAvailable`); `u64::MAX` where the kernel does not report it.
pub fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_allocated_and_keeps_its_size() {
        let memory = create(1 << 20).unwrap();
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert_eq!((stat.st_size, stat.st_blocks), (1 << 20, 2048));
        for bytes in [0, 4096, 2 << 20] {
            assert_eq!(rustix::fs::ftruncate(&memory, bytes), Err(Errno::PERM), "{bytes}");
        }
        assert_eq!(rustix::fs::fcntl_add_seals(&memory, SealFlags::WRITE), Err(Errno::PERM));
    }

    #[test]
    fn more_memory_than_the_machine_has_is_refused() {
        assert!(matches!(create(1 << 46), Err(Error::MemoryTooLarge { available, .. }) if available < 1 << 46));
    }
}
