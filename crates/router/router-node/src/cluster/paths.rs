//! Where the sockets, logs and directories of a running cluster lie.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::hash::fnv1a;
use super::model::Cluster;

/// The folder of all running clusters of a user.
const CLUSTERS: &str = "clusters";

/// Where the files of a running cluster lie on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterPaths {
    /// The cluster's directory.
    pub directory: PathBuf,
}

/// Where the files of one node lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    directory: PathBuf,
    name: String,
}

impl ClusterPaths {
    /// The places of a cluster whose file is `file`, an absolute path without links, below the base of everything that
    /// runs.
    pub fn new(base: &Path, cluster: &Cluster, file: &Path) -> Self {
        Self { directory: base.join(CLUSTERS).join(cluster.name.clone() + &ending(file)) }
    }

    /// The places of all clusters that were ever brought up by this file, whatever it says now: one for each name that
    /// it gave them.
    pub fn all_of(base: &Path, file: &Path) -> Vec<Self> {
        let ending = ending(file);
        let directories = fs::read_dir(base.join(CLUSTERS)).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_of_file = |directory: &PathBuf| {
            directory.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(&ending))
        };
        let mut found: Vec<PathBuf> = directories.filter(is_of_file).collect();
        found.sort();
        found.into_iter().map(|directory| Self { directory }).collect()
    }

    /// The names of the nodes that have left the file with their process number, whether they live or not.
    pub fn started(&self) -> Vec<String> {
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let name = |file: OsString| Some(file.to_str()?.strip_suffix(".pid")?.to_owned());
        let mut names: Vec<String> = files.filter_map(name).collect();
        names.sort();
        names
    }

    /// The places of a node.
    pub fn node(&self, name: &str) -> NodePaths {
        NodePaths { directory: self.directory.clone(), name: name.to_owned() }
    }

    /// Held while the cluster is brought up or down.
    pub fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }
}

impl NodePaths {
    fn file(&self, ending: &str) -> PathBuf {
        self.directory.join(format!("{}.{ending}", self.name))
    }

    /// Where the node answers commands.
    pub fn socket(&self) -> PathBuf {
        self.file("sock")
    }

    /// Where other nodes of this machine reach it.
    pub fn peers_socket(&self) -> PathBuf {
        self.file("peers")
    }

    /// What the node says.
    pub fn log(&self) -> PathBuf {
        self.file("log")
    }

    /// Held by the node as long as it lives; its process number stands in it.
    pub fn pid(&self) -> PathBuf {
        self.file("pid")
    }
}

/// What the directories of a file's clusters end with.
fn ending(file: &Path) -> String {
    format!("-{:08x}", fnv1a(file.as_os_str().as_bytes()) as u32)
}
