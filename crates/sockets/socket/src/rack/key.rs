//! The key of a rack, by which its processes recognize each other.
//!
//! ```text
//!   RACK/v4/key         the key
//!   RACK/lanes-off      present while lanes are switched off
//!   RACK/monitor.sock   the socket of this node's monitor
//!   RACK/proxy.table    what the sockets of this node's proxy stand for
//!   RACK/v1/stat/<pid>  the stats pages
//! ```
//!
//! The directories must be real ones, owned by the effective user and closed to all other users. Programs meet under
//! abstract AF_UNIX names, which any process of a network namespace can bind: only those that can read the key can
//! compute them.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

use super::private::{make_private, open_private, open_within};
use crate::descriptor::hidden::close;
use crate::process::system::check_file_bytes;

/// The directory of this version in a rack: processes of another version find no key there.
const VERSION: &str = "v4";
/// The file in it that holds the key.
const KEY_FILE: &str = "key";
const KEY_BYTES: usize = 16;
/// Maximum number of attempts to read the file, which is created if it is missing.
const KEY_TRIES_MAX: usize = 3;
/// Readable by the owner. The sticky bit keeps systemd-tmpfiles from removing the file for its age: processes that have
/// read it and processes that create another one would not recognize each other.
const KEY_MODE: Mode = Mode::from_raw_mode(0o1600);

/// The 128-bit key of a rack, or of two users of a shared one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RackKey([u8; KEY_BYTES]);

impl fmt::Debug for RackKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RackKey(..)")
    }
}

impl RackKey {
    /// Returns the bytes of the key.
    pub fn to_bytes(self) -> [u8; KEY_BYTES] {
        self.0
    }

    /// Reads the key of a rack, and creates directories and key where they are missing, except those above the rack.
    ///
    /// # Errors
    /// `PERM` when a directory or the key is not owned by the user or open to others, `INVAL` when the key has a wrong
    /// length, and the errors of mkdir, open, read, write and link.
    pub fn of_rack(rack: &Path) -> Result<Self, Errno> {
        let (uid, name) = (rustix::process::geteuid().as_raw(), rack.as_os_str().as_bytes());
        make_private(rustix::fs::CWD, name)?;
        let version = open_within(open_private(rustix::fs::CWD, name, uid)?, VERSION, uid)?;
        let key = Self::read_or_make(version.as_fd(), uid);
        close(version);
        key
    }

    /// Reads the key in `directory`, which is private to the user, and creates it if there is none. Concurrent
    /// processes get the same key.
    ///
    /// # Errors
    /// `PERM` when the file is not a regular one of the user that is closed to all others, `INVAL` when its length is
    /// not that of a key, and the errors of open, read, write and link.
    fn read_or_make(directory: BorrowedFd<'_>, uid: u32) -> Result<Self, Errno> {
        for _ in 0..KEY_TRIES_MAX {
            match Self::read(directory, KEY_FILE, uid) {
                Err(Errno::NOENT) => Self::make(directory)?,
                outcome => return outcome,
            }
        }
        Err(Errno::NOENT)
    }

    /// Reads a key from a file, which must be a regular one of the user that is closed to all others.
    ///
    /// # Errors
    /// `PERM` for another file, `INVAL` for another length, and the errors of open and read.
    pub fn read(directory: BorrowedFd<'_>, name: impl rustix::path::Arg, uid: u32) -> Result<Self, Errno> {
        // Non-blocking, in case it is a FIFO.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, name, flags, Mode::empty())?;
        let key = Self::read_checked(&file, uid);
        close(file);
        key
    }

