//! Rack files, and commands that run with one in a private folder.

use std::path::Path;
use std::process::Command;

use crate::{Process, WAIT_MAX, paths};

/// `crosslane ARGUMENTS` in a folder, with a rack directory there and without other variables of Crosslane.
pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(paths::crosslane());
    command.args(arguments).current_dir(folder).env("CROSSLANE_RACK", folder.join("base"));
    for variable in ["NODE", "ONLY", "EXCEPT", "REQUIRE_LANE", "OFF"] {
        command.env_remove(format!("CROSSLANE_{variable}"));
    }
    command
}

/// The text that `crosslane rack example ARGUMENTS` prints.
#[track_caller]
pub fn example(arguments: &[&str]) -> String {
    let mut command = Command::new(paths::crosslane());
    Process::start(command.args(["rack", "example"]).args(arguments)).wait(WAIT_MAX).must_succeed().stdout
}

/// Lengthens the silence limit of an example: on a busy machine a monitor may wait long for a processor.
pub fn with_long_silence(text: &str) -> String {
    text.replace("silence_ns = 3000000000", "silence_ns = 30000000000")
}
