//! Page files: creation, locking, detection of stale ones, and removal. This code uses raw system calls only and does
//! not allocate, because it runs inside programs whose libc symbols are replaced, and in children of multi-threaded
//! programs right after `fork`.

use std::ffi::CStr;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;

use crate::rack::KEEP_PAGES;

/// Number of names tried for one pid, which is not unique where several pid namespaces share a rack directory.
const SUFFIXES_MAX: u32 = 64;
/// How often a name is tried again if a reader removes the file in between.
const ATTEMPTS_MAX: u32 = 8;
/// Number of directory entries that one sweep checks.
const SWEEP_ENTRIES_MAX: u32 = 512;
/// Bytes of directory entries that are read at once, on the stack. One with the longest name has 280.
const LISTING_BYTES: usize = 512;

/// A descriptor that is closed by a raw system call, because the `close` symbol may be interposed by this library.
pub(crate) struct Fd(ManuallyDrop<OwnedFd>);

impl Fd {
    pub(crate) fn new(owned: OwnedFd) -> Self {
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
        // SAFETY: `self` owns the descriptor; `ManuallyDrop` does not close it, and it is not used again.
        unsafe { rustix::io::close(self.0.as_raw_fd()) };
    }
}

/// The name of a page file: the pid, with the suffix `-N` for the N-th further owner of the same pid.
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

/// Returns the pid in a page file's name, or `None` for another name.
pub(crate) fn page_name_pid(name: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(name).ok()?;
    let (pid, suffix) = text.split_once('-').unwrap_or((text, "1"));
    let digits = |part: &str| !part.is_empty() && part.len() <= 10 && part.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(pid) || !digits(suffix) {
        return None;
    }
    pid.parse().ok()
}

/// The state of a page file.
pub(crate) enum Occupant {
    /// Its writer is running, or the folder keeps pages.
    Live,
    /// Its writer has exited.
    Stale,
}

/// By which the rack directory is reached where its path does not lead to it.
static ABOVE: OnceLock<fn() -> Option<BorrowedFd<'static>>> = OnceLock::new();

/// Has the rack directory of this process opened by its last component in the directory that a function returns, while
/// it returns one: after a change of the root directory, the path does not lead there any more.
pub fn set_directory_above(above: fn() -> Option<BorrowedFd<'static>>) {
    let _ = ABOVE.set(above);
}

fn last_component(path: &CStr) -> &CStr {
    let bytes = path.to_bytes_with_nul();
    let start = bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    CStr::from_bytes_with_nul(&bytes[start..]).unwrap_or(path)
}

/// Opens `v1/stat` in the rack directory, creating missing folders below the rack directory. Refuses a folder that
/// another user could have created or can write to.
pub(crate) fn open_stat_folder(rack: &CStr) -> Result<Fd, Errno> {
    let rack = match ABOVE.get().and_then(|above| above()) {
        Some(above) => open_folder(above, last_component(rack))?,
        None => open_folder(rustix::fs::CWD, rack)?,
    };
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

/// Opens a folder that only this user can write to. Root may open any user's folder.
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

/// A page file of this process: created, locked and present in its folder.
pub(crate) struct PageFile {
    pub(crate) fd: Fd,
    pub(crate) suffix: u32,
    pub(crate) stat: Stat,
}

/// Creates and locks the page file of `pid`, after removing stale files of that name.
pub(crate) fn create(folder: BorrowedFd<'_>, pid: u32) -> Result<PageFile, Errno> {
    for suffix in 0..SUFFIXES_MAX {
        let name = PageName::new(pid, suffix);
        for _ in 0..ATTEMPTS_MAX {
            match create_named(folder, name.as_c_str()) {
                Ok(Some((fd, stat))) => return Ok(PageFile { fd, suffix, stat }),
                Ok(None) => {}
                Err(Errno::EXIST) => match remove_if_stale(folder, name.as_c_str()) {
                    Ok(Occupant::Stale) | Err(Errno::NOENT) => {}
                    Ok(Occupant::Live) | Err(_) => break,
                },
                Err(error) => return Err(error),
            }
        }
    }
    Err(Errno::EXIST)
}

/// Creates and locks a file. Returns `None` if a reader took it for a stale one before it was locked.
fn create_named(folder: BorrowedFd<'_>, name: &CStr) -> Result<Option<(Fd, Stat)>, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = Fd::new(rustix::fs::openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?);
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => {
            // The file system has no locks: a page that cannot be told from a stale one is worse than none.
            let _ = rustix::fs::unlinkat(folder, name, AtFlags::empty());
            return Err(error);
        }
    }
    let stat = rustix::fs::fstat(&fd)?;
    Ok((stat.st_nlink > 0).then_some((fd, stat)))
}

