//! Checks of C.

use crate::{FUNCTION_LINES_MAX, Source, Violation};

/// Returns the functions that are too long. A function begins at the last line at column 0 before its opening brace and
/// ends at the next `}` at column 0: that is how the repository's C is laid out.
pub fn check(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut head: Option<(usize, &str)> = None;
    for (index, line) in source.text.lines().enumerate() {
        if line.starts_with('}') {
            if let Some((start, name)) = head.take() {
                let lines = index - start + 1;
                if lines > FUNCTION_LINES_MAX {
                    let what = format!("{name} has {lines} lines, at most {FUNCTION_LINES_MAX}: split it");
                    violations.push(source.violation(start + 1, what));
                }
            }
        } else if let Some(name) = function_name(line) {
            head = Some((index, name));
        }
    }
    violations
}

/// Returns the name of the function that a line begins: `accept_one` of `static int accept_one(int fd)`. An indented
/// line, a comment, a directive and a prototype begin none.
fn function_name(line: &str) -> Option<&str> {
    let first = line.chars().next()?;
    if !(first.is_ascii_alphabetic() || first == '_') || line.trim_end().ends_with(';') {
        return None;
    }
    let (before, _) = line.split_once('(')?;
    let name = before.rsplit(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next()?;
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    fn function_of(lines: usize) -> String {
        format!("int prototype(void);\n\nstatic int *long_one(int fd)\n{{\n{}}}\n", "    work();\n".repeat(lines - 3))
    }

    #[test]
    fn a_c_function_has_70_lines_at_most() {
        assert_eq!(report(&check(&Source::new("a.c", function_of(70)))), "");
        assert_eq!(
            report(&check(&Source::new("a.c", function_of(71)))),
            "a.c:3: long_one has 71 lines, at most 70: split it\n"
        );
    }

    #[test]
    fn two_short_c_functions_are_not_one_long_one() {
        let text = function_of(40) + &function_of(40);
        assert_eq!(report(&check(&Source::new("a.c", text))), "");
    }
}
