//! `crosslane router down`: ends the nodes of a cluster file on this machine. Which those are is said by what runs: the
//! file may have changed since, or be gone.

use std::time::Duration;

use anyhow::{Result, bail};
use router_node::cluster::{ClusterFile, ClusterPaths, NodePaths};
use router_node::management::Request;
use rustix::process::Signal;

use super::loaded::{LoadedCluster, NodeOptions, absolute, base, unknown};
use super::request::request;
use crate::output;
use crate::rack_control::Process;
use crate::run_lock::lock_run_dir;
use crate::wrong_use::WrongUse;

/// How long a node may take to end by itself before it is killed.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long the kernel may take to end a killed one.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// Ends them; nothing to do is fine too.
pub fn main(options: &NodeOptions) -> Result<()> {
    let shown = options.cluster.display().to_string();
    let all = ClusterPaths::all_of(&base(), &absolute(&options.cluster)?);
    let running = || all.iter().flat_map(|places| running(places).into_iter().map(move |name| (places, name)));
    let is_wanted = |name: &String| options.node.as_ref().is_none_or(|node| node == name);
    if !running().any(|(_, name)| is_wanted(&name)) {
        check_file(options, &running().map(|(_, name)| name).collect::<Vec<_>>())?;
    }
    for places in &all {
        let _lock = lock_run_dir(&places.lock(), &shown)?;
        // What a node that was killed has left is taken away too.
        places.started().iter().filter(|name| is_wanted(name)).try_for_each(|name| stop_node(&places.node(name)))?;
    }
    let what = options.node.as_ref().map_or_else(String::new, |node| format!("node '{node}' of "));
    output::print(&format!("{what}{shown} is down\n"))
}

/// The nodes of a cluster that live.
fn running(places: &ClusterPaths) -> Vec<String> {
    let mut names = places.started();
    names.retain(|name| Process::holding(&places.node(name).pid()).is_some());
    names
}

/// Where nothing that was asked for runs, the file says whether that may be.
fn check_file(options: &NodeOptions, running: &[String]) -> Result<()> {
    let runs = if running.is_empty() { "none".to_owned() } else { running.join(", ") };
    let file = ClusterFile::read(&options.cluster)
        .map_err(|error| WrongUse::of(format!("{error}; nodes of it that run here: {runs}")))?;
    match &options.node {
        Some(node) if !file.cluster.nodes.iter().any(|known| known.name == *node) => bail!(unknown(&file, node)),
        _ => Ok(()),
    }
}

/// Ends some nodes, and waits until they have ended.
pub fn bring_down(cluster: &LoadedCluster, nodes: &[usize]) -> Result<()> {
    let _lock = lock_run_dir(&cluster.places.lock(), cluster.file.shown())?;
    nodes.iter().try_for_each(|index| stop_node(&cluster.places.node(cluster.name(*index))))
}

/// Ends a node, and waits until it has.
pub fn stop_node(node: &NodePaths) -> Result<()> {
    if let Some(process) = Process::holding(&node.pid()) {
        // One that does not answer is not asked twice.
        let limit = if request(node, Request::Stop).is_ok() { END_LIMIT } else { Duration::ZERO };
        if !process.has_ended(limit) {
            process.signal(Signal::KILL);
        }
        if !process.has_ended(KILL_LIMIT) {
            bail!("the node at {} does not end; see {}", node.socket().display(), node.log().display());
        }
    }
    for path in [node.socket(), node.peers_socket(), node.pid()] {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}
