//! Checks of the library's copies on this machine, and of those that the programs of the rack run with.

use std::fs;
use std::path::{Path, PathBuf};

use stats_page::reader::{PageError, read_rack};

use super::Check;
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
    let Ok(snapshot) = read_rack(rack) else { return Check::ok("programs", "none in this rack") };
    let is_foreign = |error: &PageError| matches!(error, PageError::Version { .. } | PageError::Layout);
    let foreign = snapshot.unreadable.iter().filter(|page| is_foreign(&page.error)).map(|page| page.name.clone());
    let mut outdated: Vec<String> = foreign.map(|pid| format!("process {pid} (another release)")).collect();
    let count = snapshot.processes.len() + outdated.len();
    for process in &snapshot.processes {
        let maps = fs::read_to_string(format!("/proc/{}/maps", process.pid)).unwrap_or_default();
        // Nothing is found in a process of another user, or of another PID namespace.
        if let Some(why) = mapped_library(&maps).and_then(|mapped| difference(&mapped, found)) {
            outdated.push(format!("{} {} ({why})", process.program, process.pid));
        }
    }
    if !outdated.is_empty() {
        let remedy = "restart them to use the installed library; until then they continue with theirs";
        return Check::note("programs", outdated.join(", "), remedy);
    }
    Check::ok("programs", format!("{count} in this rack, none with another library"))
}

/// Returns the name of Crosslane's library in a list of mappings (proc_pid_maps(5)).
fn mapped_library(maps: &str) -> Option<String> {
    let names = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    names.filter(|name| name.trim_end_matches(" (deleted)").ends_with("/libcrosslane.so")).map(str::to_owned).next()
}

fn difference(mapped: &str, found: Option<&Path>) -> Option<String> {
    if let Some(path) = mapped.strip_suffix(" (deleted)") {
        return Some(format!("its library {path} was replaced"));
    }
    let (theirs, own) = (release(Path::new(mapped)), found.map(release)?);
    (theirs != own).then(|| format!("{mapped} of release {theirs}"))
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
    fn a_replaced_library_of_a_program_is_found_in_its_mappings() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00000000 08:01 13 /opt/lib/libcrosslane.so (deleted)\n";
        let mapped = mapped_library(maps).unwrap();
        assert_eq!(difference(&mapped, None).unwrap(), "its library /opt/lib/libcrosslane.so was replaced");
        assert_eq!(mapped_library("7f00-7f01 r-xp 0 08:01 12 /usr/lib/libc.so.6\n"), None);
        let same = std::env::current_exe().unwrap();
        assert_eq!(difference(same.to_str().unwrap(), Some(&same)), None);
    }
}
