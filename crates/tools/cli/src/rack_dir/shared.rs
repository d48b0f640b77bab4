//! Rack directories that several users share, as commands find them: the caller's own, and those of other programs.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use socket::rack::rules::Rules;
use socket::rack::shared::{SharedRack, SharedRackError};
use socket::rack::users::{self, UserMap};

/// Maximum number of users' directories that are listed: a member can create any number.
pub const USERS_MAX: usize = 65_536;

/// A shared rack that is only examined. It is reached by a descriptor, because its path, such as one below
/// `/proc/PID/root`, may be longer than programs may use.
pub struct SharedView {
    path: PathBuf,
    rack: SharedRack,
    /// `rack` names it as `/proc/self/fd/NUMBER`.
    _directory: OwnedFd,
}

impl SharedView {
    /// Examines a directory; `None` if it is not shared, or cannot be opened.
    ///
    /// # Errors
    /// Why a directory that is meant to be shared cannot be.
    pub fn of(path: &Path) -> Result<Option<Self>, SharedRackError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(directory) = rustix::fs::open(path, flags, Mode::empty()) else { return Ok(None) };
        let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        Ok(SharedRack::of(&short)?.map(|rack| Self { path: path.to_owned(), rack, _directory: directory }))
    }

    /// Returns the directory of a user of the machine, whether or not it exists.
    pub fn user_directory(&self, uid: u32) -> PathBuf {
        self.path.join(uid.to_string())
    }

    /// Returns the users of the machine who have a directory that is theirs, as far as the caller may list them.
    pub fn users(&self) -> Vec<u32> {
        let map = user_map();
        let is_its_own = |uid: &u32| self.rack.check_user_directory(*uid, &map).is_ok();
        listed_users(self.rack.path()).into_iter().filter(is_its_own).collect()
    }

    /// Returns whether programs of a user of the machine can use it: the rules are valid, and nobody else has the
    /// user's directory.
    pub fn is_usable(&self, uid: u32) -> bool {
        let own = self.rack.check_user_directory(uid, &user_map());
        let is_missing = own == Err(SharedRackError::System(rustix::io::Errno::NOENT));
        self.rack.read_rules().is_ok() && (own.is_ok() || is_missing)
    }

    /// Returns the rules; `None` if they allow nothing between users, because they are invalid or the caller may not
    /// read them.
    pub fn rules(&self) -> Option<Rules> {
        self.rack.read_rules().ok()
    }

    /// Returns whether lanes are switched off.
    pub fn is_switched_off(&self) -> bool {
        self.rack.is_switched_off()
    }
}

/// Returns the numbers among the names in a shared rack, in order. Each is to be the directory of that user.
pub fn listed_users(rack: &Path) -> Vec<u32> {
    let names = std::fs::read_dir(rack).into_iter().flatten().flatten();
    let numbers = names.filter_map(|entry| number(entry.file_name().to_str()?));
    let mut users: Vec<u32> = numbers.take(USERS_MAX).collect();
    users.sort_unstable();
    users
}

/// Returns the user whose directory has this name.
pub fn number(name: &str) -> Option<u32> {
    name.parse().ok().filter(|number: &u32| number.to_string() == name)
}

/// Returns the map of the caller's user namespace.
pub fn user_map() -> UserMap {
    users::of_this_process().unwrap_or_else(|_| UserMap::identity())
}

/// Returns a user's number on the machine, or its number here if it has none there.
pub fn on_machine(uid: u32) -> u32 {
    user_map().on_machine(uid).unwrap_or(uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket::rack::shared::RULES_FILE;
    use std::os::unix::fs::{PermissionsExt, chown};

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_long_path_does_not_keep_a_rack_from_being_examined() {
        let scratch = tempfile::tempdir().unwrap();
        let rack = scratch.path().join("a-directory-whose-name-makes-the-path-longer-than-programs-may-use");
        std::fs::create_dir(&rack).unwrap();
        assert!(matches!(SharedView::of(&rack), Ok(None)), "a private one");
        assert!(matches!(SharedView::of(&rack.join("none")), Ok(None)));
        if !rustix::process::geteuid().is_root() {
            return;
        }
        std::fs::write(rack.join(RULES_FILE), "allow from 33 to 999\n").unwrap();
        set_mode(&rack, 0o3770);
        for (name, owner) in [("33", 33), ("999", 33), ("034", 34), ("other", 0)] {
            std::fs::create_dir(rack.join(name)).unwrap();
            chown(rack.join(name), Some(owner), None).unwrap();
        }
        let view = SharedView::of(&rack).unwrap().unwrap();
        assert_eq!(view.users(), [33]);
        assert!(view.is_usable(33) && view.is_usable(5) && !view.is_usable(999));
        assert!(view.rules().unwrap().allow(33, 999, 1) && !view.is_switched_off());
        assert_eq!(view.user_directory(33), rack.join("33"));
        assert!(matches!(SharedRack::of(&rack), Err(SharedRackError::Length(_))));
    }
}
