//! Runs the built command and checks its errors.

use std::process::{Command, Output};

/// Path of the built command.
pub const CROSSLANE: &str = env!("CARGO_BIN_EXE_crosslane");

/// Returns whether this user can make shared racks.
#[allow(dead_code, reason = "each test program includes this module")]
pub fn can_make_shared_racks() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: only root can make a shared rack");
    }
    is_root
}

/// Runs the command and returns its output.
pub fn crosslane(arguments: &[&str]) -> Output {
    Command::new(CROSSLANE).args(arguments).output().unwrap()
}

/// Returns standard output as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the single line on standard error.
pub fn error_line(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text:?}");
    assert!(text.starts_with("crosslane: "), "{text:?}");
    text.trim_end().to_owned()
}

/// Asserts an exit code, one line on standard error that contains `words`, and nothing on standard output.
#[track_caller]
pub fn assert_fails(output: &Output, code: i32, words: &[&str]) {
    let line = error_line(output);
    assert_eq!(output.status.code(), Some(code), "{line}");
    for word in words {
        assert!(line.contains(word), "{word:?} in {line:?}");
    }
    assert_eq!(stdout(output), "");
}
