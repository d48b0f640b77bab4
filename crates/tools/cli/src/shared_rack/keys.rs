//! The keys of a shared rack: one for each two users between whom a rule is, in the directories of both. By it,
//! programs prove their users where the kernel does not tell them: in user namespaces, as with `PrivateUsers=` of
//! systemd.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use socket::rack::key::RackKey;
use socket::rack::rules::Rules;
use socket::rack::shared::user_key_file;
use socket::rack::users::UserMap;

/// Makes the keys that are missing, of users who have a directory.
///
/// # Errors
/// Those of open, write and rename. The keys of other users are made all the same.
pub fn ensure(rack: &OwnedFd, rules: &Rules, map: &UserMap) -> Result<(), Errno> {
    let pairs: BTreeSet<_> = rules.all().iter().map(|rule| (rule.from.min(rule.to), rule.from.max(rule.to))).collect();
    let pairs = pairs.into_iter().filter(|(a, b)| a != b);
    pairs.map(|(a, b)| ensure_pair(rack, [a, b], map)).fold(Ok(()), Result::and)
}

fn ensure_pair(rack: &OwnedFd, users: [u32; 2], map: &UserMap) -> Result<(), Errno> {
    let [Some(a), Some(b)] = users.map(|uid| UserDirectory::open(rack, uid, map)) else { return Ok(()) };
    let (of_a, of_b) = (a.read(users[1]), b.read(users[0]));
    if of_a.is_some() && of_a == of_b {
        return Ok(());
    }
    let key = RackKey::random()?;
    key.replace(a.directory.as_fd(), &user_key_file(users[1]), a.uid)?;
    key.replace(b.directory.as_fd(), &user_key_file(users[0]), b.uid)
}

/// The directory of a user.
struct UserDirectory {
    directory: OwnedFd,
    /// The user's number here.
    uid: u32,
}

impl UserDirectory {
    /// Opens the directory of a user of the machine, if it is that user's.
    fn open(rack: &OwnedFd, uid: u32, map: &UserMap) -> Option<Self> {
        let here = map.here(uid)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(rack, uid.to_string(), flags, Mode::empty()).ok()?;
        let is_its_own = rustix::fs::fstat(&directory).is_ok_and(|found| found.st_uid == here);
        is_its_own.then_some(Self { directory, uid: here })
    }

    fn read(&self, other: u32) -> Option<RackKey> {
        RackKey::read(self.directory.as_fd(), user_key_file(other), self.uid).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, chown, symlink};

    #[test]
    fn each_two_users_of_a_rule_have_one_key_which_stays() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        for uid in [33, 999] {
            std::fs::create_dir(path(&uid.to_string())).unwrap();
            chown(path(&uid.to_string()), Some(uid), None).unwrap();
        }
        let rack = OwnedFd::from(std::fs::File::open(scratch.path()).unwrap());
        let rules =
            Rules::parse(b"allow from 33 to 999\nallow from 999 to 33\nallow from 33 to 33\nallow from 33 to 5\n");
        let ensure = || ensure(&rack, rules.as_ref().unwrap(), &UserMap::identity());
        let read = |name: &str| std::fs::read(path(name)).unwrap();
        ensure().unwrap();
        let key = read("33/key-999");
        assert_eq!((key.len(), read("999/key-33")), (16, key.clone()));
        let metadata = std::fs::metadata(path("999/key-33")).unwrap();
        assert_eq!((metadata.uid(), metadata.mode() & 0o777), (999, 0o600));
        assert_eq!(
            std::fs::read_dir(path("33")).unwrap().count(),
            1,
            "none for the user itself, or without a directory"
        );
        ensure().unwrap();
        assert_eq!(read("33/key-999"), key);
        // A user may do in its own directory what it likes.
        std::fs::remove_file(path("999/key-33")).unwrap();
        symlink(path("victim"), path("999/key-33")).unwrap();
        ensure().unwrap();
        assert!(!path("victim").exists() && std::fs::symlink_metadata(path("999/key-33")).unwrap().is_file());
        assert_eq!(read("33/key-999"), read("999/key-33"));
        assert_ne!(read("33/key-999"), key);
    }
}
