//! `crosslane lanes`: switches lanes for new connections of a rack off and on while its programs run.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use stats_page::{OFF_FILE, OFF_HINT};

use crate::rack_choice::RackChoice;
use crate::{output, rack_dir};

/// Options of `crosslane lanes`.
#[derive(clap::Args)]
pub struct Options {
    /// 'off': new connections use kernel TCP, and existing ones continue; 'on': new connections get lanes again
    #[arg(value_enum)]
    state: State,
    /// The rack: a rack file, its address in etcd, or a directory [default: as for run]
    #[arg(long, value_name = "FILE|ETCD|DIR")]
    rack: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum State {
    Off,
    On,
}

/// Switches lanes off or on in all directories of the rack, and prints the new state.
pub fn main(options: &Options) -> Result<()> {
    let rack = RackChoice::new(options.rack.as_deref())?;
    for directory in rack.directories() {
        let shown = directory.display();
        let switched = match options.state {
            State::Off => rack_dir::prepare(&directory).and_then(|()| switch_off(&directory)),
            State::On => switch_on(&directory),
        };
        switched.with_context(|| format!("switching lanes of rack '{shown}'; check --rack"))?;
    }
    output::print(&match options.state {
        State::Off => format!("New connections in {rack} use kernel TCP; existing ones continue.\n"),
        State::On => format!("New connections in {rack} get lanes.\n"),
    })
}

/// Returns whether lanes are switched off in a directory.
pub fn are_off(directory: &Path) -> bool {
    directory.join(OFF_FILE).exists()
}

/// Switches lanes off. The file is created before the hint is set: a process that opens the rack checks for the file
/// last, so it finds the file, or its directory exists and gets the hint.
fn switch_off(directory: &Path) -> Result<()> {
    fs::write(directory.join(OFF_FILE), b"").context("the switch file cannot be created")?;
    hint(directory, |mode| mode | OFF_HINT)
}

/// Switches lanes on. The file is removed before the hint: a process that still sees the hint finds no file.
fn switch_on(directory: &Path) -> Result<()> {
    match fs::remove_file(directory.join(OFF_FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).context("the switch file cannot be removed");
        }
        _ => {}
    }
    hint(directory, |mode| mode & !OFF_HINT)
}

/// Changes the mode of each directory of listeners, of all versions: its bits carry the hint.
fn hint(directory: &Path, change: impl Fn(u32) -> u32) -> Result<()> {
    for version in folders_in(directory, "v") {
        for net in folders_in(&version, "net-") {
            let mode = fs::symlink_metadata(&net)?.permissions().mode() & 0o7777;
            fs::set_permissions(&net, PermissionsExt::from_mode(change(mode)))?;
        }
    }
    Ok(())
}

fn folders_in(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let named = folders.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()));
    named.map(|entry| entry.path()).collect()
}
