//! Checks of the library's copies on this machine, and of those that the programs of the rack run with.

use std::fs;
use std::path::{Path, PathBuf};

use super::Check;
use crate::processes::program::{Library, folder_identity};
use crate::processes::{Processes, Program};
use crate::{elf, library};

/// The file with libraries that the loader loads into every program (ld.so(8)).
const PRELOAD_FILE: &str = "/etc/ld.so.preload";

/// Returns all checks. `found` is the library that `crosslane run` loads, if there is one.
pub fn checks(found: Option<&Path>, rack: &Path) -> Vec<Check> {
    let variable = std::env::var("LD_PRELOAD").unwrap_or_default();
    let file = fs::read_to_string(PRELOAD_FILE).unwrap_or_default();
    vec![other_copies(found, &copies(library::default_paths())), preloaded(&variable, &file), programs(found, rack)]
}

/// A copy of the library and its release.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Copy {
    path: PathBuf,
    release: String,
}

fn release(path: &Path) -> String {
    elf::release(path).unwrap_or_else(|| "unknown".to_owned())
}

fn copies(paths: Vec<PathBuf>) -> Vec<Copy> {
    let mut paths: Vec<PathBuf> = paths.into_iter().filter_map(|path| fs::canonicalize(path).ok()).collect();
    paths.sort();
    paths.dedup();
    paths.into_iter().map(|path| Copy { release: release(&path), path }).collect()
}

fn other_copies(found: Option<&Path>, copies: &[Copy]) -> Check {
    let others: Vec<&Copy> = copies.iter().filter(|copy| Some(copy.path.as_path()) != found).collect();
    let shown: Vec<String> =
        others.iter().map(|copy| format!("{} (release {})", copy.path.display(), copy.release)).collect();
    let own = found.map(release);
    match own {
        _ if others.is_empty() => Check::ok("other libraries", "none"),
        Some(own) if others.iter().all(|copy| copy.release == own) => Check::ok("other libraries", shown.join(", ")),
        _ => {
            let remedy = "remove what you do not use: programs with different releases may use kernel TCP between them";
            Check::note("other libraries", shown.join(", "), remedy)
        }
    }
}

/// Checks the library's copies that the environment or the loader's file loads without `crosslane run`.
fn preloaded(variable: &str, file: &str) -> Check {
    let named = |text: &str| -> Vec<String> {
        let words = text.split(|letter: char| letter == ':' || letter.is_whitespace());
        words.filter(|word| word.ends_with("libcrosslane.so")).map(str::to_owned).collect()
    };
    let names = [named(variable), named(file)].concat();
    // The loader replaces $LIB itself.
    let missing: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| !name.contains('$') && !Path::new(name).is_file()).collect();
    if !missing.is_empty() {
        let remedy = format!("correct LD_PRELOAD or {PRELOAD_FILE}: programs start without lanes, with a warning");
        return Check::note("preloaded", format!("no file {}", missing.join(", ")), remedy);
    }
    Check::ok(
        "preloaded",
        if names.is_empty() { "nothing, apart from crosslane run".to_owned() } else { names.join(", ") },
    )
}

/// Checks the libraries that the programs of the rack run with: an upgrade replaces the file, not what is loaded.
fn programs(found: Option<&Path>, rack: &Path) -> Check {
    let (Some(rack), Ok(processes)) = (folder_identity(rack), Processes::scan()) else {
        return Check::ok("programs", "none in this rack");
    };
    let members: Vec<&Program> = processes.all().filter(|program| program.rack_identity() == Some(rack)).collect();
    let own = found.map(release);
    let outdated = members.iter().filter_map(|program| {
        let why = difference(program.library.as_ref()?, own.as_deref())?;
        Some(format!("{} {} ({why})", program.name, program.pid))
    });
    let outdated: Vec<String> = outdated.collect();
    if !outdated.is_empty() {
        let remedy = "restart them to use the installed library; until then they continue with theirs";
        return Check::note("programs", outdated.join(", "), remedy);
    }
    Check::ok("programs", format!("{} in this rack, none with another library", members.len()))
}

/// Returns how the library of a program differs from that of release `own`.
fn difference(library: &Library, own: Option<&str>) -> Option<String> {
    let path = library.path.display();
    match &library.release {
        None => Some(format!("its library {path} was replaced")),
        Some(release) => own.is_some_and(|own| own != release).then(|| format!("{path} of release {release}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn copies_of_other_releases_are_named() {
        let copy = |path: &str, release: &str| Copy { path: path.into(), release: release.to_owned() };
        assert_eq!(other_copies(None, &[]).status, Status::Ok);
        let check = other_copies(Some(Path::new("/a/libcrosslane.so")), &[copy("/usr/lib/libcrosslane.so", "0.0.9")]);
        assert_eq!((check.status, check.found.as_str()), (Status::Note, "/usr/lib/libcrosslane.so (release 0.0.9)"));
    }

    #[test]
    fn a_preloaded_library_that_is_missing_is_named() {
        assert_eq!(preloaded("/x/libasan.so", "").status, Status::Ok);
        assert_eq!(preloaded("/usr/$LIB/../libcrosslane.so", "").status, Status::Ok);
        let check = preloaded("/x.so:/no/libcrosslane.so", "");
        assert_eq!((check.status, check.found.as_str()), (Status::Note, "no file /no/libcrosslane.so"));
        assert_eq!(preloaded("", "/no/libcrosslane.so\n").status, Status::Note);
    }

    #[test]
    fn a_library_that_was_replaced_or_is_of_another_release_is_named() {
        let library = |release: Option<&str>| Library { path: "/l.so".into(), release: release.map(str::to_owned) };
        assert_eq!(difference(&library(None), Some("1")).unwrap(), "its library /l.so was replaced");
        assert_eq!(difference(&library(Some("2")), Some("1")).unwrap(), "/l.so of release 2");
        assert_eq!(difference(&library(Some("1")), Some("1")), None);
        assert_eq!(difference(&library(Some("1")), None), None);
    }
}
