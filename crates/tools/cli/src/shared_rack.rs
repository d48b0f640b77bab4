//! `crosslane rack-dir`: makes rack directories that several users share, and allows their users to reach each other.

mod access;
mod accounts;
mod allow;
mod create;
mod device;
mod keys;
mod show;

use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::fs::{FileType, Stat};

use crate::wrong_use::WrongUse;
pub use show::SCHEMA;

/// The subcommands.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Make a directory in which programs of several users meet, or set the group and the mode of one right again;
    /// for root
    Create(create::Options),
    /// Allow clients of one user to reach servers of another in a shared rack; for root
    Allow(allow::Options),
    /// Specify a shared rack as a device that container engines give to containers (CDI); for root
    Device(device::Options),
    /// Show the group, the rules and the errors of a shared rack
    Show(show::Options),
}

/// Runs a subcommand.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Create(options) => create::main(options),
        Command::Allow(options) => allow::main(options),
        Command::Device(options) => device::main(options),
        Command::Show(options) => show::main(options),
    }
}

/// What a new rules file says before its rules.
const RULES_HEADER: &str = "\
# Rules of a shared rack: whose clients may reach whose servers. A rule is a line, users are numbers (id -u USER):
#   allow from UID to UID [ports LIST]      such as: allow from 33 to 999 ports 6379,7000-7010
# Programs of one user need no rule. A line that is no rule makes the whole file invalid, so that no rule holds.
";

/// The mode of the rules file: whoever may enter the rack may read it.
const RULES_MODE: u32 = 0o644;

/// Checks that the caller is root.
fn require_root(command: &str) -> Result<()> {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return Ok(());
    }
    Err(WrongUse::of(format!("rack-dir {command}: user {} is not root; run it as root", user.as_raw())).into())
}

/// Returns the absolute path of the directory of a shared rack.
fn absolute(directory: &Path) -> Result<PathBuf> {
    let shown = directory.display();
    std::path::absolute(directory)
        .map_err(|error| WrongUse::of(format!("directory '{shown}': {error}; name one")).into())
}

fn is_directory(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::Directory
}
