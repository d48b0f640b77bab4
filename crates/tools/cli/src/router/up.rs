//! `crosslane router up`: starts the nodes of a cluster file on this machine.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use router_node::cluster::NodePaths;
use router_node::management::Status;

use super::down;
use super::loaded::LoadedCluster;
use super::request::status;
use super::status::mtu_cuts;
use crate::rack_control::{self, Process};
use crate::run_lock::{POLL_INTERVAL, lock_run_dir};
use crate::up::{SOCKET_PATH_BYTES_MAX, background, wait_for_answer};
use crate::wrong_use::WrongUse;
use crate::{output, signals};

/// Time limit for the kernel to end a killed process.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Options of `crosslane router up`.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// This node only [default: all nodes, or those whose control address is this machine's]
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Stay in the foreground, and stop the nodes when this command ends: for init systems
    #[arg(long)]
    foreground: bool,
}

/// Starts the nodes that are not up yet. If one fails, stops everything that this command has started.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; run up again")?;
    let cluster = LoadedCluster::read(&options.cluster)?;
    let nodes = local_nodes(&cluster, options.node.as_deref())?;
    cluster.prepare()?;
    for index in &nodes {
        let socket = cluster.paths.node(cluster.name(*index)).peers_socket();
        if socket.as_os_str().len() >= SOCKET_PATH_BYTES_MAX {
            let shown = socket.display();
            bail!("'{shown}' is too long for a socket; set XDG_RUNTIME_DIR or CROSSLANE_RACK to a shorter directory");
        }
    }
    let lock = lock_run_dir(&cluster.paths.lock(), cluster.file.shown())?;
    let mut started = Vec::new();
    let missing = match bring_up(&cluster, &nodes, &mut started) {
        Ok(missing) => missing,
        Err(error) => {
            undo(&cluster, started);
            return Err(error);
        }
    };
    drop(lock);
    output::print(&describe(&cluster, &nodes, &missing))?;
    if options.foreground { stay(&cluster, &nodes, signals.as_fd()) } else { Ok(()) }
}

/// Returns the nodes that this machine runs, or the given one.
fn local_nodes(cluster: &LoadedCluster, given: Option<&str>) -> Result<Vec<usize>> {
    if given.is_some() {
        return cluster.select(given);
    }
    let (nodes, local) = (&cluster.file.cluster.nodes, cluster.local());
    let shown = cluster.file.shown();
    if local.is_empty() {
        bail!(WrongUse::of(format!("{shown}: no node has a control address of this machine; name one with --node")));
    }
    let unnamed: Vec<usize> = local.iter().copied().filter(|index| nodes[*index].namespace.is_none()).collect();
    if let [first, second, ..] = unnamed[..] {
        let what = format!(
            "nodes '{}' and '{}' would share one network namespace; give each its own with this key, or start one of \
             them with --node",
            nodes[first].name, nodes[second].name
        );
        bail!(WrongUse::of(cluster.file.error_at(&format!("nodes[{second}].namespace"), what)));
    }
    Ok(local)
}

/// Starts the nodes that are not up, and waits until they have connected. Returns a line for each node of another
/// machine that has not connected.
fn bring_up(cluster: &LoadedCluster, nodes: &[usize], started: &mut Vec<(usize, Child)>) -> Result<Vec<String>> {
    for index in nodes {
        let paths = cluster.paths.node(cluster.name(*index));
        if !is_up(&paths)? {
            let mut command = background(&paths.log())?;
            command.args(["router", "node", "--cluster"]).arg(&cluster.path).arg("--node").arg(cluster.name(*index));
            let child = command.spawn().with_context(|| format!("starting node '{}'", cluster.name(*index)))?;
            started.push((*index, child));
        }
    }
    for (index, child) in started.iter_mut() {
        let (name, paths) = (cluster.name(*index), cluster.paths.node(cluster.name(*index)));
        // An error counts as no answer: the node may end during the request.
        let answers = || Ok(status(&paths).is_ok_and(|status| status.is_some()));
        wait_for_answer(child, &format!("node '{name}'"), &paths.log(), answers)?;
    }
    wait_until_connected(cluster, nodes)
}

