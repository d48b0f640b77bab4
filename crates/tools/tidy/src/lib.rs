//! Checks the rules of `STYLE.md` that a program can check.
//!
//! A check is a function from one [`Source`] to its [`Violation`]s, with a test beside it on a small bad example.
//! The test `tests/tree.rs` runs all of them over the repository; `tests/links.rs` follows the links between documents,
//! and `tests/layers.rs` the dependencies between crates.
//!
//! - [`text`]: width of lines, tabs, trailing blanks.
//! - [`rust`]: which crates contain `unsafe`, and which atomics the lane uses.
//! - [`c`]: the length of C functions.
//! - [`manifest`]: licence and lints of each `Cargo.toml`.
//!
//! Clippy checks the length of Rust functions, ignored tests and unfinished code (`[workspace.lints]`, `clippy.toml`).

pub mod c;
pub mod manifest;
pub mod rust;
pub mod text;
pub mod tree;

use std::fmt;

/// Maximum number of lines of a C function, from its name to its closing brace.
pub const FUNCTION_LINES_MAX: usize = 70;

/// Maximum number of columns of a line of code.
pub const LINE_COLUMNS_MAX: usize = 120;

/// A file of the repository: its path from the root, with `/`, and its text.
#[derive(Clone, Debug)]
pub struct Source {
    /// Path from the root of the repository.
    pub path: String,
    /// The whole text.
    pub text: String,
}

impl Source {
    /// Creates a source from its path and its text.
    pub fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        Self { path: path.into(), text: text.into() }
    }

    /// Returns what follows the last dot of the file's name; empty without one.
    pub fn extension(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        name.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    /// Returns the crate that the file belongs to, named after its folder: `lane` of `crates/sockets/lane/src/lib.rs`.
    pub fn crate_name(&self) -> &str {
        let mut parts = self.path.split('/');
        match parts.next() {
            Some("crates") => parts.nth(1).unwrap_or_default(), // after the layer's folder
            Some("tests") => "system-tests",
            Some(top) => top,
            None => "",
        }
    }

    fn violation(&self, line: usize, what: impl Into<String>) -> Violation {
        Violation { path: self.path.clone(), line, what: what.into() }
    }
}

/// A place that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path from the root of the repository.
    pub path: String,
    /// Line, from 1.
    pub line: usize,
    /// What is wrong there, and the remedy.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Returns all violations in a file, by line.
pub fn check(source: &Source) -> Vec<Violation> {
    let mut violations = text::check(source);
    match source.extension() {
        "rs" => violations.extend(rust::check(source)),
        "c" | "h" => violations.extend(c::check(source)),
        "toml" if source.path.ends_with("Cargo.toml") => violations.extend(manifest::check(source)),
        _ => {}
    }
    violations.sort();
    violations
}

/// Returns the violations as text, one per line.
pub fn report(violations: &[Violation]) -> String {
    violations.iter().map(|violation| format!("{violation}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_crate_of_its_folder() {
        assert_eq!(Source::new("crates/sockets/lane/src/ring.rs", "").crate_name(), "lane");
        assert_eq!(Source::new("tests/tests/redis.rs", "").crate_name(), "system-tests");
        assert_eq!(Source::new("fuzz/fuzz_targets/lane.rs", "").crate_name(), "fuzz");
    }

    #[test]
    fn an_extension_is_what_follows_the_last_dot_of_the_name() {
        assert_eq!(Source::new("crates/lane.d/x", "").extension(), "");
        assert_eq!(Source::new("a/b.tar.gz", "").extension(), "gz");
    }

    #[test]
    fn all_checks_of_a_file_come_in_one_report_by_line() {
        let source = Source::new("crates/sockets/lane/src/lib.rs", "fn f() { \n\tg()\n}\n");
        assert_eq!(
            report(&check(&source)),
            "crates/sockets/lane/src/lib.rs:1: blanks at the end of the line\n\
             crates/sockets/lane/src/lib.rs:2: a tab: indent with spaces, write \\t in a string\n"
        );
    }
}
