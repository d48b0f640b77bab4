//! The key of a rack, by which its processes recognize the abstract names that one of them has bound.
//!
//! Abstract AF_UNIX names belong to a network namespace and not to a user, so any process can bind them. A name that
//! carries a message authentication code under this key can be neither computed nor forged by another user: the key is
//! in a file that only the rack's user can read.

use std::fmt;
use std::hash::Hasher;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::descriptor::hidden::close;
use crate::process::system::check_file_bytes;

/// The file in the rack directory's version that holds the key.
pub(super) const KEY_FILE: &str = "key";
const KEY_BYTES: usize = 16;
/// Maximum number of attempts to read the file, which is created if it is missing.
const KEY_TRIES_MAX: usize = 3;
/// Readable by the owner. The sticky bit keeps systemd-tmpfiles from removing the file for its age: processes that have
/// read it and processes that create another one would not recognize each other.
const KEY_MODE: Mode = Mode::from_raw_mode(0o1600);

/// The 128-bit key of a rack, for SipHash-2-4-128 of abstract names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NameKey([u8; KEY_BYTES]);

impl fmt::Debug for NameKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("NameKey(..)")
    }
}

impl NameKey {
    /// Returns the bytes of the key.
    pub fn to_bytes(self) -> [u8; KEY_BYTES] {
        self.0
    }

    /// Returns the message authentication code of `head` followed by `tail`.
    pub(crate) fn mac(&self, head: &[u8], tail: &[u8]) -> u128 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(head);
        hasher.write(tail);
        hasher.finish128().as_u128()
    }

    /// Reads the key in `directory`, which is private to the user, and creates it if there is none. Concurrent
    /// processes get the same key.
    ///
    /// # Errors
    /// `PERM` when the file is not a regular one of the user that is closed to all others, `INVAL` when its length is
    /// not that of a key, and the errors of open, read, write and link.
    pub(super) fn read_or_make(directory: BorrowedFd<'_>, uid: u32) -> Result<Self, Errno> {
        for _ in 0..KEY_TRIES_MAX {
            match Self::read(directory, uid) {
                Err(Errno::NOENT) => Self::make(directory)?,
                outcome => return outcome,
            }
        }
        Err(Errno::NOENT)
    }

    fn read(directory: BorrowedFd<'_>, uid: u32) -> Result<Self, Errno> {
        // Non-blocking, in case it is a FIFO.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, KEY_FILE, flags, Mode::empty())?;
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
        let (key, suffix) = (random::<KEY_BYTES>()?, u64::from_ne_bytes(random()?));
        let unlinked = format!("{KEY_FILE}.{suffix:016x}");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, unlinked.as_str(), flags, KEY_MODE)?;
        let written = write_key(file.as_fd(), &key);
        close(file);
        let link = || rustix::fs::linkat(directory, unlinked.as_str(), directory, KEY_FILE, AtFlags::empty());
        let linked = written.and_then(|()| link());
        let _ = rustix::fs::unlinkat(directory, unlinked.as_str(), AtFlags::empty());
        match linked {
            Err(Errno::EXIST) => Ok(()),
            linked => linked,
        }
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
pub(crate) mod tests {
    use super::*;
    use crate::rendezvous::directory::tests::Scratch;
    use std::collections::HashSet;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;

    /// A key that no rack has.
    pub(crate) const OTHER_KEY: NameKey = NameKey([0x5a; KEY_BYTES]);

    fn uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn read_or_make(scratch: &Scratch) -> Result<[u8; KEY_BYTES], Errno> {
        let directory = std::fs::File::open(&scratch.0).unwrap();
        NameKey::read_or_make(directory.as_fd(), uid()).map(|key| key.0)
    }

    fn entries(scratch: &Scratch) -> Vec<PathBuf> {
        std::fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn the_code_matches_the_published_test_vectors() {
        // SipHash-2-4 with 128 bits, test vectors of its authors: the key is 0, 1, ..., 15; the input 0, 1, ..., n - 1.
        let key = NameKey(std::array::from_fn(|index| index as u8));
        let input: Vec<u8> = (0..15).collect();
        assert_eq!(key.mac(&[], &[]).to_le_bytes(), 0xa381_7f04_ba25_a8e6_6df6_7214_c755_0293_u128.to_be_bytes());
        assert_eq!(
            key.mac(&input[..1], &[]).to_le_bytes(),
            0xda87_c1d8_6b99_af44_3476_5911_9b22_fc45_u128.to_be_bytes()
        );
        for cut in 0..15 {
            assert_eq!(key.mac(&input[..cut], &input[cut..]), key.mac(&input, &[]), "only the concatenation counts");
        }
    }

    #[test]
    fn a_key_is_made_once_random_and_private() {
        let scratch = Scratch::new();
        let key = read_or_make(&scratch).unwrap();
        assert_eq!(read_or_make(&scratch), Ok(key));
        assert_ne!(read_or_make(&Scratch::new()), Ok(key));
        assert_eq!(entries(&scratch), [scratch.0.join(KEY_FILE)], "nothing else is left");
        let metadata = std::fs::metadata(scratch.0.join(KEY_FILE)).unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.len()), (0o1600, KEY_BYTES as u64));
    }

    #[test]
    fn processes_that_create_the_key_concurrently_agree() {
        let scratch = Scratch::new();
        let keys: HashSet<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| read_or_make(&scratch).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((keys.len(), entries(&scratch).len()), (1, 1));
    }

    #[test]
    fn a_file_that_others_could_read_or_have_written_is_rejected() {
        let scratch = Scratch::new();
        let path = scratch.0.join(KEY_FILE);
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
        let directory = std::fs::File::open(&scratch.0).unwrap();
        assert_eq!(NameKey::read_or_make(directory.as_fd(), uid() + 1).unwrap_err(), Errno::PERM);
        std::fs::remove_file(&path).unwrap();
        symlink("/etc/hostname", &path).unwrap();
        assert_eq!(read_or_make(&scratch), Err(Errno::LOOP));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(read_or_make(&scratch), Err(Errno::PERM));
    }
}
