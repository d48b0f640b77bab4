//! Finds the library that `crosslane run` preloads into programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::elf;
use crate::wrong_use::WrongUse;

const NAME: &str = "libcrosslane.so";
/// The release of this command.
const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Folders relative to the command's folder: that of a build or of a copy, and that of an installation.
const RELATIVE_FOLDERS: [&str; 3] = [".", "../lib/crosslane", "../lib"];
/// Folders of installations that do not belong to the command.
const SYSTEM_FOLDERS: [&str; 2] = ["/usr/local/lib/crosslane", "/usr/lib/crosslane"];
/// Folders below them, the last of which is the folder itself. An installation uses the one that glibc's loader
/// replaces `$LIB` by (ld.so(8)): that of Debian, or that of other distributions.
const LIB_FOLDERS: [&str; 4] = ["lib/x86_64-linux-gnu", "lib64", "lib", "."];

/// Returns the path of the library: the given one, or the first in the default folders, which must be of this release.
pub fn find(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return find_given(path, "--library");
    }
    let found = find_given(&find_in_default_folders()?, "--library")?;
    let release = elf::release(&found).unwrap_or_default();
    if release != RELEASE {
        let (command, library) = (command_path()?, found.display());
        bail!(WrongUse::of(format!(
            "'{}' is of release {RELEASE}, and the library '{library}' of release {release}; install both from one \
             release, or give --library",
            command.display()
        )));
    }
    Ok(found)
}

/// Checks the library that the option `option` names and returns its canonical path.
pub fn find_given(path: &Path, option: &str) -> Result<PathBuf> {
    if !path.is_file() {
        bail!(WrongUse::of(format!("no library '{}'; check {option}", path.display())));
    }
    let found = std::fs::canonicalize(path).with_context(|| format!("library '{}'", path.display()))?;
    check(&found, option)?;
    if elf::release(&found).is_none() {
        let what = "is a shared library, but not that of crosslane, so programs would have no lanes";
        bail!(WrongUse::of(format!("'{}' {what}; check {option}", found.display())));
    }
    Ok(found)
}

fn find_in_default_folders() -> Result<PathBuf> {
    let command = command_path()?;
    default_paths().into_iter().find(|path| path.is_file()).ok_or_else(|| {
        WrongUse::of(format!(
            "no {NAME} beside {} nor in ../lib/crosslane, /usr/local/lib/crosslane or /usr/lib/crosslane; install the \
             library too, or give --library",
            command.display()
        ))
        .into()
    })
}

/// Returns the paths at which the library may be, the preferred ones first.
pub fn default_paths() -> Vec<PathBuf> {
    let command = command_path().unwrap_or_default();
    let folder = command.parent().unwrap_or(Path::new("/"));
    let relative = RELATIVE_FOLDERS.iter().map(|relative| folder.join(relative));
    let folders = relative.chain(SYSTEM_FOLDERS.iter().map(PathBuf::from));
    folders.flat_map(|folder| LIB_FOLDERS.map(|lib| folder.join(lib).join(NAME))).collect()
}

fn command_path() -> Result<PathBuf> {
    std::env::current_exe().context("finding the path of this command")
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

/// How units and containers name the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoaderName {
    /// The name for LD_PRELOAD.
    pub name: String,
    /// The folder that a service needs.
    pub folder: PathBuf,
    /// The library itself.
    pub file: PathBuf,
}

/// Finds the library as [`find`] does, for the units of services.
///
/// # Errors
/// Those of [`find`], and wrong use for a path that a unit file cannot contain.
pub fn find_for_units(given: Option<&Path>) -> Result<LoaderName> {
    let library = find(given)?;
    if library.to_str().is_none_or(|path| path.contains(['"', '\'', '\\']) || path.contains(char::is_control)) {
        let shown = library.display();
        bail!(WrongUse::of(format!("library '{shown}' has a quote or a backslash in its path; move it")));
    }
    Ok(loader_name(&library, |lib| Path::new("/usr").join(lib).join("libc.so.6").exists()))
}

/// Returns the name that the documents use, `/usr/lib/crosslane/$LIB/libcrosslane.so`, if the library is installed for
/// glibc's loader. `is_of_loader` says whether the loader replaces `$LIB` by a folder.
fn loader_name(library: &Path, is_of_loader: impl Fn(&str) -> bool) -> LoaderName {
    let installed = LIB_FOLDERS.iter().filter(|lib| **lib != "." && is_of_loader(lib)).find_map(|lib| {
        let folder = library.to_str()?.strip_suffix(&format!("/{lib}/{NAME}"))?;
        (!folder.is_empty()).then(|| LoaderName {
            name: format!("{folder}/$LIB/{NAME}"),
            folder: folder.into(),
            file: library.to_owned(),
        })
    });
    installed.unwrap_or_else(|| LoaderName {
        name: preload_name(library).to_string_lossy().into_owned(),
        folder: library.parent().unwrap_or(Path::new("/")).to_owned(),
        file: library.to_owned(),
    })
}

fn check(path: &Path, option: &str) -> Result<()> {
    if !elf::is_library(path) {
        bail!(WrongUse::of(format!("'{}' is not a shared library for this machine; check {option}", path.display())));
    }
    // The loader splits LD_PRELOAD at these characters and has no way to quote them (ld.so(8)).
    if path.to_string_lossy().contains([' ', ':', '\t', '\n']) {
        let shown = path.display();
        let what = "contains a blank or a colon, which LD_PRELOAD cannot contain; move the library";
        bail!(WrongUse::of(format!("'{shown}' {what}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_library_is_named_by_the_folder_of_the_loader() {
        let name = |path: &str| loader_name(Path::new(path), |lib| lib == "lib/x86_64-linux-gnu");
        let installed = name("/usr/lib/crosslane/lib/x86_64-linux-gnu/libcrosslane.so");
        assert_eq!(installed.name, "/usr/lib/crosslane/$LIB/libcrosslane.so");
        assert_eq!(installed.folder, Path::new("/usr/lib/crosslane"));
        for other in ["/opt/lib64/libcrosslane.so", "/opt/libcrosslane.so", "/lib/x86_64-linux-gnu/libcrosslane.so"] {
            let plain = name(other);
            assert_eq!(plain.name, preload_name(Path::new(other)).to_string_lossy());
            assert_eq!(Some(plain.folder.as_path()), Path::new(other).parent());
        }
    }
}
