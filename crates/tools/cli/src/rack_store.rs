//! `crosslane rack push` and `crosslane rack show`: store a rack file in etcd, and print a rack as a file.

use std::path::PathBuf;

use anyhow::{Result, bail};
use etcd::{PushSummary, RackStore};

use crate::output;
use crate::rack_choice::{LoadedRack, address, etcd_error};
use crate::wrong_use::WrongUse;

/// Options of `crosslane rack push`.
#[derive(clap::Args)]
pub struct PushOptions {
    /// The rack file
    #[arg(long, value_name = "FILE")]
    rack: PathBuf,
    /// Address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "ETCD")]
    to: PathBuf,
}

/// Options of `crosslane rack show`.
#[derive(clap::Args)]
pub struct ShowOptions {
    /// The rack file, or its address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
}

/// Checks the file as 'up' does and stores it in etcd.
pub fn push(options: &PushOptions) -> Result<()> {
    let rack = LoadedRack::read(&options.rack)?;
    let Some(to) = address(&options.to)? else {
        let shown = options.to.display();
        bail!(WrongUse::of(format!("--to {shown}: not an address in etcd; write etcd://HOST:PORT/PREFIX")))
    };
    let PushSummary { written, removed } = RackStore::new(to.clone()).push(&rack.file.rack).map_err(etcd_error)?;
    output::print(&format!("{} is at {to}: {written} keys written, {removed} removed\n", rack.shown()))
}

/// Prints the rack as a rack file.
pub fn show(options: &ShowOptions) -> Result<()> {
    output::print(&LoadedRack::read(&options.rack)?.file.rack.to_string())
}
