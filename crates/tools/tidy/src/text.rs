//! Checks of lines, whatever the language.

use crate::{LINE_COLUMNS_MAX, Offence, Source};

/// Blanks at the end of a line, tabs, and lines that are too wide.
pub fn check(source: &Source) -> Vec<Offence> {
    let mut offences = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let number = index + 1;
        if line.ends_with([' ', '\t', '\r']) {
            offences.push(source.offence(number, "blanks at the end of the line"));
        }
        if line.contains('\t') {
            offences.push(source.offence(number, "a tab: indent with spaces, write \\t in a string"));
        }
        let columns = line.chars().count();
        if columns > LINE_COLUMNS_MAX && is_code(source) {
            offences
                .push(source.offence(number, format!("{columns} columns, at most {LINE_COLUMNS_MAX}: break the line")));
        }
    }
    if !source.text.is_empty() && !source.text.ends_with('\n') {
        offences.push(source.offence(source.text.lines().count(), "no newline at the end of the file"));
    }
    offences
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
