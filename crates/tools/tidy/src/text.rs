//! Checks of lines, whatever the language.

use crate::{LINE_COLUMNS_MAX, Source, Violation};

/// Returns blanks at the ends of lines, tabs, and lines that are too wide.
pub fn check(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let number = index + 1;
        if line.ends_with([' ', '\t', '\r']) {
            violations.push(source.violation(number, "blanks at the end of the line"));
        }
        if line.contains('\t') {
            violations.push(source.violation(number, "a tab: indent with spaces, write \\t in a string"));
        }
        let columns = line.chars().count();
        if columns > LINE_COLUMNS_MAX && is_code(source) {
            violations.push(
                source.violation(number, format!("{columns} columns, at most {LINE_COLUMNS_MAX}: break the line")),
            );
        }
    }
    if !source.text.is_empty() && !source.text.ends_with('\n') {
        violations.push(source.violation(source.text.lines().count(), "no newline at the end of the file"));
    }
    violations
}

/// Prose may be wider than code, because a table of Markdown has no other way.
fn is_code(source: &Source) -> bool {
    !matches!(source.extension(), "md" | "toml")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    fn check_text(path: &str, text: &str) -> String {
        report(&check(&Source::new(path, text)))
    }

    #[test]
    fn blanks_at_the_end_and_tabs_are_found_in_every_language() {
        let text = "fine\nblank \n\ttab\nlast";
        let expected = "F:2: blanks at the end of the line\n\
                        F:3: a tab: indent with spaces, write \\t in a string\n\
                        F:4: no newline at the end of the file\n";
        for path in ["a.rs", "a.md", "a.sh", "a.c", "x"] {
            assert_eq!(check_text(path, text), expected.replace('F', path));
        }
    }

    #[test]
    fn a_line_of_code_has_120_columns_at_most_counted_in_characters() {
        let fits = "é".repeat(120) + "\n";
        let wide = "é".repeat(121) + "\n";
        assert_eq!(check_text("a.rs", &fits), "");
        assert_eq!(check_text("a.rs", &wide), "a.rs:1: 121 columns, at most 120: break the line\n");
        assert_eq!(check_text("a.md", &wide), "", "prose may have wide tables");
    }
}
