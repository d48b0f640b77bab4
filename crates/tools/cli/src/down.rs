//! `crosslane down`: ends the nodes of a rack file on this machine.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{Result, bail};
use control::monitor::Request;
use rack::NodeRunDir;
use rustix::net::SocketType;
use rustix::process::{Pid, Signal};

use crate::rack_choice::LoadedRack;
use crate::rack_control::{self, Process};
use crate::output;
use crate::run_lock::lock_run_dir;

/// How long a process may take to end by itself before it is killed.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long the kernel may take to end a killed one.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// What to bring down.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
}

/// Ends everything of the rack on this machine; nothing to do is fine too.
pub fn main(options: &Options) -> Result<()> {
    let racks = LoadedRack::read_started(&options.rack)?;
    for rack in racks.iter().filter(|rack| rack.places.directory.exists()) {
        bring_down(rack)?;
    }
    let shown = racks.first().map_or_else(String::new, |rack| rack.shown().to_owned());
    output::print(&format!("{shown} is down\n"))
}

/// Ends monitors, with them proxies, then the device server.
pub fn bring_down(rack: &LoadedRack) -> Result<()> {
    let _lock = lock_run_dir(&rack.places.lock(), rack.shown())?;
    for node in &rack.file.rack.nodes {
        stop_node(&rack.places.node(&node.name))?;
    }
    stop_server(&rack.places.device_socket());
    for path in [rack.places.device_socket(), rack.places.copy()] {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Ends a monitor, and waits until it has.
pub fn stop_node(node: &NodeRunDir) -> Result<()> {
    let socket = node.monitor_socket();
    // One that hangs, or has no socket yet, is found by its lock.
    let monitor = Process::behind(&socket, SocketType::SEQPACKET).or_else(|| Process::holding(&node.monitor_pid()));
    if let Some(monitor) = monitor {
        // One that does not answer is not asked twice.
        let asked = rack_control::request(node, Request::Stop);
        let limit = if asked.is_ok() { END_LIMIT } else { Duration::ZERO };
        if !monitor.has_ended(limit) {
            monitor.signal(Signal::KILL);
        }
        if !monitor.has_ended(KILL_LIMIT) {
            bail!("the monitor at {} does not end; see {}", socket.display(), node.monitor_log().display());
        }
    }
    // One whose monitor has died waits for the next.
    if let Some(proxy) = Process::behind(&node.successor_socket(), SocketType::SEQPACKET) {
        proxy.signal(Signal::KILL);
        proxy.has_ended(KILL_LIMIT);
    }
    for path in [socket, node.metrics_socket(), node.monitor_pid(), node.successor_socket()] {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Ends a child, and waits until it has.
pub fn stop_child(child: &mut Child) {
    if let Some(process) = Process::new(Pid::from_child(child)) {
        process.signal(Signal::TERM);
        if !process.has_ended(END_LIMIT) {
            process.signal(Signal::KILL);
        }
    }
    let _ = child.wait();
}

/// Ends a device server, if there is one.
pub fn stop_server(socket: &Path) {
    if let Some(server) = Process::behind(socket, SocketType::STREAM) {
        server.signal(Signal::TERM);
        if !server.has_ended(END_LIMIT) {
            server.signal(Signal::KILL);
            server.has_ended(KILL_LIMIT);
        }
    }
}
