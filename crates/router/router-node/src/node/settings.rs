//! What a node is started with: the cluster, its place in it, and where its files lie.

use std::path::{Path, PathBuf};

use router::{Config, NodeId};

use super::error::NodeError;
use crate::cluster::{Cluster, ClusterPaths, Node as NodeConfig, NodePaths, fnv1a};
use crate::control::Key;
use crate::control::transport::{ControlAddress, TcpAddress};

/// What a node is of.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The cluster.
    pub cluster: Cluster,
    /// The node's place in it.
    pub node: usize,
    /// Where the cluster's files lie.
    pub paths: ClusterPaths,
    /// The cluster file, by an absolute path: it is read again when the node is told to.
    pub file: PathBuf,
}

impl NodeSettings {
    pub(super) fn id(&self) -> NodeId {
        NodeId(self.node as u8)
    }

    pub(super) fn node(&self) -> &NodeConfig {
        &self.cluster.nodes[self.node]
    }

    pub(super) fn forwarding(&self, seed: u64) -> Config {
        Config { seed, redirects: self.node().redirects, ..Config::new(self.id()) }
    }

    /// Makes the hardware address of a port that has none: the same whenever the node is started.
    pub(super) fn seed(&self, device: &str) -> u64 {
        fnv1a(format!("{}/{}/{device}", self.cluster.name, self.node().name).as_bytes())
    }

    pub(super) fn node_paths(&self) -> NodePaths {
        self.paths.node(&self.node().name)
    }

    /// Where a node is reached by this one.
    pub(super) fn place(&self, node: &NodeConfig, key: Option<&Key>) -> Result<ControlAddress, NodeError> {
        let Some(address) = node.control else {
            return Ok(ControlAddress::Unix(self.paths.node(&node.name).peers_socket()));
        };
        let local_ip = self.node().control.ok_or(NodeError::Missing("control"))?.ip();
        let key = key.cloned().ok_or(NodeError::Missing("key"))?;
        Ok(ControlAddress::Tcp(TcpAddress { address, local_ip, key }))
    }

    /// Where the cluster file lies, and files of packets whose paths are relative.
    pub(super) fn folder(&self) -> &Path {
        self.file.parent().unwrap_or(Path::new("/"))
    }
}
