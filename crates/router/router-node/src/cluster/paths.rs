//! Paths of the sockets, logs and directories of a running cluster.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::hash::fnv1a;
use super::model::Cluster;

/// Directory of all running clusters of a user.
const CLUSTERS: &str = "clusters";
/// Ending of the files with changed kernel settings.
const SYSCTLS: &str = "sysctls";

/// Paths of the files of a running cluster on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterPaths {
    /// The cluster's directory.
    pub directory: PathBuf,
}

/// Paths of the files of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    directory: PathBuf,
    name: String,
}

impl ClusterPaths {
    /// Returns the paths of the cluster that `file` describes: an absolute path without symbolic links. `base` is the
    /// directory of everything that runs.
    pub fn new(base: &Path, cluster: &Cluster, file: &Path) -> Self {
        Self { directory: base.join(CLUSTERS).join(cluster.name.clone() + &ending(file)) }
    }

    /// Returns the paths of all clusters that were ever started from this file, one for each name that the file gave
    /// them.
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

    /// Returns the names of the nodes with a PID file, running or not.
    pub fn started(&self) -> Vec<String> {
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let name = |file: OsString| Some(file.to_str()?.strip_suffix(".pid")?.to_owned());
        let mut names: Vec<String> = files.filter_map(name).collect();
        names.sort();
        names
    }

    /// Returns the paths of a node.
    pub fn node(&self, name: &str) -> NodePaths {
        NodePaths { directory: self.directory.clone(), name: name.to_owned() }
    }

    /// The directory of everything that runs.
    pub fn base(&self) -> &Path {
        self.directory.parent().and_then(Path::parent).unwrap_or(&self.directory)
    }

    /// Locked while the cluster is started or stopped.
    pub fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }
}

impl NodePaths {
    fn file(&self, ending: &str) -> PathBuf {
        self.directory.join(format!("{}.{ending}", self.name))
    }

    /// The management socket of the node.
    pub fn socket(&self) -> PathBuf {
        self.file("sock")
    }

    /// The socket at which metrics are served.
    pub fn metrics_socket(&self) -> PathBuf {
        self.file("metrics.sock")
    }

    /// The control socket for other nodes of this machine.
    pub fn peers_socket(&self) -> PathBuf {
        self.file("peers")
    }

    /// The log.
    pub fn log(&self) -> PathBuf {
        self.file("log")
    }

    /// The kernel settings that the node has changed, as they were before. It exists while they are changed.
    pub fn sysctls(&self) -> PathBuf {
        self.file(SYSCTLS)
    }

    /// The PID file, which the node locks as long as it lives.
    pub fn pid(&self) -> PathBuf {
        self.file("pid")
    }
}

/// Returns the files with the kernel settings that nodes of all clusters below `base` have changed.
pub fn all_sysctls(base: &Path) -> Vec<PathBuf> {
    let entries =
        |directory: PathBuf| fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = entries(base.join(CLUSTERS)).flat_map(entries);
    files.filter(|file| file.extension().is_some_and(|extension| extension == SYSCTLS)).collect()
}

/// Returns the suffix of the directories of all clusters of a file.
fn ending(file: &Path) -> String {
    format!("-{:08x}", fnv1a(file.as_os_str().as_bytes()) as u32)
}
