//! `crosslane monitor`: the control plane of one node, which `crosslane up` starts.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::PathBuf;

use ::monitor::{Monitor, MonitorError, MonitorSettings};
use ::rack::NodeRunDir;
use anyhow::{Context, Result};
use signal_hook::consts::SIGBUS;

use crate::rack_choice::LoadedRack;
use crate::signals;
use crate::wrong_use::WrongUse;

/// Options of `crosslane monitor`.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
    /// The node
    #[arg(long, value_name = "NODE")]
    node: String,
    /// Replace the proxy of a monitor that has died instead of taking it over
    #[arg(long)]
    replace_proxy: bool,
}

/// Runs until a signal or a stop request arrives. Logs to standard error.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; start the monitor again")?;
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    let rack = LoadedRack::read(&options.rack)?;
    let slot = rack.slot(&options.node)?;
    rack.prepare(&rack.run_dir.node(&options.node).directory)?;
    let etcd = rack.in_etcd();
    let LoadedRack { file, run_dir, .. } = rack;
    let lost = "its memory was truncated or has failed; bring the rack down and restore the memory's size";
    exit_on_memory_loss(file.error_at(&device_key(&file.rack, slot), lost).to_string(), &run_dir.node(&options.node))
        .context("installing signal handlers; start the monitor again")?;
    let command = std::env::current_exe().context("finding the path of this command")?;
    let (rack, replaces_proxy) = (file.rack.clone(), options.replace_proxy);
    let settings = MonitorSettings { rack, slot, run_dir, command, etcd, replaces_proxy };
    let classified = |error: MonitorError| match &error {
        MonitorError::Device(_) => WrongUse::of(file.error_at(&device_key(&file.rack, slot), &error)).into(),
        _ => anyhow::Error::from(error),
    };
    Monitor::new(settings).map_err(classified)?.run(signals.as_fd()).map_err(classified)
}

/// Starts a thread that logs `line` and ends the process with exit code 2 when the process receives SIGBUS, which the
/// kernel sends for an access to mapped memory that is gone. The faulting access repeats until then.
fn exit_on_memory_loss(line: String, node: &NodeRunDir) -> std::io::Result<()> {
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

/// Returns the key of the rack file that names the device of a node.
fn device_key(rack: &::rack::Rack, slot: usize) -> String {
    match rack.nodes[slot].device {
        Some(_) => format!("nodes[{slot}].device"),
        None => "device.backend".to_owned(),
    }
}