    fn read_checked(file: &OwnedFd, uid: u32) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(file)?;
        let is_private = stat.st_uid == uid && stat.st_mode & 0o077 == 0;
        if !is_private || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::PERM);
        }
        let mut key = [0_u8; KEY_BYTES];
        if stat.st_size != KEY_BYTES as i64 || rustix::io::read(file, &mut key)? != KEY_BYTES {
            return Err(Errno::INVAL);
        }
        Ok(Self(key))
    }

    /// Creates the file with a random key, unless another process has created it. The link that makes it visible is the
    /// last step, so no process reads half a key.
    fn make(directory: BorrowedFd<'_>) -> Result<(), Errno> {
        let key = Self::random()?;
        let named = key.write_draft(directory, KEY_FILE, None, |draft| {
            rustix::fs::linkat(directory, draft, directory, KEY_FILE, AtFlags::empty())
        });
        match named {
            Err(Errno::EXIST) => Ok(()),
            named => named,
        }
    }

    /// Returns a new key.
    ///
    /// # Errors
    /// Those of `getrandom(2)`.
    pub fn random() -> Result<Self, Errno> {
        random().map(Self)
    }

    /// Writes the key to a file of a user, in place of one with that name. A reader gets all of the old one or of this.
    ///
    /// # Errors
    /// Those of open, fchown, write and rename.
    pub fn replace(self, directory: BorrowedFd<'_>, name: &str, uid: u32) -> Result<(), Errno> {
        self.write_draft(directory, name, Some(uid), |draft| rustix::fs::renameat(directory, draft, directory, name))
    }

    /// Writes the key to a new file, which `publish` gives its name.
    fn write_draft(
        self,
        directory: BorrowedFd<'_>,
        name: &str,
        owner: Option<u32>,
        publish: impl FnOnce(&str) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let suffix = u64::from_ne_bytes(random()?);
        let draft = format!("{name}.{suffix:016x}");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, draft.as_str(), flags, KEY_MODE)?;
        let owned = owner.map_or(Ok(()), |uid| rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), None));
        let written = owned.and_then(|()| write_key(file.as_fd(), &self.0));
        close(file);
        let published = written.and_then(|()| publish(&draft));
        let _ = rustix::fs::unlinkat(directory, draft.as_str(), AtFlags::empty());
        published
    }
}

fn write_key(file: BorrowedFd<'_>, key: &[u8]) -> Result<(), Errno> {
    check_file_bytes(key.len())?;
    rustix::fs::fchmod(file, KEY_MODE)?;
    if rustix::io::write(file, key)? != key.len() {
        return Err(Errno::NOSPC);
    }
    // A machine that loses power must not leave an empty file, which would be rejected from then on.
    rustix::fs::fdatasync(file)
}

fn random<const N: usize>() -> Result<[u8; N], Errno> {
    let mut bytes = [0_u8; N];
    match rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())? {
        length if length == N => Ok(bytes),
        _ => Err(Errno::AGAIN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;

    fn uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn read_or_make(scratch: &tempfile::TempDir) -> Result<[u8; KEY_BYTES], Errno> {
        let directory = std::fs::File::open(scratch.path()).unwrap();
        RackKey::read_or_make(directory.as_fd(), uid()).map(|key| key.0)
    }

    fn entries(scratch: &tempfile::TempDir) -> Vec<PathBuf> {
        std::fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn a_key_is_made_once_random_and_private() {
        let scratch = tempfile::tempdir().unwrap();
        let key = read_or_make(&scratch).unwrap();
        assert_eq!(read_or_make(&scratch), Ok(key));
        assert_ne!(read_or_make(&tempfile::tempdir().unwrap()), Ok(key));
        assert_eq!(entries(&scratch), [scratch.path().join(KEY_FILE)], "nothing else is left");
        let metadata = std::fs::metadata(scratch.path().join(KEY_FILE)).unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.len()), (0o1600, KEY_BYTES as u64));
    }

    #[test]
    fn processes_that_create_the_key_concurrently_agree() {
        let scratch = tempfile::tempdir().unwrap();
        let keys: HashSet<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| read_or_make(&scratch).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((keys.len(), entries(&scratch).len()), (1, 1));
    }

    #[test]
    fn a_file_that_others_could_read_or_have_written_is_rejected() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join(KEY_FILE);
        for mode in [0o640, 0o604, 0o620] {
            std::fs::write(&path, [7; KEY_BYTES]).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_or_make(&scratch), Err(Errno::PERM), "{mode:o}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_or_make(&scratch), Ok([7; KEY_BYTES]));
        for bytes in [0, KEY_BYTES - 1, KEY_BYTES + 1] {
            std::fs::write(&path, vec![7; bytes]).unwrap();
            assert_eq!(read_or_make(&scratch), Err(Errno::INVAL), "{bytes} bytes");
        }
        let directory = std::fs::File::open(scratch.path()).unwrap();
        assert_eq!(RackKey::read_or_make(directory.as_fd(), uid() + 1).unwrap_err(), Errno::PERM);
        std::fs::remove_file(&path).unwrap();
        symlink("/etc/hostname", &path).unwrap();
        assert_eq!(read_or_make(&scratch), Err(Errno::LOOP));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(read_or_make(&scratch), Err(Errno::PERM));
    }
}
