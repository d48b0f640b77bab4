//! `crosslane down`: stops the nodes of a rack file on this machine.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{Result, bail};
use control::monitor::Request;
use rack::NodeRunDir;
use rustix::net::SocketType;
use rustix::process::{Pid, Signal};

use crate::output;
use crate::rack_choice::LoadedRack;
use crate::rack_control::{self, END_LIMIT, Process};
use crate::run_lock::lock_run_dir;

/// Options of `crosslane down`.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
}

/// Stops all processes of the rack on this machine. Succeeds if none runs.
pub fn main(options: &Options) -> Result<()> {
    let racks = LoadedRack::read_started(&options.rack)?;
    for rack in racks.iter().filter(|rack| rack.run_dir.directory.exists()) {
        bring_down(rack)?;
    }
    let shown = racks.first().map_or_else(String::new, |rack| rack.shown().to_owned());
    output::print(&format!("{shown} is down\n"))
}

/// Stops the monitors, which stop their proxies, then the device server.
pub fn bring_down(rack: &LoadedRack) -> Result<()> {
    let _lock = lock_run_dir(&rack.run_dir.lock(), rack.shown())?;
    for node in &rack.file.rack.nodes {
        stop_node(&rack.run_dir.node(&node.name))?;
    }
    stop_server(&rack.run_dir.device_socket());
    for path in [rack.run_dir.device_socket(), rack.run_dir.copy()] {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Stops a monitor and waits until it has exited.
pub fn stop_node(node: &NodeRunDir) -> Result<()> {
    let socket = node.monitor_socket();
    // A monitor that hangs or has no socket yet is found by the lock that it holds.
    let monitor =
        Process::listening_at(&socket, SocketType::SEQPACKET).or_else(|| Process::holding_lock(&node.monitor_pid()));
    if let Some(monitor) = monitor {
        // A monitor that does not answer is killed at once.
        let asked = rack_control::request(node, Request::Stop);
        let limit = if asked.is_ok() { END_LIMIT } else { Duration::ZERO };
        if !monitor.end_within(limit) {
            bail!("the monitor at {} does not exit; see {}", socket.display(), node.monitor_log().display());
        }
    }
    // A proxy whose monitor has died waits for the next monitor.
    if let Some(proxy) = Process::listening_at(&node.successor_socket(), SocketType::SEQPACKET) {
        proxy.end_within(Duration::ZERO);
    }
    for path in [socket, node.metrics_socket(), node.monitor_pid(), node.successor_socket()] {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Terminates a child process and waits until it has exited.
pub fn stop_child(child: &mut Child) {
    if let Some(process) = Process::new(Pid::from_child(child)) {
        terminate(&process);
    }
    let _ = child.wait();
}

/// Stops the device server at `socket`, if one runs, and waits until it has exited.
pub fn stop_server(socket: &Path) {
    if let Some(server) = Process::listening_at(socket, SocketType::STREAM) {
        terminate(&server);
    }
}

/// Terminates a process, or kills it if it does not exit in time, and waits until it has exited.
fn terminate(process: &Process) {
    process.signal(Signal::TERM);
    process.end_within(END_LIMIT);
}
