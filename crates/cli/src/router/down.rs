//! `crosslane router down`: ends the nodes of a cluster file on this machine.

use std::time::Duration;

use anyhow::{Result, bail};
use router_node::ask::Ask;
use router_node::cluster::NodePlaces;
use rustix::process::Signal;

use super::ask::ask;
use super::loaded::{LoadedCluster, NodeOptions};
use crate::rack_control::Process;
use crate::{output, up};

/// How long a node may take to end by itself before it is killed.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long the kernel may take to end a killed one.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// Ends them; nothing to do is fine too.
pub fn main(options: &NodeOptions) -> Result<()> {
    let cluster = LoadedCluster::read(&options.cluster)?;
    let nodes = cluster.chosen(options.node.as_deref())?;
    if cluster.places.directory.exists() {
        bring_down(&cluster, &nodes)?;
    }
    let what = options.node.as_ref().map_or_else(String::new, |node| format!("node '{node}' of "));
    output::print(&format!("{what}{} is down\n", cluster.file.shown()))
}

/// Ends some nodes, and waits until they have ended.
pub fn bring_down(cluster: &LoadedCluster, nodes: &[usize]) -> Result<()> {
    let _lock = up::lock_file(&cluster.places.lock(), cluster.file.shown())?;
    nodes.iter().try_for_each(|index| stop_node(&cluster.places.node(cluster.name(*index))))
}

/// Ends a node, and waits until it has.
pub fn stop_node(node: &NodePlaces) -> Result<()> {
    if let Some(process) = Process::holding(&node.pid()) {
        // One that does not answer is not asked twice.
        let limit = if ask(node, Ask::Stop).is_ok() { END_LIMIT } else { Duration::ZERO };
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
