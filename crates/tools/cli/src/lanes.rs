//! `crosslane lanes`: switches the lanes of a rack off and on while its programs run.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use stats_page::OFF_FILE;

use crate::rack_choice::RackChoice;
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
    directory.join(OFF_FILE).exists()
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
