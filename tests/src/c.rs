//! C programs of the tests, built with the machine's compiler.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use tempfile::TempDir;

use crate::{Process, paths};

const COMPILE_LIMIT: Duration = Duration::from_secs(300);
/// Warnings are disabled where the suite misuses calls on purpose.
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

/// The suite of socket semantics, built once per test run.
pub fn semantics() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("semantics", &semantics_sources(), &SEMANTICS_FLAGS))
}

fn semantics_sources() -> Vec<PathBuf> {
    let folder = paths::package_file("c");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("an entry of the folder").path());
    let mut sources: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|end| end == "c")).collect();
    sources.sort();
    sources
}

/// Builds a program from sources. Tests that build the same program at once use separate temporary folders, so none
/// sees an incomplete program.
pub fn build(name: &str, sources: &[PathBuf], flags: &[&str]) -> PathBuf {
    let program = paths::built().join(name);
    let folder = unfinished_folder();
    let unfinished = folder.path().join(name);
    let mut command = Command::new(paths::tool("cc"));
    command.args(flags).arg("-o").arg(&unfinished).args(sources);
    Process::start(&mut command).wait(COMPILE_LIMIT).must_succeed();
    std::fs::rename(&unfinished, &program).unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    program
}

/// Builds a program from one source text.
pub fn build_text(name: &str, text: &str, flags: &[&str]) -> PathBuf {
    let folder = unfinished_folder();
    let source = folder.path().join(format!("{name}.c"));
    std::fs::write(&source, text).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
    build(name, &[source], flags)
}

/// A private folder on the file system of the finished programs, so that a rename publishes a program atomically.
fn unfinished_folder() -> TempDir {
    let folder = paths::built();
    tempfile::tempdir_in(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_build_one_program_at_once_all_get_it() {
        let builds: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    let program = build_text("built-at-once", "int main(void) { return 3; }", &[]);
                    Process::start(&mut Command::new(program)).wait(COMPILE_LIMIT).must_exit_with(3);
                })
            })
            .collect();
        builds.into_iter().for_each(|build| build.join().expect("a program"));
    }
}
