//! Finding the library that `crosslane run` loads into programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::elf;

const NAME: &str = "libcrosslane.so";
/// Beside the command (a build), in a tree it was installed into, and where packages put it.
const BESIDE: [&str; 3] = [".", "../lib/crosslane", "../lib"];
const SYSTEM: [&str; 4] =
    ["/usr/local/lib/crosslane", "/usr/lib/crosslane", "/usr/lib/x86_64-linux-gnu/crosslane", "/usr/lib64/crosslane"];

/// The library, which `given` names when it is not at one of its usual places.
pub fn find(given: Option<&Path>) -> Result<PathBuf> {
    match given {
        Some(path) => find_given(path, "--library"),
        None => find_given(&find_usual()?, "--library"),
    }
}

/// The library that `option` names.
pub fn find_given(path: &Path, option: &str) -> Result<PathBuf> {
    if !path.is_file() {
        bail!("no library '{}'; check {option}", path.display());
    }
    let found = std::fs::canonicalize(path).with_context(|| format!("library '{}'", path.display()))?;
    check(&found, option)?;
    Ok(found)
}

fn find_usual() -> Result<PathBuf> {
    let command = std::env::current_exe().context("finding this command's own place")?;
    let folder = command.parent().unwrap_or(Path::new("/"));
    let places: Vec<PathBuf> =
        BESIDE.iter().map(|place| folder.join(place)).chain(SYSTEM.iter().map(PathBuf::from)).collect();
    match places.iter().map(|place| place.join(NAME)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "no {NAME} beside {} nor under /usr/lib/crosslane; build it with 'cargo build --release' or give --library",
            command.display()
        ),
    }
}

/// The name under which loaders are to look for a library: one that no loader but glibc's finds. musl's would load it
/// with libraries that it does not have, and end the program. glibc's puts its own library directory for `$LIB`, one
/// below `/usr`, and from any there so many steps up lead to the root. Where there is no such directory the name is the
/// plain path.
pub fn preload_name(library: &Path) -> OsString {
    const ROOT_BY_LIB: &str = "/usr/$LIB/../../../../../..";
    let has_usr_lib = Path::new("/usr/lib").is_dir();
    let mut name = OsString::from(if has_usr_lib && library.is_absolute() { ROOT_BY_LIB } else { "" });
    name.push(library);
    name
}

fn check(path: &Path, option: &str) -> Result<()> {
    if !elf::is_library(path) {
        bail!("'{}' is no shared library of this machine; check {option}", path.display());
    }
    // The loader splits LD_PRELOAD at these and knows no way to quote them.
    if path.to_string_lossy().contains([' ', ':', '\t', '\n']) {
        bail!("'{}' has a blank or a colon in it, which LD_PRELOAD cannot carry; move it", path.display());
    }
    Ok(())
}
