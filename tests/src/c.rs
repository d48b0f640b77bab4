//! C programs of the tests, built with the machine's compiler.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::{Process, place};

const COMPILE_LIMIT: Duration = Duration::from_secs(300);
/// Warnings off where the examination misuses calls on purpose.
const SEMANTICS_FLAGS: [&str; 12] = [
    "-O2",
    "-g",
    "-std=gnu17",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-stringop-overflow",
    "-Wno-stringop-overread",
    "-Wno-nonnull",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
];

/// The examination of socket semantics, built once a test run.
pub fn semantics() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("semantics", &semantics_sources(), &SEMANTICS_FLAGS))
}

fn semantics_sources() -> Vec<PathBuf> {
    let folder = place::package_file("c");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("an entry of the folder").path());
    let mut sources: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|end| end == "c")).collect();
    sources.sort();
    sources
}

/// Builds a program from sources. A run beside this one never sees half of it.
pub fn build(name: &str, sources: &[PathBuf], flags: &[&str]) -> PathBuf {
    let program = place::built().join(name);
    let unfinished = place::built().join(format!("{name}.{}", std::process::id()));
    let mut command = Command::new(place::tool("cc"));
    command.args(flags).arg("-o").arg(&unfinished).args(sources);
    Process::start(&mut command).wait(COMPILE_LIMIT).must_succeed();
    std::fs::rename(&unfinished, &program).unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    program
}

/// Builds a program from one source text.
pub fn build_text(name: &str, text: &str, flags: &[&str]) -> PathBuf {
    let source = place::built().join(format!("{name}.{}.c", std::process::id()));
    std::fs::write(&source, text).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
    let program = build(name, std::slice::from_ref(&source), flags);
    let _ = std::fs::remove_file(source);
    program
}
