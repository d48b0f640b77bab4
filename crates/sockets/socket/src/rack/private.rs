//! Directories that belong to one user and that no other user can enter.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::descriptor::hidden::close;

/// Opens the directory `name` in `parent` and creates it if it is missing. Closes `parent`.
pub(super) fn open_within(parent: OwnedFd, name: &str, uid: u32) -> Result<OwnedFd, Errno> {
    let made = make_private(parent.as_fd(), name.as_bytes());
    let directory = made.and_then(|()| open_private(parent.as_fd(), name.as_bytes(), uid));
    close(parent);
    directory
}

/// Creates a directory with rights for its owner only, if it is missing.
pub(super) fn make_private(parent: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        // The umask may have removed rights of the user. Another process may have removed the directory already.
        Ok(()) => match rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            changed => changed,
        },
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens a directory, which must be a real one, owned by the user and closed to all others.
pub(super) fn open_private(parent: BorrowedFd<'_>, name: &[u8], uid: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&directory);
    match stat {
        Ok(stat) if stat.st_uid == uid && stat.st_mode & 0o077 == 0 => Ok(directory),
        other => {
            close(directory);
            Err(other.err().unwrap_or(Errno::PERM))
        }
    }
}
