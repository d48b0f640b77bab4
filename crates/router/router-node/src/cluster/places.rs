//! Where the sockets, logs and directories of a running cluster lie.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::Cluster;

/// The folder of all running clusters of a user.
const CLUSTERS: &str = "clusters";

/// Where the files of a running cluster lie on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The cluster's directory.
    pub directory: PathBuf,
}

/// Where the files of one node lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlaces {
    directory: PathBuf,
    name: String,
}

impl Places {
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
    pub fn node(&self, name: &str) -> NodePlaces {
        NodePlaces { directory: self.directory.clone(), name: name.to_owned() }
    }

    /// Held while the cluster is brought up or down.
    pub fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }
}

impl NodePlaces {
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
    format!("-{:08x}", hash(file.as_os_str().as_bytes()) as u32)
}

/// FNV-1a: the same in every release, which the standard library's hash is not.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}
