//! The settings of a node: the cluster, its index in it, and the paths of its files.

use std::path::{Path, PathBuf};

use router::{Config, NodeId};
use router_ports::LocalAddresses;

use super::error::NodeError;
use super::open_ports::OpenPortParams;
use crate::cluster::{Cluster, ClusterPaths, Node as NodeConfig, NodePaths, fnv1a};
use crate::control::Key;
use crate::control::transport::{ControlAddress, TcpAddress};

/// The settings that a node is started with.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The cluster.
    pub cluster: Cluster,
    /// The index of the node.
    pub node: usize,
    /// The paths of the cluster's files.
    pub paths: ClusterPaths,
    /// The absolute path of the cluster file, for reloads.
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

    /// Returns the seed of the hardware address of a port without one, the same at each start.
    fn seed(&self, device: &str) -> u64 {
        fnv1a(format!("{}/{}/{device}", self.cluster.name, self.node().name).as_bytes())
    }

    pub(super) fn node_paths(&self) -> NodePaths {
        self.paths.node(&self.node().name)
    }

    /// Returns the control address of another node.
    pub(super) fn control_address(&self, node: &NodeConfig, key: Option<&Key>) -> Result<ControlAddress, NodeError> {
        let Some(address) = node.control else {
            return Ok(ControlAddress::Unix(self.paths.node(&node.name).peers_socket()));
        };
        let local_ip = self.node().control.ok_or(NodeError::Missing("control"))?.ip();
        let key = key.cloned().ok_or(NodeError::Missing("key"))?;
        Ok(ControlAddress::Tcp(TcpAddress { address, local_ip, key }))
    }

    /// Returns the parameters of opening a port of the node, whose settings may be those of a newer file.
    pub(super) fn open_port_params<'a>(
        &'a self,
        node: &'a NodeConfig,
        index: usize,
        local: &'a LocalAddresses,
        kernel_forwards: bool,
    ) -> OpenPortParams<'a> {
        let (seed, folder) = (self.seed(&node.ports[index].device), self.folder());
        OpenPortParams { node, index, seed, folder, local, kernel_forwards }
    }

    /// Returns the directory of the cluster file, the base of relative paths of capture files.
    fn folder(&self) -> &Path {
        self.file.parent().unwrap_or(Path::new("/"))
    }
}
