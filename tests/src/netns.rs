//! Named network namespaces (ip-netns(8)), which take root.

use std::ffi::OsStr;
use std::process::Command;

use crate::{Process, WAIT_MAX, paths};

#[track_caller]
fn run_ip(words: &[&str]) -> String {
    Process::start(Command::new(paths::tool("ip")).args(words)).wait(WAIT_MAX).must_succeed().stdout
}

/// Runs `ip WORDS` in a namespace and returns its output.
#[track_caller]
pub fn ip(namespace: &str, words: &[&str]) -> String {
    run_ip(&[&["-n", namespace], words].concat())
}

/// Creates a namespace whose loopback interface is up.
#[track_caller]
pub fn add(namespace: &str) {
    run_ip(&["netns", "add", namespace]);
    ip(namespace, &["link", "set", "lo", "up"]);
}

/// A command that runs a program in a namespace.
pub fn command(namespace: &str, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(paths::tool("ip"));
    command.args(["netns", "exec", namespace]).arg(program);
    command
}

/// The names of all namespaces that begin with `prefix`.
pub fn with_prefix(prefix: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).collect()
}

/// Deletes all namespaces whose names begin with `prefix`.
pub fn delete_all(prefix: &str) {
    for name in with_prefix(prefix) {
        let _ = Command::new(paths::tool("ip")).args(["netns", "del", &name]).status();
    }
}
