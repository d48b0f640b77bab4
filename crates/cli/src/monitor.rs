//! `crosslane monitor`: the control plane of one node, which `crosslane up` starts.

use std::os::fd::AsFd;
use std::path::PathBuf;

use ::monitor::{Monitor, MonitorError, Settings};
use anyhow::{Context, Result};

use crate::device_server::signals;
use crate::rack_choice::LoadedRack;
use crate::rack_dir;
use crate::wrong_use::WrongUse;

/// Which node.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file
    #[arg(long, value_name = "FILE")]
    rack: PathBuf,
    /// The node
    #[arg(long, value_name = "NODE")]
    node: String,
}

/// Works until a signal or a command says to end. What it says goes to standard error.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals().context("signals cannot be taken; start the monitor again")?;
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    let rack = LoadedRack::read(&options.rack)?;
    let slot = rack.slot(&options.node)?;
    let LoadedRack { file, places } = rack;
    rack_dir::prepare(&places.node(&options.node).directory)?;
    let command = std::env::current_exe().context("finding this command's own place")?;
    let settings = Settings { rack: file.rack.clone(), slot, places, command };
    let sorted = |error: MonitorError| match &error {
        MonitorError::Device(_) => WrongUse::of(file.fault(&device_key(&file.rack, slot), &error)).into(),
        _ => anyhow::Error::from(error),
    };
    Monitor::new(settings).map_err(sorted)?.run(signals.as_fd())?;
    Ok(())
}

/// The key that names the device of a node.
fn device_key(rack: &::rack::Rack, slot: usize) -> String {
    match rack.nodes[slot].device {
        Some(_) => format!("nodes[{slot}].device"),
        None => "device.backend".to_owned(),
    }
}
