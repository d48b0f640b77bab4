//! Checks of `Cargo.toml`.

use crate::{Source, Violation};

/// Checks that a package names its licence and inherits the workspace's lints.
pub fn check(source: &Source) -> Vec<Violation> {
    let sections = Sections::of(&source.text);
    let mut violations = Vec::new();
    if !sections.has_section("package") {
        return violations; // a workspace alone
    }
    if !sections.has("package", |key| key == "license" || key == "license.workspace") {
        violations.push(source.violation(1, "no licence: write license.workspace = true under [package]"));
    }
    // A workspace of its own, as fuzzing needs, cannot inherit.
    let is_separate = sections.has_section("workspace");
    if !is_separate && !sections.has("lints", |key| key == "workspace") {
        violations.push(source.violation(1, "no lints: write [lints] with workspace = true"));
    }
    violations
}

/// The keys of a manifest with their section: as much of TOML as the manifests use.
struct Sections<'a> {
    keys: Vec<(&'a str, &'a str)>,
    headers: Vec<&'a str>,
}

impl<'a> Sections<'a> {
    fn of(text: &'a str) -> Self {
        let mut sections = Self { keys: Vec::new(), headers: Vec::new() };
        let mut section = "";
        for line in text.lines().map(str::trim) {
            if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                section = header;
                sections.headers.push(header);
            } else if let Some((key, _)) = line.split_once('=') {
                sections.keys.push((section, key.trim()));
            }
        }
        sections
    }

    fn has_section(&self, header: &str) -> bool {
        self.headers.contains(&header)
    }

    fn has(&self, section: &str, is_key: impl Fn(&str) -> bool) -> bool {
        self.keys.iter().any(|(found, key)| *found == section && is_key(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    fn check_text(text: &str) -> String {
        report(&check(&Source::new("Cargo.toml", text)))
    }

    #[test]
    fn a_package_without_licence_and_lints_is_found() {
        assert_eq!(
            check_text("[package]\nname = \"a\"\n[dependencies]\nworkspace = true\n"),
            "Cargo.toml:1: no licence: write license.workspace = true under [package]\n\
             Cargo.toml:1: no lints: write [lints] with workspace = true\n"
        );
    }

    #[test]
    fn a_package_with_both_is_fine() {
        assert_eq!(check_text("[package]\nlicense.workspace = true\n\n[lints]\nworkspace = true\n"), "");
    }

    #[test]
    fn a_workspace_is_no_package_and_a_package_that_is_a_workspace_has_its_own_lints() {
        assert_eq!(check_text("[workspace]\nmembers = []\n"), "");
        assert_eq!(check_text("[package]\nlicense = \"Apache-2.0\"\n[workspace]\n"), "");
    }
}
