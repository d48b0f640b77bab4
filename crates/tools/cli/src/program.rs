//! Finds the program to run, and whether its sockets can use lanes.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::elf::{self, Kind};
use crate::wrong_use::WrongUse;

/// Number of nested script interpreters that are followed, as many as the kernel follows.
const SCRIPTS_MAX: usize = 5;
/// Number of bytes that the kernel reads of the first line of a script.
const SCRIPT_LINE_BYTES: usize = 256;
const PATH_DEFAULT: &str = "/usr/local/bin:/usr/bin:/bin";
const MODE_SETUID: u32 = 0o4000;
const MODE_SETGID: u32 = 0o2000;
const MODE_GROUP_EXECUTE: u32 = 0o010;

/// Why a program's sockets stay on the kernel path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Statically linked: it has no loader.
    Static(PathBuf),
    /// Linked against another C library, with the loader named here.
    OtherLoader(PathBuf, String),
    /// A Go program, which makes system calls without the C library.
    Go(PathBuf),
    /// Built for another processor or word size.
    OtherMachine(PathBuf),
    /// Setuid, setgid or with file capabilities: the loader ignores libraries named in the environment.
    Privileged(PathBuf, &'static str),
    /// Neither an ELF program nor a script.
    Unknown(PathBuf),
}

impl Obstacle {
    /// Returns whether the loader would warn about Crosslane's library, or fail because of it.
    pub fn rejects_library(&self) -> bool {
        matches!(self, Self::OtherLoader(..) | Self::OtherMachine(_))
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(path) => {
                write!(formatter, "{} is statically linked and loads no library; link it dynamically", path.display())
            }
            Self::OtherLoader(path, loader) => {
                write!(formatter, "{} uses the loader {loader}, not glibc's; use a glibc build of it", path.display())
            }
            Self::Go(path) => write!(
                formatter,
                "{} is a Go program, which makes system calls without the C library; it can use only kernel TCP",
                path.display()
            ),
            Self::OtherMachine(path) => write!(
                formatter,
                "{} is built for another processor or word size; use a build for {}",
                path.display(),
                std::env::consts::ARCH
            ),
            Self::Privileged(path, what) => write!(
                formatter,
                "{} {what}, so the loader ignores LD_PRELOAD; run a copy without it, or run it as its owner",
                path.display()
            ),
            Self::Unknown(path) => {
                write!(formatter, "{} is damaged or of an unknown kind; use an ELF program or a script", path.display())
            }
        }
    }
}

/// Returns the file that `name` means: `name` itself if it contains a slash, otherwise the first executable in PATH.
///
/// # Errors
/// [`WrongUse`], if there is no such program.
pub fn resolve(name: &OsStr, search: Option<&OsStr>) -> Result<PathBuf> {
    find(name, search).map_err(|error| WrongUse::of(error).into())
}

fn find(name: &OsStr, search: Option<&OsStr>) -> Result<PathBuf> {
    let shown = name.to_string_lossy();
    if name.is_empty() {
        bail!("the program's name is empty; give a program to run");
    }
    if name.as_bytes().contains(&b'/') {
        return check_executable(Path::new(name)).map(|()| PathBuf::from(name));
    }
    let search = search.filter(|search| !search.is_empty()).unwrap_or(OsStr::new(PATH_DEFAULT));
    let candidates: Vec<PathBuf> = std::env::split_paths(search).map(|folder| folder.join(name)).collect();
    if let Some(found) = candidates.iter().find(|candidate| check_executable(candidate).is_ok()) {
        return Ok(found.clone());
    }
    match candidates.iter().find(|candidate| candidate.is_file()) {
        Some(candidate) => bail!("{}: not executable; chmod +x it", candidate.display()),
        None => bail!("no program '{shown}' in PATH; install it or give its path"),
    }
}

fn check_executable(path: &Path) -> Result<()> {
    let shown = path.display();
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!("no program '{shown}'; check the path"),
        Err(error) => bail!("program '{shown}': {error}; check the path"),
        Ok(found) if found.is_dir() => bail!("'{shown}' is a directory; give a program to run"),
        Ok(found) if !found.is_file() => bail!("'{shown}' is not a regular file; give a program to run"),
        Ok(_) => {}
    }
    match rustix::fs::access(path, rustix::fs::Access::EXEC_OK) {
        Ok(()) => Ok(()),
        Err(_) => bail!("{shown}: not executable; chmod +x it"),
    }
}

/// Returns why the program at `path`, or its interpreter if it is a script, cannot use lanes. `None` if it can.
pub fn obstacle(path: &Path, search: Option<&OsStr>) -> Option<Obstacle> {
    let mut path = path.to_owned();
    for _ in 0..SCRIPTS_MAX {
        // For a program that may be executed but not read, the loader decides.
        let kind = elf::inspect(&path).ok()?;
        if kind != Kind::NotElf {
            return obstacle_of_elf(&path, kind);
        }
        match script_interpreter(&path, search) {
            Some(interpreter) => path = interpreter,
            None => return Some(Obstacle::Unknown(path)),
        }
    }
    Some(Obstacle::Unknown(path))
}

