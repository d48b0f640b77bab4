//! A rack directory that several users share, as an administrator has made it (`crosslane rack-dir create`).
//!
//! ```text
//!   RACK             root:GROUP 3770    members create, and cannot replace each other's files
//!   RACK/rules       root 0644          whose clients may reach whose servers (module `rules`)
//!   RACK/lanes-off   root               present while lanes are switched off
//!   RACK/UID         UID 0711           what the programs of one user publish: only they write
//!   RACK/UID/HASH    UID 0666           the socket of an accepting endpoint that can be met
//!   RACK/UID/key-UID UID 1600           the key of the user and of another one, between whom a rule is
//!   RACK/UID/v1      UID 0700           the stats pages of its programs
//! ```
//!
//! Who may enter the rack, by its group or by its access control list, reaches the sockets in it; whom a program meets
//! is for the rules to say. In a user namespace the kernel may not tell a program who another one's user is: the two
//! then prove that they have the key of both users. UID is a number of the machine. A directory or a file of another
//! owner than its name says is not used: a member of the group can create any that is missing.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;

use super::key::RackKey;
use super::rules::{FILE_BYTES_MAX, OVERFLOW_UID, RuleError, Rules};
use super::users::{self, UserMap};
use crate::descriptor::hidden::{self, HiddenFd, close};

/// The file with the rules.
pub const RULES_FILE: &str = "rules";
/// The mode of a shared rack: its group may create files, the sticky bit keeps members from removing those of others,
/// and files get its group.
pub const RACK_MODE: u32 = 0o3770;
/// The mode of a user's directory in it: who may enter the rack may open what is known by name.
pub const USER_MODE: u32 = 0o711;
/// Longest path of a shared rack: a socket in a user's directory has a name of 32 bytes, and its address 107 at most.
pub const PATH_BYTES_MAX: usize = 107 - 1 - 10 - 1 - 32;

/// Returns the name of the file, in a user's directory, with the key of the user and of another one.
pub fn user_key_file(other: u32) -> String {
    format!("key-{other}")
}

const PERMISSIONS: u32 = 0o7777;
const ROOT: u32 = 0;

/// Why a shared rack cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedRackError {
    /// The path is too long for the sockets in it.
    Length(usize),
    /// The directory is not root's.
    Owner(u32),
    /// The directory has another mode.
    RackMode(u32),
    /// This process is not a member of its group.
    Membership,
    /// This process's user has no number on the machine.
    Unmapped(u32),
    /// The rules are missing, or not a file of the directory's owner that only that may write.
    RulesFile(&'static str),
    /// A rule is wrong.
    Rules(RuleError),
    /// The user's directory has another owner, or others may write to it.
    UserDirectory(u32),
    /// A system call failed.
    System(Errno),
}

impl fmt::Display for SharedRackError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => {
                write!(formatter, "its path has {bytes} bytes, {PATH_BYTES_MAX} at most; move it to a shorter one")
            }
            Self::Owner(uid) => write!(formatter, "it belongs to user {uid}; chown root it"),
            Self::RackMode(mode) => write!(formatter, "its mode is {mode:o}; chmod {RACK_MODE:o} it"),
            Self::Membership => write!(formatter, "this program is not a member of its group; add its user to that"),
            Self::Unmapped(uid) => write!(
                formatter,
                "user {uid} has no number outside of this user namespace; run the program as a user with one"
            ),
            Self::RulesFile(what) => write!(formatter, "its file '{RULES_FILE}' {what}"),
            Self::Rules(error) => write!(formatter, "its file '{RULES_FILE}', {error}"),
            Self::UserDirectory(uid) => write!(
                formatter,
                "its directory '{uid}' is not a directory of user {uid} alone; remove it, then crosslane rack-dir allow"
            ),
            Self::System(errno) => write!(formatter, "{errno}"),
        }
    }
}

impl std::error::Error for SharedRackError {}

impl From<Errno> for SharedRackError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::ACCESS => Self::Membership,
            other => Self::System(other),
        }
    }
}

/// The slot of the descriptor by which a process that has changed its root directory reaches its rack, plus one; 0
/// without.
static KEPT: AtomicU32 = AtomicU32::new(0);

/// Returns the directory by which this process reaches its rack after a change of its root directory.
fn kept() -> Option<BorrowedFd<'static>> {
    let slot = KEPT.load(Ordering::Acquire).checked_sub(1)?;
    let number = hidden::number_at(slot as u16);
    // SAFETY: the number is not negative. The descriptor is closed only if the root directory could not be changed; a
    // system call on it then fails, without touching memory.
    (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

fn base_after_change_of_root() -> BorrowedFd<'static> {
    kept().unwrap_or(CWD)
}

