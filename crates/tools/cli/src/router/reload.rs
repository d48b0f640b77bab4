//! `crosslane router reload`: makes the nodes that are up read the cluster file again.

use anyhow::{Result, bail};
use router_node::management::{Request, Response};

use super::loaded::{LoadedCluster, NodeOptions};
use super::request::request;
use crate::output;
use crate::run_lock::lock_run_dir;
use crate::wrong_use::WrongUse;

/// Asks all running nodes of this machine whether they can apply the file, and only then makes all of them apply it.
pub fn main(options: &NodeOptions) -> Result<()> {
    let cluster = LoadedCluster::read(&options.cluster)?;
    let chosen = cluster.select(options.node.as_deref())?;
    let shown = cluster.file.shown();
    if !cluster.paths.directory.exists() {
        bail!("no node of {shown} is up; start it with 'crosslane router up --cluster {shown}'");
    }
    let _lock = lock_run_dir(&cluster.paths.lock(), shown)?;
    let mut up = Vec::new();
    for index in chosen {
        if reload(&cluster, index, true)?.is_some() {
            up.push(index);
        }
    }
    if up.is_empty() {
        bail!("no node of {shown} is up; start it with 'crosslane router up --cluster {shown}'");
    }
    let mut text = String::new();
    for index in up {
        let name = cluster.name(index);
        let Some(changes) = reload(&cluster, index, false)? else { bail!("node '{name}' has ended meanwhile") };
        if changes.is_empty() {
            text += &format!("node {name}: nothing has changed\n");
        }
        changes.iter().for_each(|change| text += &format!("node {name}: {change}\n"));
    }
    output::print(&text)
}

/// Makes a node check (`is_trial`) or apply the file. Returns its changes; `None` if the node is not up.
fn reload(cluster: &LoadedCluster, index: usize, is_trial: bool) -> Result<Option<Vec<String>>> {
    let name = cluster.name(index);
    match request(&cluster.paths.node(name), Request::Reload { is_trial })? {
        Some((Response::Reloaded { changes }, _)) => Ok(Some(changes)),
        Some((Response::InvalidConfig { fault }, _)) => bail!(WrongUse::of(fault)),
        Some((other, _)) => bail!("node '{name}' answers {other:?} to a request to reload; use one release for all"),
        None => Ok(None),
    }
}
