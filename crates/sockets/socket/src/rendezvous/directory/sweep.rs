//! Sweeps: the removal of stale names at addresses that are no longer used.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::listener_name::ListenerName;
use super::rack::{Rack, read_names, visit_entries};
use crate::descriptor::hidden::close;
use crate::process::system::check_file_bytes;

/// The file that holds the position in the directory at which the next sweep begins.
pub(super) const SWEEP_FILE: &str = "sweep";
/// Number of addresses that one sweep checks. Each `listen` adds at most one, so two suffice to find stale names faster
/// than they are left behind.
pub(super) const SWEEP_ADDRESSES_MAX: usize = 2;
/// Maximum number of entries that one sweep reads to find them.
const SWEEP_ENTRIES_MAX: usize = 8;
/// Maximum number of names at each address that one sweep checks.
const SWEEP_NAMES_MAX: usize = 8;

/// Number of other network namespaces whose directories one process sweeps, and number of sweeps of each.
const NAMESPACES_MAX: usize = 4;
const NAMESPACE_SWEEPS_MAX: usize = 4;
/// Time without a change after which an empty directory of a network namespace is removed. A program that still uses it
/// creates another one.
pub(super) const NAMESPACE_UNUSED_FOR: Duration = Duration::from_secs(60);

/// Whether this process has swept the directories of other network namespaces.
static HAS_SWEPT_NAMESPACES: AtomicBool = AtomicBool::new(false);

impl Rack {
    /// Removes what an ended network namespace has left in the rack, as containers do: nobody listens in it again. Does
    /// so once in each process.
    pub fn sweep_other_namespaces_once(&self) {
        if !HAS_SWEPT_NAMESPACES.swap(true, Ordering::Relaxed) {
            self.sweep_other_namespaces();
        }
    }

    /// Sweeps the directories of some other network namespaces and removes those that are no longer used.
    pub(super) fn sweep_other_namespaces(&self) {
        for other in self.other_namespaces(NAMESPACES_MAX) {
            (0..NAMESPACE_SWEEPS_MAX).for_each(|_| _ = other.sweep());
            let _ = other.remove_unless_used();
        }
    }

    /// Removes the directory if it has no names and has long been unchanged.
    fn remove_unless_used(&self) -> Result<(), Errno> {
        let changed_s = u64::try_from(rustix::fs::fstat(self.directory.fd()?)?.st_mtime).unwrap_or(0);
        let now_s = u64::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec).unwrap_or(0);
        if now_s < changed_s.saturating_add(NAMESPACE_UNUSED_FOR.as_secs()) {
            return Ok(());
        }
        let mut is_empty = true;
        let listing = self.reopen()?;
        let outcome = visit_entries(listing.as_fd(), SWEEP_ENTRIES_MAX, |entry, _| {
            is_empty &= [".", "..", SWEEP_FILE].contains(&entry);
            if is_empty { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        close(listing);
        outcome?;
        if is_empty {
            rustix::fs::unlinkat(self.directory.fd()?, SWEEP_FILE, AtFlags::empty())?;
            rustix::fs::unlinkat(CWD, self.path(), AtFlags::REMOVEDIR)?;
        }
        Ok(())
    }

    /// Removes stale names at the next few addresses of the rack, beginning where the last sweep ended.
    ///
    /// # Errors
    /// The errors of openat, lseek, getdents, read and write.
    pub fn sweep(&self) -> Result<(), Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let cursor = rustix::fs::openat(self.directory.fd()?, SWEEP_FILE, flags, Mode::RUSR | Mode::WUSR)?;
        let swept = self.reopen().and_then(|listing| {
            let swept = self.sweep_from(cursor.as_fd(), listing.as_fd());
            close(listing);
            swept
        });
        close(cursor);
        swept
    }

    /// Performs a sweep. Concurrent sweeps may check the same addresses, or start where another one started, which is
    /// harmless.
    fn sweep_from(&self, cursor: BorrowedFd<'_>, listing: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut bytes = [0_u8; 8];
        check_file_bytes(bytes.len())?;
        let length = rustix::io::pread(cursor, &mut bytes, 0)?;
        let from = if length == bytes.len() { u64::from_ne_bytes(bytes) } else { 0 };
        // A position that is invalid, or no longer valid, counts as the end.
        let _ = rustix::fs::seek(listing, SeekFrom::Start(from));
        let (mut addresses, mut next) = (Vec::new(), 0);
        let _ = visit_entries(listing, SWEEP_ENTRIES_MAX, |entry, position| {
            addresses.extend(entry.parse::<SocketAddr>().ok());
            next = position;
            if addresses.len() < SWEEP_ADDRESSES_MAX { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        rustix::io::pwrite(cursor, &next.to_ne_bytes(), 0)?;
        addresses.into_iter().for_each(|address| self.sweep_address(address));
        Ok(())
    }

    /// Removes the stale names of an address. Probes without the lock, which the names of live listeners do not need.
    fn sweep_address(&self, address: SocketAddr) {
        let Ok(listing) = self.open_directory(&address.to_string()) else { return };
        let names = read_names(listing.as_fd(), address, SWEEP_NAMES_MAX).unwrap_or_default();
        close(listing);
        let is_dead = |name: &&ListenerName| matches!(self.is_live(name), Ok(false) | Err(Errno::NOENT));
        let dead: Vec<ListenerName> = names.iter().filter(is_dead).copied().collect();
        if (names.is_empty() || !dead.is_empty())
            && let Ok(lock) = self.lock_existing(address, 1)
        {
            for name in &dead {
                let _ = lock.remove_if_stale(name);
            }
        }
    }
}
