//! The version of a release is in one place.

use std::fs;

use tidy::{Source, tree};

/// Files that have to name the version, or that cargo writes.
const EXEMPT: [&str; 4] = ["Cargo.toml", "Cargo.lock", "fuzz/Cargo.lock", "CHANGELOG.md"];
/// Files of the packages that no other check reads.
const PACKAGING: [&str; 4] =
    ["scripts/package", "scripts/crosslane_lane.pc", "scripts/debian/control", "scripts/debian/copyright"];

/// Returns the lines of a text that contain `version`, and not as a part of another number.
fn lines_with<'a>(text: &'a str, version: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_number = |letter: char| letter.is_ascii_digit() || letter == '.';
    let is_whole = move |line: &str| {
        line.match_indices(version).any(|(at, _)| {
            let (before, after) = (&line[..at], line[at + version.len()..].trim_end_matches('.'));
            !before.ends_with(is_number) && !after.starts_with(is_number)
        })
    };
    text.lines().enumerate().filter(move |(_, line)| is_whole(line)).map(|(index, _)| index + 1)
}

#[test]
fn only_the_manifest_of_the_workspace_has_the_version() {
    let sources = tree::sources(&tree::root()).expect("the repository is readable");
    let manifest = sources.iter().find(|source| source.path == "Cargo.toml").expect("the workspace");
    let (_, version) = manifest.text.split_once("\nversion = \"").expect("a version");
    let version = version.split('"').next().expect("its end");
    assert_eq!(lines_with(&manifest.text, version).count(), 1, "Cargo.toml names {version} twice");
    let others = sources.iter().filter(|source| !EXEMPT.contains(&source.path.as_str()));
    let templates = PACKAGING.map(|path| {
        let text = fs::read_to_string(tree::root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        Source::new(path, text)
    });
    let repeated: Vec<String> = others
        .chain(&templates)
        .flat_map(|source| lines_with(&source.text, version).map(|line| format!("{}:{line}", source.path)))
        .collect();
    assert!(repeated.is_empty(), "these repeat the version {version} of Cargo.toml: {}", repeated.join(", "));
}

#[test]
fn a_version_within_another_number_is_none() {
    let text = "10.1.2\n1.2.34\n1.2.3.4\nv1.2.3.\nx 1.2.3\"\n";
    assert_eq!(lines_with(text, "1.2.3").collect::<Vec<_>>(), [4, 5]);
}