fn obstacle_of_elf(path: &Path, kind: Kind) -> Option<Obstacle> {
    let path = path.to_owned();
    match kind {
        Kind::Dynamic => privilege(&path).map(|what| Obstacle::Privileged(path, what)),
        Kind::Static => Some(Obstacle::Static(path)),
        Kind::OtherLoader(loader) => Some(Obstacle::OtherLoader(path, loader)),
        Kind::Go => Some(Obstacle::Go(path)),
        Kind::OtherMachine => Some(Obstacle::OtherMachine(path)),
        Kind::NotElf | Kind::Damaged => Some(Obstacle::Unknown(path)),
    }
}

/// Returns what makes the kernel run the program in secure-execution mode (ld.so(8)), in which the loader ignores
/// LD_PRELOAD.
fn privilege(path: &Path) -> Option<&'static str> {
    let found = std::fs::metadata(path).ok()?;
    if changes_user(&found) {
        return Some("is setuid");
    }
    if changes_group(&found) {
        return Some("is setgid");
    }
    let mut value = [0u8; 64];
    let capable = rustix::fs::getxattr(path, c"security.capability", &mut value).is_ok();
    (capable && !rustix::process::getuid().is_root()).then_some("has file capabilities")
}

fn changes_user(found: &Metadata) -> bool {
    found.mode() & MODE_SETUID != 0 && found.uid() != rustix::process::getuid().as_raw()
}

/// Returns whether the program is setgid for another group. Without the group execute bit, the setgid bit means
/// mandatory locking and changes no group (inode(7)).
fn changes_group(found: &Metadata) -> bool {
    let set = found.mode() & MODE_SETGID != 0 && found.mode() & MODE_GROUP_EXECUTE != 0;
    set && found.gid() != rustix::process::getgid().as_raw()
}

/// Returns the interpreter that the first line of a script names; for `env`, the program that `env` would run. A file
/// without such a line is run by the shell.
fn script_interpreter(path: &Path, search: Option<&OsStr>) -> Option<PathBuf> {
    let start = elf::read_start(&File::open(path).ok()?, SCRIPT_LINE_BYTES).ok()?;
    let line = start.split(|byte| *byte == b'\n').next()?;
    let Some(line) = line.strip_prefix(b"#!") else {
        // The shell refuses files that look binary.
        return (!start.is_empty() && !line.contains(&0)).then(|| PathBuf::from("/bin/sh"));
    };
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let interpreter = Path::new(OsStr::from_bytes(words.next()?)).to_owned();
    if interpreter.file_name() != Some(OsStr::new("env")) {
        return Some(interpreter);
    }
    let is_setting = |word: &&[u8]| word.starts_with(b"-") || word.contains(&b'=');
    let name = words.find(|word| !is_setting(word))?;
    resolve(&OsString::from(OsStr::from_bytes(name)), search).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(folder: &Path, name: &str, text: &[u8]) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn scripts_are_followed_to_their_interpreter() {
        let folder = tempfile::tempdir().unwrap();
        let search = std::env::split_paths("/usr/bin:/bin").collect::<Vec<_>>();
        let search = std::env::join_paths(search).unwrap();
        let interpreter = |text: &[u8]| script_interpreter(&script(folder.path(), "s", text), Some(&search));
        assert_eq!(interpreter(b"#!/bin/sh\n"), Some("/bin/sh".into()));
        assert_eq!(interpreter(b"#! /bin/sh -e -x"), Some("/bin/sh".into()));
        assert_eq!(interpreter(b"echo plain\n"), Some("/bin/sh".into()));
        let found = interpreter(b"#!/usr/bin/env -S A=1 sh -e\n").unwrap();
        assert_eq!(found.file_name(), Some(OsStr::new("sh")));
        for text in [&b""[..], b"#!", b"#!   \n", b"\0\x01binary", b"#!/usr/bin/env no-such-program-here"] {
            assert_eq!(interpreter(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_script_that_is_its_own_interpreter_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loop");
        let path = script(folder.path(), "loop", format!("#!{}\n", path.display()).as_bytes());
        assert_eq!(obstacle(&path, None), Some(Obstacle::Unknown(path)));
    }

    #[test]
    fn the_shell_has_no_obstacle() {
        assert_eq!(obstacle(Path::new("/bin/sh"), None), None);
    }

    #[test]
    fn errors_name_the_program_and_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let plain = script(folder.path(), "plain", b"text");
        std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = |name: &OsStr| {
            let error = resolve(name, Some(folder.path().as_os_str())).unwrap_err();
            assert!(error.is::<WrongUse>(), "{error}");
            error.to_string()
        };
        assert_eq!(error("plain".as_ref()), format!("{}: not executable; chmod +x it", plain.display()));
        assert_eq!(error("absent".as_ref()), "no program 'absent' in PATH; install it or give its path");
        assert_eq!(error("/no/such".as_ref()), "no program '/no/such'; check the path");
        assert_eq!(error("/".as_ref()), "'/' is a directory; give a program to run");
        assert!(error("".as_ref()).contains("is empty"));
        assert!(error("/dev/null".as_ref()).contains("not a regular file"));
    }
}
