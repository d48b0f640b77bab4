//! `crosslane router down`: stops the nodes of a cluster file on this machine. It finds nodes by their processes, since
//! the file may have changed or be gone.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use router_node::cluster::{ClusterFile, ClusterPaths, NodePaths};
use router_node::management::Request;
use router_node::restore_kernel_settings;

use super::loaded::{LoadedCluster, NodeOptions, absolute, unknown};
use super::request::request;
use crate::rack_control::{END_LIMIT, Process};
use crate::run_lock::lock_run_dir;
use crate::wrong_use::WrongUse;
use crate::{output, rack_dir};

/// Stops the nodes. Succeeds if none runs.
pub fn main(options: &NodeOptions) -> Result<()> {
    let shown = options.cluster.display().to_string();
    let all = ClusterPaths::all_of(&rack_dir::base(), &absolute(&options.cluster)?);
    let running = || all.iter().flat_map(|paths| running(paths).into_iter().map(move |name| (paths, name)));
    let is_wanted = |name: &String| options.node.as_ref().is_none_or(|node| node == name);
    if !running().any(|(_, name)| is_wanted(&name)) {
        check_file(options, &running().map(|(_, name)| name).collect::<Vec<_>>())?;
    }
    for paths in &all {
        let _lock = lock_run_dir(&paths.lock(), &shown)?;
        // This also removes the files of nodes that were killed.
        paths.started().iter().filter(|name| is_wanted(name)).try_for_each(|name| stop_node(&paths.node(name)))?;
    }
    let what = options.node.as_ref().map_or_else(String::new, |node| format!("node '{node}' of "));
    output::print(&format!("{what}{shown} is down\n"))
}

/// Returns the names of the running nodes of a cluster.
fn running(paths: &ClusterPaths) -> Vec<String> {
    let mut names = paths.started();
    names.retain(|name| Process::holding_lock(&paths.node(name).pid()).is_some());
    names
}

/// Checks, when no requested node runs, that the cluster file is valid and contains the requested node.
fn check_file(options: &NodeOptions, running: &[String]) -> Result<()> {
    let names = if running.is_empty() { "none".to_owned() } else { running.join(", ") };
    let file = ClusterFile::read(&options.cluster)
        .map_err(|error| WrongUse::of(format!("{error}; nodes of it that run here: {names}")))?;
    match &options.node {
        Some(node) if !file.cluster.nodes.iter().any(|known| known.name == *node) => bail!(unknown(&file, node)),
        _ => Ok(()),
    }
}

/// Stops nodes and waits until they have exited.
pub fn bring_down(cluster: &LoadedCluster, nodes: &[usize]) -> Result<()> {
    let _lock = lock_run_dir(&cluster.paths.lock(), cluster.file.shown())?;
    nodes.iter().try_for_each(|index| stop_node(&cluster.paths.node(cluster.name(*index))))
}

/// Stops a node and waits until it has exited. Restores the kernel settings that a killed node has left changed.
pub fn stop_node(node: &NodePaths) -> Result<()> {
    if let Some(process) = Process::holding_lock(&node.pid()) {
        // A node that does not answer is killed at once.
        let limit = if request(node, Request::Stop).is_ok() { END_LIMIT } else { Duration::ZERO };
        if !process.end_within(limit) {
            bail!("the node at {} does not exit; see {}", node.socket().display(), node.log().display());
        }
    }
    let restored = restore_kernel_settings(node);
    for path in [node.socket(), node.peers_socket(), node.pid()] {
        let _ = std::fs::remove_file(path);
    }
    let shown = node.sysctls().display().to_string();
    let count = restored.with_context(|| {
        format!(
            "{shown}: a node that was killed has left sysctls changed; check forwarding and rp_filter of its ports, \
             and net.ipv6.conf.all.forwarding"
        )
    })?;
    match count {
        None | Some(0) => Ok(()),
        Some(count) => output::print(&format!("{count} sysctls that a killed node had changed are restored\n")),
    }
}
