//! `crosslane router up`: the nodes of a cluster file on this machine.

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
use crate::up::{SOCKET_PATH_BYTES_MAX, START_LIMIT, background, check_alive};
use crate::wrong_use::WrongUse;
use crate::{device_server, output};

/// How long the kernel may take to end a process that was killed.
const END_LIMIT: Duration = Duration::from_secs(5);

/// What to bring up, and how.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// This node only [default: all nodes, or those whose control address is this machine's]
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Stay, and end the nodes with this command: for init systems
    #[arg(long)]
    foreground: bool,
}

/// Brings up what is not up yet; all of it or nothing.
pub fn main(options: &Options) -> Result<()> {
    let signals = device_server::signals().context("signals cannot be taken; run up again")?;
    let cluster = LoadedCluster::read(&options.cluster)?;
    let nodes = local_nodes(&cluster, options.node.as_deref())?;
    cluster.prepare()?;
    for index in &nodes {
        let socket = cluster.places.node(cluster.name(*index)).peers_socket();
        if socket.as_os_str().len() >= SOCKET_PATH_BYTES_MAX {
            let shown = socket.display();
            bail!("'{shown}' is too long for a socket; set XDG_RUNTIME_DIR or CROSSLANE_RACK to a shorter directory");
        }
    }
    let lock = lock_run_dir(&cluster.places.lock(), cluster.file.shown())?;
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

/// The nodes of this machine.
fn local_nodes(cluster: &LoadedCluster, given: Option<&str>) -> Result<Vec<usize>> {
    if given.is_some() {
        return cluster.chosen(given);
    }
    let (nodes, here) = (&cluster.file.cluster.nodes, cluster.here());
    let shown = cluster.file.shown();
    if here.is_empty() {
        bail!(WrongUse::of(format!("{shown}: no node has a control address of this machine; name one with --node")));
    }
    let homeless: Vec<usize> = here.iter().copied().filter(|index| nodes[*index].namespace.is_none()).collect();
    if let [first, second, ..] = homeless[..] {
        let what = format!(
            "nodes '{}' and '{}' would share one network namespace; give each its own with this key, or start one of \
             them with --node",
            nodes[first].name, nodes[second].name
        );
        bail!(WrongUse::of(cluster.file.error_at(&format!("nodes[{second}].namespace"), what)));
    }
    Ok(here)
}

/// Starts what is not up, and waits until all have met. Says which nodes of other machines have not come.
fn bring_up(cluster: &LoadedCluster, nodes: &[usize], started: &mut Vec<(usize, Child)>) -> Result<Vec<String>> {
    for index in nodes {
        let places = cluster.places.node(cluster.name(*index));
        if !is_up(&places)? {
            let mut command = background(&places.log())?;
            command.args(["router", "node", "--cluster"]).arg(&cluster.path).arg("--node").arg(cluster.name(*index));
            let child = command.spawn().with_context(|| format!("starting node '{}'", cluster.name(*index)))?;
            started.push((*index, child));
        }
    }
    for (index, child) in started.iter_mut() {
        let (name, places) = (cluster.name(*index), cluster.places.node(cluster.name(*index)));
        let deadline = Instant::now() + START_LIMIT;
        // One that ends while it is asked does not answer either.
        while !status(&places).is_ok_and(|status| status.is_some()) {
            check_alive(child, &format!("node '{name}'"), &places.log())?;
            if Instant::now() >= deadline {
                bail!("node '{name}' does not answer; see {}", places.log().display());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    wait_until_met(cluster, nodes)
}

/// Whether a node answers. One that was killed a moment ago neither does nor is gone yet.
fn is_up(places: &NodePaths) -> Result<bool> {
    let deadline = Instant::now() + END_LIMIT;
    loop {
        match status(places) {
            Ok(status) => return Ok(status.is_some()),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Waits until the nodes of this machine have met each other; nodes of other machines are named.
fn wait_until_met(cluster: &LoadedCluster, nodes: &[usize]) -> Result<Vec<String>> {
    let deadline = Instant::now() + Duration::from_nanos(cluster.file.cluster.timeouts.up_ns as u64);
    loop {
        let (mut here, mut others) = (Vec::new(), Vec::new());
        for index in nodes {
            let (name, places) = (cluster.name(*index), cluster.places.node(cluster.name(*index)));
            let Some(status) = status(&places)? else {
                bail!("node '{name}' has ended; see {}", places.log().display())
            };
            faults(cluster, nodes, &status, &mut here, &mut others);
        }
        if here.is_empty() && (others.is_empty() || Instant::now() >= deadline) {
            return Ok(others);
        }
        if Instant::now() >= deadline {
            bail!("{} did not come up: {}", cluster.file.shown(), here.join("; "));
        }
        std::thread::sleep(4 * POLL_INTERVAL);
    }
}

fn faults(cluster: &LoadedCluster, nodes: &[usize], status: &Status, here: &mut Vec<String>, others: &mut Vec<String>) {
    for peer in status.peers.iter().filter(|peer| peer.state != "up") {
        let reason = peer.reason.as_deref().unwrap_or("it has not come yet");
        let text = format!("node '{}' has not met '{}': {reason}", status.node, peer.node);
        let is_here = nodes.iter().any(|index| cluster.name(*index) == peer.node);
        if is_here { here.push(text) } else { others.push(text) }
    }
}

/// Ends what was started. Errors of that would only hide the one that led here.
fn undo(cluster: &LoadedCluster, started: Vec<(usize, Child)>) {
    for (index, mut child) in started {
        // One that does not listen yet cannot be asked to end.
        crate::down::stop_child(&mut child);
        let _ = down::stop_node(&cluster.places.node(cluster.name(index)));
    }
}

fn describe(cluster: &LoadedCluster, nodes: &[usize], missing: &[String]) -> String {
    let names: Vec<&str> = nodes.iter().map(|index| cluster.name(*index)).collect();
    let mut text = format!("{} is up: nodes {}\n", cluster.file.shown(), names.join(", "));
    missing.iter().for_each(|line| text += &format!("not yet: {line}\n"));
    for index in nodes {
        let name = cluster.name(*index);
        // One that has ended since says so to whoever looks after it.
        let Ok(Some(status)) = status(&cluster.places.node(name)) else { continue };
        mtu_cuts(&status).for_each(|line| text += &format!("node {name}: {line}\n"));
    }
    text
}

/// Until a signal comes or a node ends.
fn stay(cluster: &LoadedCluster, nodes: &[usize], signals: BorrowedFd<'_>) -> Result<()> {
    let places = |index: &usize| cluster.places.node(cluster.name(*index));
    let running: Vec<(usize, Process)> = nodes
        .iter()
        .filter_map(|index| Process::holding(&places(index).pid()).map(|process| (*index, process)))
        .collect();
    let ended = rack_control::first_of(signals, running.iter().map(|(_, process)| process));
    let done = down::bring_down(cluster, nodes);
    match ended {
        None => done,
        Some(place) => bail!("node '{}' has ended by itself; the others are down", cluster.name(running[place].0)),
    }
}
