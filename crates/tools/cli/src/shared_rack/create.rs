//! `crosslane rack-dir create`: makes a directory that several users share.
//!
//! A new directory is root's alone until its rules file is in it: a member must not create that file. An existing one
//! is reached by a descriptor, and never through a link.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags};
use rustix::io::Errno;
use socket::rack::rules::{FILE_BYTES_MAX, Rules};
use socket::rack::shared::{PATH_BYTES_MAX, RACK_MODE, RULES_FILE, SharedRack, SharedRackError, USER_MODE};
use stats_page::OFF_FILE;

use super::access;
use super::accounts::Group;
use super::keys;
use super::{RULES_HEADER, RULES_MODE, absolute, require_root};
use crate::rack_dir::shared::{USERS_MAX, number, user_map};
use crate::wrong_use::WrongUse;
use crate::{output, rack_dir};

/// Options of `crosslane rack-dir create`.
#[derive(clap::Args)]
pub struct Options {
    /// The directory, such as /run/crosslane: a new or empty one, or a shared rack
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The group whose members may use it, by name or number
    #[arg(long, value_name = "GROUP")]
    group: String,
}

/// Makes the directory, and prints how to go on.
pub fn main(options: &Options) -> Result<()> {
    require_root("create")?;
    let group = Group::find(&options.group)?;
    let path = absolute(&options.directory)?;
    create(&path, group.gid)?;
    let shown = path.display();
    let next = format!("crosslane rack-dir allow {shown} --from USER --to USER");
    output::print(&format!("Members of group {group} share {shown}. Allow users with: {next}\n"))
}

/// Makes a shared rack, or sets the group and the modes of one right.
fn create(path: &Path, gid: u32) -> Result<()> {
    let refused = |why: String| WrongUse::of(format!("directory '{}' {why}", path.display()));
    let bytes = path.as_os_str().len();
    if bytes > PATH_BYTES_MAX {
        return Err(
            refused(format!("has a path of {bytes} bytes, {PATH_BYTES_MAX} at most; give a shorter one")).into()
        );
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(refused("cannot be shared; name a directory below it".to_owned()).into());
    };
    let parent = open_parent(parent)?;
    let is_new = match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => {
            return Err(error)
                .with_context(|| format!("directory '{}' cannot be made; choose another place", path.display()));
        }
    };
    let directory = open_existing(&parent, name).map_err(refused)?;
    if !is_new {
        check_existing(&directory).map_err(refused)?;
    }
    share(&directory, gid, path).map_err(|error| match error.is::<WrongUse>() {
        true => error,
        false => error.context(format!("directory '{}' cannot be shared; choose another place", path.display())),
    })?;
    let rules = SharedRack::of(path).and_then(|rack| match rack {
        Some(rack) => rack.read_rules(),
        None => Err(SharedRackError::RackMode(0)),
    });
    let rules = rules.map_err(|error| rack_dir::unusable(path, &error))?;
    // Without such lists, only members of the group may enter it.
    let _ = access::grant(&directory, &rules, &user_map());
    keys::ensure(&directory, path, &rules, &user_map());
    Ok(())
}

