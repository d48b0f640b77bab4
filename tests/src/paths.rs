//! Paths of the repository, of built programs and of installed tools.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
pub fn repository() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("the package is in the repository").to_owned()
}

/// A file of this package.
pub fn package_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Cargo's target directory.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

/// The folder for programs that this package builds.
pub fn built() -> PathBuf {
    let folder = target().join("system-tests");
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// The release build of the command, in the folder of the library.
pub fn crosslane() -> PathBuf {
    release_file("crosslane")
}

/// The library that programs load: `CROSSLANE_TEST_LIBRARY`, or that of the release build.
pub fn library() -> PathBuf {
    library_of_environment().unwrap_or_else(|| release_file("libcrosslane.so"))
}

/// The library that `CROSSLANE_TEST_LIBRARY` names in place of the installed one, for runs of a suite with another.
pub fn library_of_environment() -> Option<PathBuf> {
    std::env::var_os("CROSSLANE_TEST_LIBRARY").map(PathBuf::from)
}

/// A library of an earlier release, which `tests/frozen` keeps compressed.
pub fn frozen_library(name: &str) -> PathBuf {
    let kept = package_file("frozen").join(name).with_extension("so.xz");
    let content = Command::new(tool("xz")).args(["--decompress", "--stdout"]).arg(&kept).output().expect("xz");
    assert!(content.status.success() && !content.stdout.is_empty(), "{}", kept.display());
    let folder = built().join(name);
    fs::create_dir_all(&folder).expect("a folder");
    // Another test may load the library now.
    let path = folder.join("libcrosslane.so");
    let draft = tempfile::NamedTempFile::new_in(&folder).expect("a file").into_temp_path();
    fs::write(&draft, content.stdout).expect("room for a library");
    draft.persist(&path).expect("a file in the same folder");
    path
}

fn release_file(name: &str) -> PathBuf {
    let path = target().join("release").join(name);
    assert!(path.is_file(), "no {}: run './x build' (or './x test') first", path.display());
    path
}

/// A program that the tests need, found in PATH or in Debian's folders for servers.
pub fn tool(name: &str) -> PathBuf {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&search).chain(["/usr/sbin", "/usr/bin"].map(PathBuf::from));
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no program '{name}': './x test' installs what the tests need"))
}

/// The newest version of a PostgreSQL program, which Debian installs in a folder per version.
pub fn postgresql(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let programs = versions.map(|version| version.path().join("bin").join(name)).filter(|path| path.is_file());
    programs.max().unwrap_or_else(|| tool(name))
}

/// The system's python3, for which `./x test` installs the package of its tests; not a wrapper that a version manager
/// puts first in PATH.
pub fn python() -> PathBuf {
    let system = Path::new("/usr/bin/python3");
    if system.is_file() { system.to_owned() } else { tool("python3") }
}

/// Copies a program so that every user may run it, whatever the umask is. Another process copies, because children that
/// other tests start meanwhile would inherit a descriptor open for writing, and a file that is open for writing cannot
/// be executed.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new(tool("cp")).arg(from).arg(to).status();
    assert!(status.is_ok_and(|status| status.success()), "copying {} to {}", from.display(), to.display());
    fs::set_permissions(to, Permissions::from_mode(0o755)).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
}
