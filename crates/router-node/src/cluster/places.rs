//! Where the sockets, logs and directories of a running cluster lie.

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
        let ending = format!("-{:08x}", hash(file.as_os_str().as_bytes()) as u32);
        Self { directory: base.join(CLUSTERS).join(cluster.name.clone() + &ending) }
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

/// FNV-1a: the same in every release, which the standard library's hash is not.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}