/// A shared rack directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRack {
    path: PathBuf,
    /// Root, or the number that stands for it in a user namespace without root.
    owner: u32,
}

/// Identifies the contents of a rules file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RulesStamp {
    inode: u64,
    bytes: i64,
    changed: (i64, i64),
}

impl SharedRack {
    /// Examines a directory; `None` if it is not meant to be shared: neither its mode nor a rules file in it says so.
    ///
    /// # Errors
    /// Why a directory that is meant to be shared cannot be.
    pub fn of(path: &Path) -> Result<Option<Self>, SharedRackError> {
        let Ok(found) = rustix::fs::stat(path) else { return Ok(None) };
        let mode = found.st_mode & PERMISSIONS;
        // A private directory gets the set-group-ID bit from the one above it.
        let is_open = mode & 0o077 != 0;
        let is_meant = (is_open && mode & 0o3000 != 0) || rustix::fs::lstat(path.join(RULES_FILE)).is_ok();
        if !is_meant || FileType::from_raw_mode(found.st_mode) != FileType::Directory {
            return Ok(None);
        }
        if path.as_os_str().len() > PATH_BYTES_MAX {
            return Err(SharedRackError::Length(path.as_os_str().len()));
        }
        if found.st_uid != ROOT && !(found.st_uid == OVERFLOW_UID && is_vouched_for(path)) {
            return Err(SharedRackError::Owner(found.st_uid));
        }
        if mode != RACK_MODE {
            return Err(SharedRackError::RackMode(mode));
        }
        Ok(Some(Self { path: path.to_owned(), owner: found.st_uid }))
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the directory of a user of the machine, whether or not it exists: its absolute path.
    pub fn user_directory(&self, uid: u32) -> PathBuf {
        self.path.join(uid.to_string())
    }

    /// Prepares for a change of this process's root directory, behind which the rack could not be reached by its path:
    /// keeps a descriptor of it. That is of a mount of its own, from which no path leads to what is above the rack.
    ///
    /// # Errors
    /// Those of `open_tree(2)`: `PERM` without `CAP_SYS_ADMIN`.
    pub fn keep_for_change_of_root(&self) -> Result<(), Errno> {
        if kept().is_some() {
            return Ok(());
        }
        users::of_this_process()?;
        let tree = rustix::mount::open_tree(
            CWD,
            &self.path,
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
        )?;
        KEPT.store(u32::from(HiddenFd::hide(tree)?.into_slot()) + 1, Ordering::Release);
        stats_page::set_directory_above(kept);
        Ok(())
    }

    /// Forgets what was kept, because the change of the root directory has failed.
    pub fn forget_kept(&self) {
        if let Some(slot) = KEPT.swap(0, Ordering::AcqRel).checked_sub(1) {
            drop(HiddenFd::from_slot(slot as u16));
        }
    }

    /// Returns the directory that [`SharedRack::below`] begins at, if this process has changed its root directory.
    pub fn base(&self) -> Option<fn() -> BorrowedFd<'static>> {
        kept().map(|_| base_after_change_of_root as fn() -> BorrowedFd<'static>)
    }

    /// Returns the path of a file of the rack, from [`SharedRack::base`].
    pub fn below(&self, name: &str) -> PathBuf {
        if kept().is_some() { PathBuf::from(name) } else { self.path.join(name) }
    }

    /// Returns the directory of this process's user, and creates it if it is missing.
    ///
    /// # Errors
    /// [`SharedRackError::Membership`], [`SharedRackError::UserDirectory`], and the kernel's.
    pub fn ensure_user_directory(&self, map: &UserMap) -> Result<PathBuf, SharedRackError> {
        let uid = rustix::process::geteuid().as_raw();
        let on_machine = map.on_machine(uid).ok_or(SharedRackError::Unmapped(uid))?;
        let directory = self.below(&on_machine.to_string());
        match self.check_user_directory(on_machine, map) {
            Err(SharedRackError::System(Errno::NOENT)) => {}
            checked => return checked.map(|()| directory),
        }
        let (base, mode) = (base_after_change_of_root(), Mode::from_raw_mode(USER_MODE));
        match rustix::fs::mkdirat(base, &directory, mode) {
            // The umask may have removed rights of others.
            Ok(()) => rustix::fs::chmodat(base, &directory, mode, AtFlags::empty())?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        self.check_user_directory(on_machine, map)?;
        Ok(directory)
    }

    /// Reads the key of this process's user and of another user of the machine.
    ///
    /// # Errors
    /// [`SharedRackError::Unmapped`], [`SharedRackError::UserDirectory`] of this user, and those of [`RackKey::read`]:
    /// `NOENT` if there is no rule between the two, or `crosslane rack-dir allow` has not made the key.
    pub fn user_key(&self, other: u32, map: &UserMap) -> Result<RackKey, SharedRackError> {
        let uid = rustix::process::geteuid().as_raw();
        let own = map.on_machine(uid).ok_or(SharedRackError::Unmapped(uid))?;
        self.check_user_directory(own, map)?;
        let path = self.below(&format!("{own}/{}", user_key_file(other)));
        RackKey::read(base_after_change_of_root(), path, uid).map_err(SharedRackError::System)
    }

    /// Checks that the directory of a user of the machine is that user's, and nobody else may write to it. Of users
    /// without a number in this user namespace, the kernel shows only that they have none.
    ///
    /// # Errors
    /// [`SharedRackError::UserDirectory`], [`SharedRackError::Unmapped`], and the kernel's: `NOENT` without one.
    pub fn check_user_directory(&self, uid: u32, map: &UserMap) -> Result<(), SharedRackError> {
        let hidden = (map.hides_users() && uid != OVERFLOW_UID).then_some(OVERFLOW_UID);
        let here = map.here(uid).or(hidden).ok_or(SharedRackError::Unmapped(uid))?;
        let found = self.lstat(&uid.to_string())?;
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let is_its_own = found.st_uid == here && found.st_mode & 0o022 == 0;
        if is_directory && is_its_own { Ok(()) } else { Err(SharedRackError::UserDirectory(uid)) }
    }

    /// Returns whether lanes are switched off, by a file of the directory's owner.
    pub fn is_switched_off(&self) -> bool {
        self.lstat(stats_page::OFF_FILE).is_ok_and(|found| found.st_uid == self.owner)
    }

    /// Returns what the rules' contents are known by, in one system call.
    ///
    /// # Errors
    /// That they are missing.
    pub fn rules_stamp(&self) -> Result<RulesStamp, SharedRackError> {
        let found = self.lstat(RULES_FILE).map_err(missing_rules)?;
        Ok(stamp(&found))
    }

    /// Reads the rules.
    ///
    /// # Errors
    /// [`SharedRackError::RulesFile`] and [`SharedRackError::Rules`]. Nothing is allowed between users then.
    pub fn read_rules(&self) -> Result<Rules, SharedRackError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = self.below(RULES_FILE);
        let file = rustix::fs::openat(base_after_change_of_root(), path, flags, Mode::empty());
        let file = file.map_err(missing_rules)?;
        let found = rustix::fs::fstat(&file);
        let mut bytes = Vec::new();
        let read = found.map_err(SharedRackError::from).and_then(|found| {
            self.check_rules_file(&found)?;
            bytes.resize(FILE_BYTES_MAX + 1, 0);
            rustix::io::read(&file, &mut bytes[..]).map_err(SharedRackError::from)
        });
        close(file);
        bytes.truncate(read?);
        Rules::parse(&bytes).map_err(SharedRackError::Rules)
    }

    fn lstat(&self, name: &str) -> Result<Stat, Errno> {
        rustix::fs::statat(base_after_change_of_root(), self.below(name), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn check_rules_file(&self, found: &Stat) -> Result<(), SharedRackError> {
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(SharedRackError::RulesFile("is not a regular file; remove it, then crosslane rack-dir allow"));
        }
        if found.st_uid != self.owner {
            return Err(SharedRackError::RulesFile("does not belong to root; chown root it"));
        }
        if found.st_mode & 0o022 != 0 {
            return Err(SharedRackError::RulesFile("may be written by others than root; chmod 644 it"));
        }
        Ok(())
    }
}

fn stamp(found: &Stat) -> RulesStamp {
    RulesStamp { inode: found.st_ino, bytes: found.st_size, changed: (found.st_ctime, found.st_ctime_nsec as i64) }
}

fn missing_rules(errno: Errno) -> SharedRackError {
    match errno {
        Errno::NOENT => SharedRackError::RulesFile("is missing; crosslane rack-dir create makes it"),
        Errno::LOOP => SharedRackError::RulesFile("is a link; remove it, then crosslane rack-dir allow"),
        other => other.into(),
    }
}

/// Returns whether somebody has mounted a directory where it is, in a user namespace in which root has no number. The
/// kernel shows root there by the number that stands for everybody without one: who has set up the mounts vouches.
fn is_vouched_for(path: &Path) -> bool {
    let is_root_unmapped = users::of_this_process().is_ok_and(|map| map.here(ROOT).is_none());
    let found = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS);
    is_root_unmapped && found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// Makes a shared rack; `None` if this user cannot.
    fn rack(scratch: &tempfile::TempDir) -> Option<SharedRack> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        std::fs::write(scratch.path().join(RULES_FILE), "allow from 33 to 999\n").unwrap();
        set_mode(&scratch.path().join(RULES_FILE), 0o640);
        set_mode(scratch.path(), RACK_MODE);
        SharedRack::of(scratch.path()).unwrap()
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_is_shared_if_its_mode_or_a_rules_file_says_so() {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(SharedRack::of(scratch.path()), Ok(None));
        assert_eq!(SharedRack::of(&scratch.path().join("none")), Ok(None));
        set_mode(scratch.path(), 0o2700);
        assert_eq!(SharedRack::of(scratch.path()), Ok(None));
        let Some(rack) = rack(&scratch) else { return };
        assert_eq!(rack.read_rules().unwrap().all().len(), 1);
        for mode in [0o770, 0o700, 0o2770, 0o1770, 0o3777, 0o3775] {
            set_mode(scratch.path(), mode);
            let error = SharedRack::of(scratch.path()).unwrap_err();
            assert_eq!(error.to_string(), format!("its mode is {mode:o}; chmod 3770 it"));
        }
        set_mode(scratch.path(), RACK_MODE);
        rustix::fs::chown(scratch.path(), Some(rustix::fs::Uid::from_raw(33)), None).unwrap();
        set_mode(scratch.path(), RACK_MODE);
        assert_eq!(SharedRack::of(scratch.path()), Err(SharedRackError::Owner(33)));
        rustix::fs::chown(scratch.path(), Some(rustix::fs::Uid::from_raw(OVERFLOW_UID)), None).unwrap();
        set_mode(scratch.path(), RACK_MODE);
        assert_eq!(SharedRack::of(scratch.path()), Err(SharedRackError::Owner(OVERFLOW_UID)));
    }

    #[test]
    fn rules_of_others_are_not_read() {
        let scratch = tempfile::tempdir().unwrap();
        let Some(rack) = rack(&scratch) else { return };
        let (path, before) = (scratch.path().join(RULES_FILE), rack.rules_stamp().unwrap());
        std::fs::write(&path, "allow from 33 to 999 ports 5\n").unwrap();
        assert_ne!(rack.rules_stamp().unwrap(), before);
        set_mode(&path, 0o660);
        assert!(rack.read_rules().unwrap_err().to_string().contains("may be written by others"));
        set_mode(&path, 0o640);
        rustix::fs::chown(&path, Some(rustix::fs::Uid::from_raw(33)), None).unwrap();
        assert!(rack.read_rules().unwrap_err().to_string().contains("does not belong to root"));
        std::fs::remove_file(&path).unwrap();
        assert!(rack.read_rules().unwrap_err().to_string().contains("is missing"));
        symlink("/etc/hostname", &path).unwrap();
        assert!(rack.read_rules().unwrap_err().to_string().contains("is a link"));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(rack.read_rules().unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn a_user_directory_is_that_of_its_name() {
        let scratch = tempfile::tempdir().unwrap();
        let Some(rack) = rack(&scratch) else { return };
        let map = UserMap::identity();
        let own = rack.ensure_user_directory(&map).unwrap();
        assert_eq!(own, scratch.path().join("0"));
        assert_eq!(std::fs::metadata(&own).unwrap().permissions().mode() & PERMISSIONS, USER_MODE);
        assert_eq!(rack.ensure_user_directory(&map).unwrap(), own);
        let wrong = Err(SharedRackError::UserDirectory(33));
        let other = rack.user_directory(33);
        std::fs::create_dir(&other).unwrap();
        assert_eq!(rack.check_user_directory(33, &map), wrong, "made by somebody else");
        rustix::fs::chown(&other, Some(rustix::fs::Uid::from_raw(33)), None).unwrap();
        assert_eq!(rack.check_user_directory(33, &map), Ok(()));
        set_mode(&other, 0o770);
        assert_eq!(rack.check_user_directory(33, &map), wrong, "others may write to it");
        std::fs::remove_dir(&other).unwrap();
        symlink(&own, &other).unwrap();
        assert_eq!(rack.check_user_directory(33, &map), wrong, "a link");
    }

    #[test]
    fn only_the_owner_switches_lanes_off() {
        let scratch = tempfile::tempdir().unwrap();
        let Some(rack) = rack(&scratch) else { return };
        let path = scratch.path().join(stats_page::OFF_FILE);
        assert!(!rack.is_switched_off());
        std::fs::write(&path, "").unwrap();
        assert!(rack.is_switched_off());
        rustix::fs::chown(&path, Some(rustix::fs::Uid::from_raw(33)), None).unwrap();
        assert!(!rack.is_switched_off(), "a member's");
    }
}
