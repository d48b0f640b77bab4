//! `crosslane monitor`: the control plane of one node, which `crosslane up` starts.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::PathBuf;

use ::monitor::{Monitor, MonitorError, MonitorSettings};
use ::rack::NodeRunDir;
use anyhow::{Context, Result};
use signal_hook::consts::SIGBUS;

use crate::device_server::signals;
use crate::rack_choice::LoadedRack;
use crate::wrong_use::WrongUse;

/// Which node.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
    /// The node
    #[arg(long, value_name = "NODE")]
    node: String,
    /// Do not go on with the proxy of a monitor that has died
    #[arg(long)]
    replace_proxy: bool,
}

/// Works until a signal or a command says to end. What it says goes to standard error.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals().context("signals cannot be taken; start the monitor again")?;
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    let rack = LoadedRack::read(&options.rack)?;
    let slot = rack.slot(&options.node)?;
    rack.prepare(&rack.places.node(&options.node).directory)?;
    let etcd = rack.in_etcd();
    let LoadedRack { file, places, .. } = rack;
    let gone = "its memory was truncated, or has failed; bring the rack down, and give it all its bytes back";
    say_when_memory_goes(file.error_at(&device_key(&file.rack, slot), gone).to_string(), &places.node(&options.node))
        .context("signals cannot be taken; start the monitor again")?;
    let command = std::env::current_exe().context("finding this command's own place")?;
    let (rack, replaces_proxy) = (file.rack.clone(), options.replace_proxy);
    let settings = MonitorSettings { rack, slot, run_dir: places, command, etcd, replaces_proxy };
    let sorted = |error: MonitorError| match &error {
        MonitorError::Device(_) => WrongUse::of(file.error_at(&device_key(&file.rack, slot), &error)).into(),
        _ => anyhow::Error::from(error),
    };
    Monitor::new(settings).map_err(sorted)?.run(signals.as_fd()).map_err(sorted)
}

/// The kernel answers an access to memory that is not there any more with a signal. The access is tried again and again
/// until this has said so, and ends the process.
fn say_when_memory_goes(line: String, node: &NodeRunDir) -> std::io::Result<()> {
    let (mut reader, writer) = std::io::pipe()?;
    signal_hook::low_level::pipe::register(SIGBUS, writer)?;
    let sockets = [node.metrics_socket(), node.monitor_socket()];
    let wait = move || {
        if reader.read_exact(&mut [0]).is_ok() {
            eprintln!("crosslane: {line}");
            sockets.iter().for_each(|socket| drop(std::fs::remove_file(socket)));
            std::process::exit(2);
        }
    };
    std::thread::Builder::new().name("memory".to_owned()).spawn(wait).map(drop)
}

/// The key that names the device of a node.
fn device_key(rack: &::rack::Rack, slot: usize) -> String {
    match rack.nodes[slot].device {
        Some(_) => format!("nodes[{slot}].device"),
        None => "device.backend".to_owned(),
    }
}
