//! The rack directory, in which programs meet: found, checked and created for the commands.

pub mod shared;

use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rack::RunDir;
use socket::rack::shared::{SharedRack, SharedRackError};

use self::shared::SharedView;
use crate::wrong_use::WrongUse;

/// Length of the longest rack path that the library accepts.
const PATH_BYTES_MAX: usize = 400;
const PAGE_BYTES: usize = 4096;

/// Returns the absolute path of the rack given with `--rack`, or of the one that the environment names.
pub fn chosen(given: Option<&Path>) -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    let rack = given.map_or_else(|| stats_page::rack_dir(|name| std::env::var_os(name), uid), Path::to_owned);
    std::path::absolute(&rack).unwrap_or(rack)
}

/// Returns the directory below which the run directories of all racks and clusters are.
pub fn base() -> PathBuf {
    RunDir::base(&chosen(None))
}

/// Rejects a directory that is named with `--rack` or in the environment and does not exist: the name may be mistyped,
/// and a program in a new directory would meet no other.
pub fn check_named(given: Option<&Path>) -> Result<()> {
    let by_variable = std::env::var_os("CROSSLANE_RACK").is_some_and(|value| !value.is_empty());
    let rack = chosen(given);
    let exists = std::fs::exists(&rack).unwrap_or_else(|error| error.kind() != ErrorKind::NotADirectory);
    if (given.is_none() && !by_variable) || exists {
        return Ok(());
    }
    let (shown, named) = (rack.display(), if given.is_some() { "--rack" } else { "CROSSLANE_RACK" });
    bail!(WrongUse::of(format!("rack '{shown}' does not exist; correct {named}, or mkdir -m 700 '{shown}'")))
}

/// Prepares a directory below `base` as [`prepare`] does, and checks that no other user can replace it.
pub fn prepare_below(base: &Path, directory: &Path) -> Result<()> {
    let chosen = chosen(None);
    if SharedRack::of(&chosen).is_ok_and(|shared| shared.is_some()) {
        let what =
            format!("rack '{}' is shared by users; set CROSSLANE_RACK to a directory of your own", chosen.display());
        bail!(WrongUse::of(what));
    }
    let make = |path: &Path| std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    let above: Vec<&Path> = directory.ancestors().skip(1).take_while(|path| path.starts_with(base)).collect();
    for path in above.into_iter().rev() {
        let remedy = "set CROSSLANE_RACK to a directory of your own";
        let shown = path.display();
        make(path).with_context(|| format!("directory '{shown}' cannot be used; {remedy}"))?;
        let found = std::fs::symlink_metadata(path).with_context(|| format!("directory '{shown}'; {remedy}"))?;
        let is_owned = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
        if !found.is_dir() || !is_owned {
            bail!("'{shown}' is not a directory, or belongs to user {}; {remedy}", found.uid());
        }
        let (is_open, is_sticky) = (found.mode() & 0o022 != 0, found.mode() & 0o1000 != 0);
        if is_open && !is_sticky {
            bail!("directory '{shown}' is writable by other users; chmod go-w it, or {remedy}");
        }
    }
    prepare(directory)
}

/// Returns the rack if several users share it, and `None` for a private one.
///
/// # Errors
/// Wrong use, if it is meant to be shared and cannot be.
pub fn shared(rack: &Path) -> Result<Option<SharedRack>> {
    SharedRack::of(rack).map_err(|error| unusable(rack, &error).into())
}

/// Returns the error for a shared rack that programs cannot use.
pub fn unusable(rack: &Path, error: &SharedRackError) -> WrongUse {
    let remedy = match error {
        SharedRackError::System(_) => "; give a writable directory with --rack",
        _ => "",
    };
    WrongUse::of(format!("rack '{}': {error}{remedy}", rack.display()))
}

/// Returns the reason for which programs of the caller refuse a directory as an error, and creates nothing. A directory
/// that does not exist is accepted.
pub fn check_usable(rack: &Path) -> Result<()> {
    match shared(rack)? {
        Some(shared) => shared.read_rules().map(|_| ()).map_err(|error| unusable(rack, &error).into()),
        None => check_private(rack),
    }
}

