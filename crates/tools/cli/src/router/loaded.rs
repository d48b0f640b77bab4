//! What `--cluster` names, and where the files of its nodes lie.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rack::RunDir;
use router_node::cluster::{ClusterFile, ClusterPaths};

use crate::rack_dir;
use crate::wrong_use::WrongUse;

/// Nodes on the command line.
#[derive(clap::Args)]
pub struct NodeOptions {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    pub cluster: PathBuf,
    /// This node only
    #[arg(long, value_name = "NODE")]
    pub node: Option<String>,
}

/// A cluster, and where its sockets, logs and directories lie.
pub struct LoadedCluster {
    /// What the file says.
    pub file: ClusterFile,
    /// Where everything lies.
    pub places: ClusterPaths,
    /// The file, by an absolute path without links.
    pub path: PathBuf,
}

impl LoadedCluster {
    /// Reads a cluster file.
    pub fn read(path: &Path) -> Result<Self> {
        let file = ClusterFile::read(path).map_err(WrongUse::of)?;
        let canonical = std::fs::canonicalize(path)
            .map_err(|error| WrongUse::of(format!("{}: {error}; check --cluster", path.display())))?;
        let places = ClusterPaths::new(&base(), &file.cluster, &canonical);
        Ok(Self { file, places, path: canonical })
    }

    /// Makes the cluster's directory, where no other user can meddle with it.
    pub fn prepare(&self) -> Result<()> {
        rack_dir::prepare_below(&base(), &self.places.directory)
            .with_context(|| format!("directory of {}", self.file.shown()))
    }

    /// The nodes that are asked about: the one of that name, or all.
    pub fn chosen(&self, name: Option<&str>) -> Result<Vec<usize>> {
        let nodes = &self.file.cluster.nodes;
        let Some(name) = name else { return Ok((0..nodes.len()).collect()) };
        match nodes.iter().position(|node| node.name == name) {
            Some(index) => Ok(vec![index]),
            None => bail!(unknown(&self.file, name)),
        }
    }

    /// The nodes that this machine is to run.
    pub fn here(&self) -> Vec<usize> {
        let nodes = &self.file.cluster.nodes;
        // Only an address of this machine can be bound to; a node that is up has taken it already.
        let is_here = |index: &usize| match nodes[*index].control {
            None => true,
            Some(control) => TcpListener::bind((control.ip(), 0)).is_ok(),
        };
        (0..nodes.len()).filter(is_here).collect()
    }

    /// The name of a node.
    pub fn name(&self, index: usize) -> &str {
        &self.file.cluster.nodes[index].name
    }
}

/// That a file has no such node.
pub fn unknown(file: &ClusterFile, name: &str) -> WrongUse {
    let (shown, names) = (file.shown(), file.cluster.names());
    WrongUse::of(format!("node '{name}' is not in {shown}; choose one of {names} with --node"))
}

/// A cluster file by an absolute path without links; it may be gone by now, but not the folder that it was in.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let found = std::fs::canonicalize(path).or_else(|error| match path.file_name() {
        Some(name) => Ok(std::fs::canonicalize(folder)?.join(name)),
        None => Err(error),
    });
    found.map_err(|error| WrongUse::of(format!("{}: {error}; check --cluster", path.display())).into())
}

/// The base of everything that runs.
pub fn base() -> PathBuf {
    RunDir::base(&rack_dir::chosen(None))
}
