//! Finds the files of the repository.

use std::io;
use std::path::{Path, PathBuf};

use crate::Source;

/// Folders without sources: build outputs, and what a fuzzer found.
const FOLDERS_SKIPPED: [&str; 3] = ["target", "corpus", "artifacts"];

/// Scripts without an extension.
const SCRIPTS: [&str; 2] = ["x", ".ci/run"];

/// Returns the root of the repository, three folders above this crate.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Returns all files below `root` that are checked, by path.
pub fn sources(root: &Path) -> io::Result<Vec<Source>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in root.join(&folder).read_dir()? {
            let entry = entry?;
            let relative = folder.join(entry.file_name());
            let Some(path) = relative.to_str() else {
                continue;
            };
            let kind = entry.file_type()?;
            if kind.is_dir() && is_entered(path) {
                folders.push(relative);
            } else if kind.is_file() && is_checked(path) {
                files.push(Source::new(path, std::fs::read_to_string(entry.path())?));
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Returns whether a folder is searched. Hidden ones belong to tools, except that of continuous integration.
fn is_entered(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    !FOLDERS_SKIPPED.contains(&name) && (name == ".ci" || !name.starts_with('.'))
}

fn is_checked(path: &str) -> bool {
    let extension = Source::new(path, "").extension().to_owned();
    SCRIPTS.contains(&path) || matches!(extension.as_str(), "rs" | "md" | "sh" | "c" | "h" | "toml" | "py")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_scripts_and_prose_are_checked_and_outputs_are_not() {
        let checked = ["x", ".ci/run", "README.md", "a/b.rs", "a/b.c", "a/b.h", "a/b.sh", "a/Cargo.toml", "a/b.py"];
        let unchecked = ["Cargo.lock", "LICENSE", "a/x", "plot.svg", "result.json"];
        assert!(checked.into_iter().all(is_checked));
        assert!(!unchecked.into_iter().any(is_checked));
    }

    #[test]
    fn outputs_and_folders_of_tools_are_not_entered() {
        assert!(["crates", "tests/c", ".ci", "docs/results", "fuzz/fuzz_targets"].into_iter().all(is_entered));
        assert!(!["target", ".git", "fuzz/corpus"].into_iter().any(is_entered));
    }

    #[test]
    fn the_root_is_the_folder_of_the_workspace() {
        let sources = sources(&root()).expect("the repository is readable");
        let has = |path: &str| sources.iter().any(|source| source.path == path);
        assert!(has("x") && has("STYLE.md") && has("crates/tools/tidy/src/tree.rs"));
        assert!(sources.iter().all(|source| !source.path.starts_with("target/")));
    }
}
