//! Running the built command, and what its errors look like.

use std::process::{Command, Output};

/// The built command.
pub const CROSSLANE: &str = env!("CARGO_BIN_EXE_crosslane");

/// Runs it.
pub fn crosslane(arguments: &[&str]) -> Output {
    Command::new(CROSSLANE).args(arguments).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The single line of stderr.
pub fn error_line(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text:?}");
    assert!(text.starts_with("crosslane: "), "{text:?}");
    text.trim_end().to_owned()
}

#[track_caller]
pub fn assert_fails(output: &Output, code: i32, words: &[&str]) {
    let line = error_line(output);
    assert_eq!(output.status.code(), Some(code), "{line}");
    for word in words {
        assert!(line.contains(word), "{word:?} in {line:?}");
    }
    assert_eq!(stdout(output), "");
}
