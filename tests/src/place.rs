//! Where things are.

use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn repository() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("the package lies in the repository").to_owned()
}

/// A file of this package.
pub fn package_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Cargo's target directory.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

/// Where this package puts what it builds.
pub fn built() -> PathBuf {
    let folder = target().join("system-tests");
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// The release build of the command, with the library beside it.
pub fn crosslane() -> PathBuf {
    release_file("crosslane")
}

/// The release build of the library.
pub fn library() -> PathBuf {
    release_file("libcrosslane.so")
}

fn release_file(name: &str) -> PathBuf {
    let path = target().join("release").join(name);
    assert!(path.is_file(), "no {}: run './x build' (or './x test') first", path.display());
    path
}

/// A program that the tests need, by its name in PATH or where Debian keeps servers.
pub fn tool(name: &str) -> PathBuf {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&search).chain(["/usr/sbin", "/usr/bin"].map(PathBuf::from));
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no program '{name}': './x test' installs what the tests need"))
}