/// Removes a page file if its writer has exited and the folder keeps no pages. Decides by the lock, which ends with the
/// writer's last mapping, and never by the pid.
pub(crate) fn remove_if_stale(folder: BorrowedFd<'_>, name: &CStr) -> Result<Occupant, Errno> {
    let fd = open_page(folder, name)?;
    remove_open_if_stale(folder, name, &fd)
}

/// As [`remove_if_stale`], for a file that is already open.
pub(crate) fn remove_open_if_stale(folder: BorrowedFd<'_>, name: &CStr, fd: &Fd) -> Result<Occupant, Errno> {
    if rustix::fs::fstat(folder)?.st_mode & KEEP_PAGES != 0 {
        return Ok(Occupant::Live);
    }
    if let Occupant::Live = occupant(fd)? {
        return Ok(Occupant::Live);
    }
    let ours = rustix::fs::fstat(fd)?;
    remove_if_same(folder, name, ours.st_dev, ours.st_ino)?;
    Ok(Occupant::Stale)
}

/// Returns whether the writer of a page that is open still runs, which locks it. If it does not, the page is locked by
/// this descriptor.
pub(crate) fn occupant(fd: &Fd) -> Result<Occupant, Errno> {
    match rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Occupant::Stale),
        Err(Errno::WOULDBLOCK) => Ok(Occupant::Live),
        Err(error) => Err(error),
    }
}

/// Opens a page for reading; refuses anything but a regular file of this user.
pub(crate) fn open_page(folder: BorrowedFd<'_>, name: &CStr) -> Result<Fd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = Fd::new(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&fd)?;
    let plain = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
    if plain && is_ours(&stat) { Ok(fd) } else { Err(Errno::PERM) }
}

/// Unlinks `name` if it still is the file with this device and inode.
pub(crate) fn remove_if_same(folder: BorrowedFd<'_>, name: &CStr, device: u64, inode: u64) -> Result<(), Errno> {
    let there = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if (there.st_dev, there.st_ino) != (device, inode) {
        return Ok(());
    }
    rustix::fs::unlinkat(folder, name, AtFlags::empty())
}

/// Removes stale pages among the first entries of the folder, so that killed programs do not fill a rack directory that
/// no one reads. A page whose number a process has, in most cases its own, is left to a later sweep: to ask the kernel
/// for the process takes one system call, and for the lock five.
pub(crate) fn sweep(folder: BorrowedFd<'_>) {
    let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING_BYTES];
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(listing) = rustix::fs::openat(folder, c".", flags, Mode::empty()).map(Fd::new) else { return };
    let mut entries = RawDir::new(&listing, &mut buffer);
    for _ in 0..SWEEP_ENTRIES_MAX {
        let Some(Ok(entry)) = entries.next() else { return };
        if page_name_pid(entry.file_name().to_bytes()).is_some_and(|pid| !has_process(pid)) {
            let _ = remove_if_stale(folder, entry.file_name());
        }
    }
}

/// Returns whether a process has this number. It need not be the one that has written the page.
fn has_process(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

/// Reads the first bytes of a file, as many as fit into the buffer.
pub(crate) fn read_start<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let fd = Fd::new(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
    let length = rustix::io::read(&fd, &mut *buffer)?;
    Ok(&buffer[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_component_of_a_path_is_its_file() {
        assert_eq!(last_component(c"/run/rack/33"), c"33");
        assert_eq!(last_component(c"33"), c"33");
    }

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
