//! Page files: made, locked, recognised as stale and removed. Only raw system calls and no allocation, because this
//! runs inside programs whose libc symbols are replaced, and in children of multi-threaded programs right after
//! `fork`.

use std::ffi::CStr;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;

/// Names tried for one pid, which is not unique where several pid namespaces share a rack.
const SUFFIXES_MAX: u32 = 64;
/// How often a name is tried again when a reader removes the file between our steps.
const ATTEMPTS_MAX: u32 = 8;
/// Directory entries looked at in one sweep.
const SWEEP_ENTRIES_MAX: u32 = 512;

/// A descriptor closed by a raw system call: the `close` symbol may be the one our own library interposes.
pub(crate) struct Fd(ManuallyDrop<OwnedFd>);

impl Fd {
    fn new(owned: OwnedFd) -> Self {
        Self(ManuallyDrop::new(owned))
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is owned by `self`, whose `ManuallyDrop` never drops it, and is not used again.
        unsafe { rustix::io::close(self.0.as_raw_fd()) };
    }
}

/// The name of a page file: the pid, with `-N` behind it for the N-th further owner of the same number.
#[derive(Clone, Copy)]
pub(crate) struct PageName {
    bytes: [u8; 24],
}

impl PageName {
    pub(crate) fn new(pid: u32, suffix: u32) -> Self {
        let mut name = Self { bytes: [0; 24] };
        let mut length = name.push_number(0, pid);
        if suffix > 0 {
            name.bytes[length] = b'-';
            length = name.push_number(length + 1, suffix);
        }
        debug_assert!(length < name.bytes.len());
        name
    }

