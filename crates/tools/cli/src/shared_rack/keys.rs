//! The keys of a shared rack: one for each two users between whom a rule is, in the directories of both. By it,
//! programs prove their users where the kernel does not tell them: in user namespaces, as with `PrivateUsers=` of
//! systemd.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use socket::rack::key::RackKey;
use socket::rack::rules::Rules;
use socket::rack::shared::user_key_file;
use socket::rack::users::UserMap;

/// Makes the keys that are missing, and names on standard error those that cannot be made: other users, and programs
/// that see each other's users, need none of them.
pub fn ensure(rack: &OwnedFd, shown: &Path, rules: &Rules, map: &UserMap) {
    let pairs: BTreeSet<_> = rules.all().iter().map(|rule| (rule.from.min(rule.to), rule.from.max(rule.to))).collect();
    for (a, b) in pairs.into_iter().filter(|(a, b)| a != b) {
        if let Err((uid, name, error)) = ensure_pair(rack, [a, b], map) {
            let file = shown.join(uid.to_string()).join(name);
            let (file, what) = (file.display(), "so that programs in user namespaces may have no lanes");
            eprintln!("crosslane: key '{file}' cannot be made, {what}: {error}; rm -r '{file}', and repeat this");
        }
    }
}

/// Makes the key of two users, who both have a directory, if it is missing. An error comes with the file.
fn ensure_pair(rack: &OwnedFd, [a, b]: [u32; 2], map: &UserMap) -> Result<(), (u32, String, Errno)> {
    let (file_of_a, file_of_b) = (user_key_file(b), user_key_file(a));
    let open = |uid, name: &str| UserDirectory::open(rack, uid, map).map_err(|error| (uid, name.to_owned(), error));
    let (Some(at_a), Some(at_b)) = (open(a, &file_of_a)?, open(b, &file_of_b)?) else { return Ok(()) };
    let of_a = at_a.read(&file_of_a);
    if of_a.is_some() && of_a == at_b.read(&file_of_b) {
        return Ok(());
    }
    let key = RackKey::random().map_err(|error| (a, file_of_a.clone(), error))?;
    // The second first: if that fails, the first is as it was.
    key.replace(at_b.directory.as_fd(), &file_of_b, at_b.uid).map_err(|error| (b, file_of_b.clone(), error))?;
    key.replace(at_a.directory.as_fd(), &file_of_a, at_a.uid).map_err(|error| (a, file_of_a.clone(), error))
}

/// The directory of a user.
struct UserDirectory {
    directory: OwnedFd,
    /// The user's number here.
    uid: u32,
}

impl UserDirectory {
    /// Opens the directory of a user of the machine; `None` without one, or without a number of the user here.
    fn open(rack: &OwnedFd, uid: u32, map: &UserMap) -> Result<Option<Self>, Errno> {
        let Some(here) = map.here(uid) else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match rustix::fs::openat(rack, uid.to_string(), flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened?,
        };
        // Another member may have made it first.
        if rustix::fs::fstat(&directory)?.st_uid != here {
            return Err(Errno::PERM);
        }
        Ok(Some(Self { directory, uid: here }))
    }

    fn read(&self, name: &str) -> Option<RackKey> {
        RackKey::read(self.directory.as_fd(), name, self.uid).ok()
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
        let ensure = || ensure(&rack, scratch.path(), rules.as_ref().unwrap(), &UserMap::identity());
        let read = |name: &str| std::fs::read(path(name)).unwrap();
        ensure();
        let key = read("33/key-999");
        assert_eq!((key.len(), read("999/key-33")), (16, key.clone()));
        let metadata = std::fs::metadata(path("999/key-33")).unwrap();
        assert_eq!((metadata.uid(), metadata.mode() & 0o777), (999, 0o600));
        assert_eq!(
            std::fs::read_dir(path("33")).unwrap().count(),
            1,
            "none for the user itself, or without a directory"
        );
        ensure();
        assert_eq!(read("33/key-999"), key);
        // A user may do in its own directory what it likes.
        std::fs::remove_file(path("999/key-33")).unwrap();
        symlink(path("victim"), path("999/key-33")).unwrap();
        ensure();
        assert!(!path("victim").exists() && std::fs::symlink_metadata(path("999/key-33")).unwrap().is_file());
        assert_eq!(read("33/key-999"), read("999/key-33"));
        assert_ne!(read("33/key-999"), key);
        // What stands in the way of one key does not rotate its other copy, nor keep others from theirs.
        let key = read("33/key-999");
        std::fs::remove_file(path("999/key-33")).unwrap();
        std::fs::create_dir(path("999/key-33")).unwrap();
        ensure();
        assert_eq!(read("33/key-999"), key);
    }
}
