//! Finds the library that `crosslane run` preloads into programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::elf;

const NAME: &str = "libcrosslane.so";
/// Folders relative to the command's folder: that of a build, and those of an installation.
const RELATIVE_FOLDERS: [&str; 3] = [".", "../lib/crosslane", "../lib"];
/// Folders into which packages install the library.
const SYSTEM_FOLDERS: [&str; 4] =
    ["/usr/local/lib/crosslane", "/usr/lib/crosslane", "/usr/lib/x86_64-linux-gnu/crosslane", "/usr/lib64/crosslane"];

/// Returns the path of the library: the given one, or the first in the default folders.
pub fn find(given: Option<&Path>) -> Result<PathBuf> {
    match given {
        Some(path) => find_given(path, "--library"),
        None => find_given(&find_in_default_folders()?, "--library"),
    }
}

/// Checks the library that the option `option` names and returns its canonical path.
pub fn find_given(path: &Path, option: &str) -> Result<PathBuf> {
    if !path.is_file() {
        bail!("no library '{}'; check {option}", path.display());
    }
    let found = std::fs::canonicalize(path).with_context(|| format!("library '{}'", path.display()))?;
    check(&found, option)?;
    Ok(found)
}

fn find_in_default_folders() -> Result<PathBuf> {
    let command = std::env::current_exe().context("finding the path of this command")?;
    let folder = command.parent().unwrap_or(Path::new("/"));
    let relative = RELATIVE_FOLDERS.iter().map(|relative| folder.join(relative));
    let mut folders = relative.chain(SYSTEM_FOLDERS.iter().map(PathBuf::from));
    match folders.find_map(|folder| Some(folder.join(NAME)).filter(|path| path.is_file())) {
        Some(path) => Ok(path),
        None => bail!(
            "no {NAME} beside {} or under /usr/lib/crosslane; build it with 'cargo build --release' or give --library",
            command.display()
        ),
    }
}

/// Returns the name for LD_PRELOAD under which only glibc's loader finds the library. musl's loader would load it, fail
/// to find the library's dependencies, and end the program. glibc's loader replaces `$LIB` by its library directory
/// below `/usr` (ld.so(8)), from which the parent steps lead to the root. Without `/usr/lib` it is the plain path.
pub fn preload_name(library: &Path) -> OsString {
    const ROOT_BY_LIB: &str = "/usr/$LIB/../../../../../..";
    let has_usr_lib = Path::new("/usr/lib").is_dir();
    let mut name = OsString::from(if has_usr_lib && library.is_absolute() { ROOT_BY_LIB } else { "" });
    name.push(library);
    name
}

fn check(path: &Path, option: &str) -> Result<()> {
    if !elf::is_library(path) {
        bail!("'{}' is not a shared library for this machine; check {option}", path.display());
    }
    // The loader splits LD_PRELOAD at these characters and has no way to quote them (ld.so(8)).
    if path.to_string_lossy().contains([' ', ':', '\t', '\n']) {
        bail!("'{}' contains a blank or a colon, which LD_PRELOAD cannot contain; move the library", path.display());
    }
    Ok(())
}
