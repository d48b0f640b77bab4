//! `crosslane lanes`: new lanes of a rack switched off and on while its programs run.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use stats_page::{OFF_FILE, OFF_HINT};

use crate::rack_choice::Chosen;
use crate::{output, rack_dir};

/// What to switch.
#[derive(clap::Args)]
pub struct Options {
    /// 'off': new connections use kernel TCP, and those that are there go on; 'on': they get lanes again
    #[arg(value_enum)]
    state: State,
    /// The rack to switch: a rack file, its address in etcd, or a directory [default: as for run]
    #[arg(long, value_name = "FILE|ETCD|DIR")]
    rack: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum State {
    Off,
    On,
}

/// Switches, and says so.
pub fn main(options: &Options) -> Result<()> {
    let rack = Chosen::new(options.rack.as_deref())?;
    for directory in rack.directories() {
        let shown = directory.display();
        let switched = match options.state {
            State::Off => rack_dir::prepare(&directory).and_then(|()| switch_off(&directory)),
            State::On => switch_on(&directory),
        };
        switched.with_context(|| format!("lanes of rack '{shown}' are not switched; check --rack"))?;
    }
    output::print(&match options.state {
        State::Off => format!("New connections in {rack} use kernel TCP; those that are there go on.\n"),
        State::On => format!("New connections in {rack} get lanes.\n"),
    })
}

/// Whether the lanes of a directory are off.
pub fn are_off(directory: &Path) -> bool {
    directory.join(OFF_FILE).exists()
}

/// The file first: a process that opens the rack looks for it last, and then finds it or has a directory that gets the
/// hint.
fn switch_off(directory: &Path) -> Result<()> {
    fs::write(directory.join(OFF_FILE), b"").context("its file cannot be made")?;
    hint(directory, |mode| mode | OFF_HINT)
}

/// The file first: whoever heeds the hint meanwhile does not find it.
fn switch_on(directory: &Path) -> Result<()> {
    match fs::remove_file(directory.join(OFF_FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).context("its file cannot be removed"),
        _ => {}
    }
    hint(directory, |mode| mode & !OFF_HINT)
}

/// Changes the modes of the directories of listeners, of all versions.
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