/// Returns whether a node answers. Retries errors for `KILL_LIMIT`: a node killed just before may not be gone yet.
fn is_up(paths: &NodePaths) -> Result<bool> {
    let deadline = Instant::now() + KILL_LIMIT;
    loop {
        match status(paths) {
            Ok(status) => return Ok(status.is_some()),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Waits until the nodes of this machine have connected to each other, and for those of other machines at most `up_ns`.
/// Returns a line for each node of another machine that has not connected.
fn wait_until_connected(cluster: &LoadedCluster, nodes: &[usize]) -> Result<Vec<String>> {
    let deadline = Instant::now() + Duration::from_nanos(cluster.file.cluster.timeouts.up_ns as u64);
    loop {
        let (mut local, mut remote) = (Vec::new(), Vec::new());
        for index in nodes {
            let (name, paths) = (cluster.name(*index), cluster.paths.node(cluster.name(*index)));
            let Some(status) = status(&paths)? else { bail!("node '{name}' has ended; see {}", paths.log().display()) };
            faults(cluster, nodes, &status, &mut local, &mut remote);
        }
        if local.is_empty() && (remote.is_empty() || Instant::now() >= deadline) {
            return Ok(remote);
        }
        if Instant::now() >= deadline {
            bail!("{} did not come up: {}", cluster.file.shown(), local.join("; "));
        }
        std::thread::sleep(4 * POLL_INTERVAL);
    }
}

fn faults(
    cluster: &LoadedCluster,
    nodes: &[usize],
    status: &Status,
    local: &mut Vec<String>,
    remote: &mut Vec<String>,
) {
    for peer in status.peers.iter().filter(|peer| peer.state != "up") {
        let reason = peer.reason.as_deref().unwrap_or("it has not connected yet");
        let text = format!("node '{}' is not connected to '{}': {reason}", status.node, peer.node);
        let is_local = nodes.iter().any(|index| cluster.name(*index) == peer.node);
        if is_local { local.push(text) } else { remote.push(text) }
    }
}

/// Stops what was started. Errors are dropped: they would hide the error that made this necessary.
fn undo(cluster: &LoadedCluster, started: Vec<(usize, Child)>) {
    for (index, mut child) in started {
        // A node that does not listen yet cannot receive a stop request.
        crate::down::stop_child(&mut child);
        let _ = down::stop_node(&cluster.paths.node(cluster.name(index)));
    }
}

fn describe(cluster: &LoadedCluster, nodes: &[usize], missing: &[String]) -> String {
    let names: Vec<&str> = nodes.iter().map(|index| cluster.name(*index)).collect();
    let mut text = format!("{} is up: nodes {}\n", cluster.file.shown(), names.join(", "));
    missing.iter().for_each(|line| text += &format!("not yet: {line}\n"));
    for index in nodes {
        let name = cluster.name(*index);
        // A node that has ended meanwhile is reported by `stay` or `status`.
        let Ok(Some(status)) = status(&cluster.paths.node(name)) else { continue };
        let lines = mtu_cuts(&status).chain(status.filters.line());
        lines.for_each(|line| text += &format!("node {name}: {line}\n"));
    }
    text
}

/// Waits until a signal arrives or a node ends, then stops all nodes.
fn stay(cluster: &LoadedCluster, nodes: &[usize], signals: BorrowedFd<'_>) -> Result<()> {
    let paths = |index: &usize| cluster.paths.node(cluster.name(*index));
    let running: Vec<(usize, Process)> = nodes
        .iter()
        .filter_map(|index| Process::holding_lock(&paths(index).pid()).map(|process| (*index, process)))
        .collect();
    let ended = rack_control::first_of(signals, running.iter().map(|(_, process)| process));
    let done = down::bring_down(cluster, nodes);
    match ended {
        None => done,
        Some(ended) => bail!("node '{}' has ended by itself; the others are down", cluster.name(running[ended].0)),
    }
}
