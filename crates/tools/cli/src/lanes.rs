//! `crosslane lanes`: switches the lanes of a rack off and on while its programs run.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use stats_page::OFF_FILE;

use crate::rack_choice::RackChoice;
use crate::rack_dir::shared::SharedView;
use crate::wrong_use::WrongUse;
use crate::{output, rack_dir};

/// Options of `crosslane lanes`.
#[derive(clap::Args)]
pub struct Options {
    /// 'off': all connections use kernel TCP, those with lanes from their next calls on; 'on': new connections get
    /// lanes again
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
        if rack_dir::shared(&directory)?.is_some() {
            switch_shared(&directory, options.state)?;
            continue;
        }
        let switched = match options.state {
            State::Off => rack_dir::prepare(&directory).and_then(|()| switch_off(&directory)),
            State::On => switch_on(&directory),
        };
        switched.with_context(|| format!("switching lanes of rack '{shown}'; check --rack"))?;
    }
    output::print(&match options.state {
        State::Off => {
            format!("Connections in {rack} use kernel TCP; those with lanes go back with their next calls.\n")
        }
        State::On => format!("New connections in {rack} get lanes.\n"),
    })
}

/// Returns whether lanes are switched off in a directory.
pub fn are_off(directory: &Path) -> bool {
    match SharedView::of(directory) {
        Ok(Some(shared)) => shared.is_switched_off(),
        _ => directory.join(OFF_FILE).exists(),
    }
}

/// Switches a shared rack: only root's file counts, and members can create others in its place.
fn switch_shared(directory: &Path, state: State) -> Result<()> {
    let shown = directory.display();
    if !rustix::process::geteuid().is_root() {
        return Err(
            WrongUse::of(format!("rack '{shown}' is shared: only root switches its lanes; run this as root")).into()
        );
    }
    let switched = match state {
        State::Off => replace_off_file(directory),
        State::On => switch_on(directory),
    };
    switched.with_context(|| format!("switching lanes of rack '{shown}'; remove '{shown}/{OFF_FILE}' and repeat"))
}

/// Replaces whatever has the file's name: a member's link is not followed.
fn replace_off_file(directory: &Path) -> Result<()> {
    let made = tempfile::Builder::new().prefix(".lanes-off-").tempfile_in(directory);
    let renamed = made.map_err(anyhow::Error::from).and_then(|file| Ok(file.persist(directory.join(OFF_FILE))?));
    renamed.map(|_| ()).context("the switch file cannot be created")
}

fn switch_off(directory: &Path) -> Result<()> {
    fs::write(directory.join(OFF_FILE), b"").context("the switch file cannot be created")
}

fn switch_on(directory: &Path) -> Result<()> {
    match fs::remove_file(directory.join(OFF_FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).context("the switch file cannot be removed"),
        _ => Ok(()),
    }
}