/// Opens the directory above, and checks that nobody but root can replace what is in it or above it.
pub(super) fn open_parent(given: &Path) -> Result<OwnedFd> {
    let remedy = "choose another place, such as /run";
    let missing = |error| WrongUse::of(format!("directory '{}': {error}; mkdir -p it", given.display()));
    let parent = fs::canonicalize(given).map_err(missing)?;
    for directory in parent.ancestors() {
        let shown = directory.display();
        let found = fs::symlink_metadata(directory).with_context(|| format!("directory '{shown}'; {remedy}"))?;
        if found.uid() != 0 {
            let uid = found.uid();
            return Err(WrongUse::of(format!(
                "directory '{shown}' belongs to user {uid}, who may replace what is in it; {remedy}"
            ))
            .into());
        }
        if found.mode() & 0o022 != 0 && found.mode() & 0o1000 == 0 {
            let what = "is writable by others, who may replace what is in it; chmod go-w it, or";
            return Err(WrongUse::of(format!("directory '{shown}' {what} {remedy}")).into());
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(&parent, flags, Mode::empty())
        .with_context(|| format!("directory '{}'; {remedy}", parent.display()))
}

/// Opens the directory itself. The error completes a sentence about it.
fn open_existing(parent: &OwnedFd, name: &OsStr) -> Result<OwnedFd, String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(|error| {
        let found = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
        match found.map(|found| FileType::from_raw_mode(found.st_mode)) {
            Ok(FileType::Symlink) => "is a link; name the directory itself, or remove the link".to_owned(),
            Ok(kind) if kind != FileType::Directory => "is not a directory; name another".to_owned(),
            _ => format!("cannot be opened: {error}; name another"),
        }
    })
}

/// Checks that an existing directory is empty, which makes it root's alone, or a shared rack. The error completes a
/// sentence about it.
fn check_existing(directory: &OwnedFd) -> Result<(), String> {
    let failed = |error: Errno| format!("cannot be examined: {error}; name another");
    let found = rustix::fs::fstat(directory).map_err(failed)?;
    if found.st_uid != 0 {
        return Err(format!("belongs to user {}; chown root it, or name another", found.st_uid));
    }
    if names(directory).map_err(failed)?.is_empty() {
        rustix::fs::fchmod(directory, Mode::RWXU).map_err(failed)?;
    }
    let is_ours =
        |name: &String| name == RULES_FILE || name == OFF_FILE || name.starts_with('.') || number(name).is_some();
    let names = names(directory).map_err(failed)?;
    let has_rules = names.iter().any(|name| name == RULES_FILE);
    let has_mode = found.st_mode & 0o7777 == RACK_MODE;
    let other = names.iter().find(|name| !is_ours(name));
    match other {
        Some(other) if !has_mode => {
            Err(format!("contains '{}' and is no shared rack; name an empty one", other.escape_debug()))
        }
        None if !has_mode && !has_rules && !names.is_empty() => {
            Err("is not empty and no shared rack; name an empty one".to_owned())
        }
        _ if has_rules && !has_mode => check_rules(directory),
        _ => Ok(()),
    }
}

/// Checks that a directory with another mode is a shared rack by its rules.
fn check_rules(directory: &OwnedFd) -> Result<(), String> {
    let read = || -> Result<Vec<u8>, Errno> {
        let file = rustix::fs::openat(directory, RULES_FILE, READ, Mode::empty())?;
        let mut bytes = vec![0; FILE_BYTES_MAX + 1];
        let count = rustix::io::read(&file, &mut bytes[..])?;
        bytes.truncate(count);
        Ok(bytes)
    };
    let bytes = read().map_err(|error| format!("has a file '{RULES_FILE}' that cannot be read: {error}; remove it"))?;
    Rules::parse(&bytes).map(|_| ()).map_err(|error| format!("has a file '{RULES_FILE}', {error}"))
}

const READ: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Returns the names in a directory.
fn names(directory: &OwnedFd) -> Result<Vec<String>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)?.take(2 * USERS_MAX) {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Makes the rules file if it is missing, and sets owners and modes: those of the directory last.
fn share(directory: &OwnedFd, gid: u32, path: &Path) -> Result<()> {
    let group = Some(Gid::from_raw(gid));
    let rules = open_rules(directory, path)?;
    set(&rules, group, RULES_MODE)?;
    let map = user_map();
    for uid in names(directory)?.iter().filter_map(|name| number(name)) {
        let flags = READ | OFlags::DIRECTORY;
        let Ok(own) = rustix::fs::openat(directory, uid.to_string(), flags, Mode::empty()) else { continue };
        if rustix::fs::fstat(&own).is_ok_and(|found| map.here(uid) == Some(found.st_uid)) {
            set(&own, group, USER_MODE)?;
        }
    }
    set(directory, group, RACK_MODE)
}

fn set(file: &OwnedFd, group: Option<Gid>, mode: u32) -> Result<()> {
    rustix::fs::fchown(file, None, group)?;
    Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?)
}

/// Opens the rules file, which is made if it is missing.
fn open_rules(directory: &OwnedFd, path: &Path) -> Result<OwnedFd> {
    let refused = |what| rack_dir::unusable(path, &SharedRackError::RulesFile(what));
    let file = match rustix::fs::openat(directory, RULES_FILE, READ, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(directory, RULES_FILE, flags, Mode::RUSR | Mode::WUSR)?;
            let mut file = fs::File::from(file);
            std::io::Write::write_all(&mut file, RULES_HEADER.as_bytes())?;
            return Ok(file.into());
        }
        Err(Errno::LOOP) => return Err(refused("is a link; remove it, then repeat this").into()),
        Err(error) => return Err(error.into()),
    };
    let found = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refused("is not a regular file; remove it, then repeat this").into());
    }
    if found.st_uid != 0 {
        return Err(refused("does not belong to root; remove it, then repeat this").into());
    }
    Ok(file)
}