fn check_private(rack: &Path) -> Result<()> {
    let shown = rack.display();
    let found = match std::fs::symlink_metadata(rack) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        found => found.with_context(|| format!("rack '{shown}' cannot be read; check --rack"))?,
    };
    if !found.is_dir() {
        bail!(WrongUse::of(format!("rack '{shown}' is not a directory; give another with --rack")));
    }
    let user = rustix::process::geteuid();
    if !user.is_root() && found.uid() != user.as_raw() {
        bail!(WrongUse::of(format!(
            "rack '{shown}' belongs to user {}; give one of your own with --rack",
            found.uid()
        )));
    }
    if found.mode() & 0o077 != 0 {
        // Not to be closed to them: it may be a directory of the system.
        bail!(WrongUse::of(format!(
            "rack '{shown}' is open to other users; give another with --rack, made by mkdir -m 700"
        )));
    }
    Ok(())
}

/// Returns whether programs of a user meet in a directory: it is a shared rack, or exists, is the user's, and is not
/// open to others.
pub fn is_usable(rack: &Path, uid: u32) -> bool {
    if let Ok(Some(shared)) = SharedView::of(rack) {
        return shared.is_usable(shared::on_machine(uid));
    }
    std::fs::symlink_metadata(rack).is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0)
}

/// Returns whether the file system of a directory has no room for another page.
pub fn is_full(rack: &Path) -> bool {
    rustix::fs::statvfs(rack).is_ok_and(|found| found.f_bavail == 0 || (found.f_files > 0 && found.f_favail == 0))
}

/// Writes a page into the directory of the caller in a rack that is [prepared](prepare), and removes it again. A file
/// system that is full, or a quota, refuses the bytes and not the file.
pub fn write_page(rack: &Path) -> std::io::Result<()> {
    let uid = shared::on_machine(rustix::process::geteuid().as_raw());
    let own = SharedView::of(rack).ok().flatten().map(|shared| shared.user_directory(uid));
    let mut page = tempfile::Builder::new().prefix(".probe-").tempfile_in(own.as_deref().unwrap_or(rack))?;
    page.write_all(&[0; PAGE_BYTES]).and_then(|()| page.flush())
}

/// Returns whether a directory is on an overlay file system, as a container's root is, which can keep no page.
pub fn is_on_overlay(rack: &Path) -> bool {
    rustix::fs::statfs(rack).is_ok_and(|found| found.f_type == stats_page::OVERLAY_MAGIC)
}

/// Creates the rack directory if it is missing, and checks that programs of the caller can meet in it. In a shared one,
/// creates the directory of the caller's user.
///
/// # Errors
/// Wrong use, if they cannot: another directory is to be named. A full file system is not wrong use.
pub fn prepare(rack: &Path) -> Result<()> {
    let shown = rack.display();
    if rack.as_os_str().len() > PATH_BYTES_MAX {
        let what = format!("rack '{shown}' is too long, {PATH_BYTES_MAX} bytes at most; give a shorter --rack");
        bail!(WrongUse::of(what));
    }
    let usable = |result: std::io::Result<()>| -> Result<()> {
        let remedy = || format!("rack '{shown}' cannot be used; give a writable directory with --rack");
        let is_full =
            |error: &std::io::Error| matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        match result {
            Err(error) if !is_full(&error) => {
                Err(error).with_context(remedy).map_err(|error| WrongUse::of(error).into())
            }
            result => result.with_context(remedy),
        }
    };
    if let Some(shared) = shared(rack)? {
        let own = shared.read_rules().and_then(|_| shared.ensure_user_directory(&shared::user_map()));
        let own = own.map_err(|error| unusable(rack, &error))?;
        return usable(write_probe(&own));
    }
    usable(std::fs::DirBuilder::new().recursive(true).mode(0o700).create(rack))?;
    let found = std::fs::symlink_metadata(rack).with_context(|| format!("rack '{shown}' cannot be read"))?;
    if found.uid() != rustix::process::geteuid().as_raw() {
        bail!(WrongUse::of(format!(
            "rack '{shown}' belongs to user {}; give one of your own with --rack",
            found.uid()
        )));
    }
    check_private(rack)?;
    usable(write_probe(rack))
}

/// Writes a file. Root passes every permission check even on a read-only file system: only this shows that it works.
fn write_probe(directory: &Path) -> std::io::Result<()> {
    let probe = directory.join(format!(".probe-{}", std::process::id()));
    std::fs::write(&probe, b"")?;
    std::fs::remove_file(&probe)
}
