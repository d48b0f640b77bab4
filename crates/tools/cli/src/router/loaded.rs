//! The cluster that `--cluster` names, and the paths of its files.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use router_node::cluster::{ClusterFile, ClusterPaths};

use crate::rack_dir;
use crate::wrong_use::WrongUse;

/// Options that select nodes of a cluster.
#[derive(clap::Args)]
pub struct NodeOptions {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    pub cluster: PathBuf,
    /// This node only
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
}

/// A cluster, and the paths of its sockets, logs and directories.
pub struct LoadedCluster {
    /// The cluster file.
    pub file: ClusterFile,
    /// Paths of its sockets, logs and directories.
    pub paths: ClusterPaths,
    /// Absolute path of the file, with symbolic links resolved.
    pub path: PathBuf,
}

impl LoadedCluster {
    /// Reads a cluster file.
    pub fn read(path: &Path) -> Result<Self> {
        let file = ClusterFile::read(path).map_err(WrongUse::of)?;
        let canonical = std::fs::canonicalize(path)
            .map_err(|error| WrongUse::of(format!("{}: {error}; check --cluster", path.display())))?;
        let paths = ClusterPaths::new(&rack_dir::base(), &file.cluster, &canonical);
        Ok(Self { file, paths, path: canonical })
    }

    /// Creates the directory of the cluster so that no other user can change or replace it.
    pub fn prepare(&self) -> Result<()> {
        rack_dir::prepare_below(&rack_dir::base(), &self.paths.directory)
            .with_context(|| format!("directory of {}", self.file.shown()))
    }

    /// Returns the index of the node with that name, or the indices of all nodes.
    pub fn select(&self, name: Option<&str>) -> Result<Vec<usize>> {
        let nodes = &self.file.cluster.nodes;
        let Some(name) = name else { return Ok((0..nodes.len()).collect()) };
        match nodes.iter().position(|node| node.name == name) {
            Some(index) => Ok(vec![index]),
            None => bail!(unknown(&self.file, name)),
        }
    }

    /// Returns the nodes that this machine runs: those without a control address, and those whose control address is
    /// this machine's.
    pub fn local(&self) -> Vec<usize> {
        let nodes = &self.file.cluster.nodes;
        // bind(2) succeeds only for addresses of this machine. Port 0, since a node that is up has bound its own port.
        let is_local = |index: &usize| match nodes[*index].control {
            None => true,
            Some(control) => TcpListener::bind((control.ip(), 0)).is_ok(),
        };
        (0..nodes.len()).filter(is_local).collect()
    }

    /// Returns the name of a node.
    pub fn name(&self, index: usize) -> &str {
        &self.file.cluster.nodes[index].name
    }
}

/// Returns the error for a node name that the file does not contain.
pub fn unknown(file: &ClusterFile, name: &str) -> WrongUse {
    let (shown, names) = (file.shown(), file.cluster.names());
    WrongUse::of(format!("node '{name}' is not in {shown}; choose one of {names} with --node"))
}

/// Returns the absolute path of a cluster file with symbolic links resolved. The file may be gone; its folder may not.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let found = std::fs::canonicalize(path).or_else(|error| match path.file_name() {
        Some(name) => Ok(std::fs::canonicalize(folder)?.join(name)),
        None => Err(error),
    });
    found.map_err(|error| WrongUse::of(format!("{}: {error}; check --cluster", path.display())).into())
}