    fn push_number(&mut self, at: usize, number: u32) -> usize {
        let digits = number.checked_ilog10().unwrap_or(0) as usize + 1;
        let mut rest = number;
        for place in (at..at + digits).rev() {
            self.bytes[place] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        at + digits
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

/// The pid in a page file's name; `None` for a name no page has.
pub(crate) fn page_name_pid(name: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(name).ok()?;
    let (pid, suffix) = text.split_once('-').unwrap_or((text, "1"));
    let digits = |part: &str| !part.is_empty() && part.len() <= 10 && part.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(pid) || !digits(suffix) {
        return None;
    }
    pid.parse().ok()
}

/// What a page file turned out to be.
pub(crate) enum Occupant {
    /// Its writer lives.
    Live,
    /// Its writer is gone; the file has been removed.
    Removed,
}

/// Opens `rack`/v1/stat, making what is missing below the rack, and refuses a folder that another user could have put
/// there or can write to.
pub(crate) fn open_stat_folder(rack: &CStr) -> Result<Fd, Errno> {
    let rack = open_folder(rustix::fs::CWD, rack)?;
    let version = open_private_folder(rack.as_fd(), c"v1")?;
    open_private_folder(version.as_fd(), c"stat")
}

fn open_private_folder(parent: BorrowedFd<'_>, name: &CStr) -> Result<Fd, Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    open_folder(parent, name)
}

/// Opens a folder that only our own user can write to; root may look into any user's.
pub(crate) fn open_folder(parent: BorrowedFd<'_>, name: &CStr) -> Result<Fd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = Fd::new(rustix::fs::openat(parent, name, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&folder)?;
    let others_can_write = stat.st_mode & 0o022 != 0;
    if !is_ours(&stat) || others_can_write {
        return Err(Errno::PERM);
    }
    Ok(folder)
}

fn is_ours(stat: &Stat) -> bool {
    let user = rustix::process::geteuid();
    user.is_root() || stat.st_uid == user.as_raw()
}

/// A page file that is ours: created, locked and still in its folder.
pub(crate) struct PageFile {
    pub(crate) fd: Fd,
    pub(crate) suffix: u32,
    pub(crate) stat: Stat,
}

/// Creates and locks the page file of `pid`, after removing stale ones that hold its name.
pub(crate) fn create(folder: BorrowedFd<'_>, pid: u32) -> Result<PageFile, Errno> {
    for suffix in 0..SUFFIXES_MAX {
        let name = PageName::new(pid, suffix);
        for _ in 0..ATTEMPTS_MAX {
            match create_named(folder, name.as_c_str()) {
                Ok(Some((fd, stat))) => return Ok(PageFile { fd, suffix, stat }),
                Ok(None) => {}
                Err(Errno::EXIST) => match remove_if_stale(folder, name.as_c_str()) {
                    Ok(Occupant::Removed) | Err(Errno::NOENT) => {}
                    Ok(Occupant::Live) | Err(_) => break,
                },
                Err(error) => return Err(error),
            }
        }
    }
    Err(Errno::EXIST)
}

/// `None` when a reader took the file for a stale one before the lock was ours.
fn create_named(folder: BorrowedFd<'_>, name: &CStr) -> Result<Option<(Fd, Stat)>, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = Fd::new(rustix::fs::openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?);
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => {
            // No locks on this file system: a page that nobody could tell from a dead one is worse than none.
            let _ = rustix::fs::unlinkat(folder, name, AtFlags::empty());
            return Err(error);
        }
    }
    let stat = rustix::fs::fstat(&fd)?;
    Ok((stat.st_nlink > 0).then_some((fd, stat)))
}

/// Removes a page file whose writer is gone. The lock tells, never the pid: it goes with the last mapping of the
/// writer.
pub(crate) fn remove_if_stale(folder: BorrowedFd<'_>, name: &CStr) -> Result<Occupant, Errno> {
    let fd = open_page(folder, name)?;
    remove_open_if_stale(folder, name, &fd)
}

/// As [`remove_if_stale`], for a page that is already open.
pub(crate) fn remove_open_if_stale(folder: BorrowedFd<'_>, name: &CStr, fd: &Fd) -> Result<Occupant, Errno> {
    match rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(Occupant::Live),
        Err(error) => return Err(error),
    }
    let ours = rustix::fs::fstat(fd)?;
    remove_if_same(folder, name, ours.st_dev, ours.st_ino)?;
    Ok(Occupant::Removed)
}

/// Opens a page for reading; anything but a plain file of our own user is refused.
pub(crate) fn open_page(folder: BorrowedFd<'_>, name: &CStr) -> Result<Fd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = Fd::new(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&fd)?;
    let plain = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
    if plain && is_ours(&stat) { Ok(fd) } else { Err(Errno::PERM) }
}

/// Unlinks `name` only while it still is the file with that device and inode.
pub(crate) fn remove_if_same(folder: BorrowedFd<'_>, name: &CStr, device: u64, inode: u64) -> Result<(), Errno> {
    let there = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if (there.st_dev, there.st_ino) != (device, inode) {
        return Ok(());
    }
    rustix::fs::unlinkat(folder, name, AtFlags::empty())
}

/// Removes the stale pages among the first entries of the folder, so that killed programs do not fill a rack nobody
/// looks at.
pub(crate) fn sweep(folder: BorrowedFd<'_>) {
    let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(listing) = rustix::fs::openat(folder, c".", flags, Mode::empty()).map(Fd::new) else { return };
    let mut entries = RawDir::new(&listing, &mut buffer);
    for _ in 0..SWEEP_ENTRIES_MAX {
        let Some(Ok(entry)) = entries.next() else { return };
        if page_name_pid(entry.file_name().to_bytes()).is_some() {
            let _ = remove_if_stale(folder, entry.file_name());
        }
    }
}

/// The first bytes of a file, as many as fit.
pub(crate) fn read_start<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let fd = Fd::new(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
    let length = rustix::io::read(&fd, &mut *buffer)?;
    Ok(&buffer[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_names_are_pids_with_an_optional_suffix() {
        assert_eq!(PageName::new(0, 0).as_c_str(), c"0");
        assert_eq!(PageName::new(4_194_304, 0).as_c_str(), c"4194304");
        assert_eq!(PageName::new(u32::MAX, u32::MAX).as_c_str(), c"4294967295-4294967295");
        assert_eq!(page_name_pid(b"100"), Some(100));
        assert_eq!(page_name_pid(b"100-3"), Some(100));
        for name in
            [&b""[..], b".", b"..", b"12a", b"-1", b"1-", b"1-2-3", b"+1", b"99999999999", b"\xff", b"5000000000"]
        {
            assert_eq!(page_name_pid(name), None, "{name:?}");
        }
    }
}
