//! The cores of each memory node.

use std::fs;

use machine::{CorePair, in_cpu_list};
use pcie::test::Numa;

use crate::error::{Error, Result};

const NODES: &str = "/sys/devices/system/node";

/// The memory nodes of a machine with their cores.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Number and cores (such as `0-3,8`) of each node.
    nodes: Vec<(usize, String)>,
}

/// The cores and the memory node of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// The core that models the device and makes the transfers.
    pub device_core: usize,
    /// The core that models the host, on the node of the memory.
    pub host_core: usize,
    /// The node of the memory.
    pub memory_node: usize,
}

impl Topology {
    /// Returns the topology of this machine, which has one node if sysfs lists none.
    pub fn of_this_machine() -> Self {
        let online = fs::read_to_string(format!("{NODES}/online")).unwrap_or_else(|_| "0".to_owned());
        let with_cores = |node| {
            let cores = fs::read_to_string(format!("{NODES}/node{node}/cpulist")).ok()?;
            Some((node, cores.trim().to_owned()))
        };
        Self { nodes: (0..1024).filter(|node| in_cpu_list(online.trim(), *node)).filter_map(with_cores).collect() }
    }

    /// Returns the number of nodes.
    pub fn count(&self) -> usize {
        self.nodes.len().max(1)
    }

    /// Returns the node of a core.
    pub fn node_of(&self, core: usize) -> usize {
        self.nodes.iter().find(|(_, cores)| in_cpu_list(cores, core)).map_or(0, |(node, _)| *node)
    }

    /// Chooses the cores of a test.
    ///
    /// # Errors
    /// The machine has only one core available, or a remote test finds no core on a second node.
    pub fn roles(&self, numa: Numa) -> Result<Roles> {
        let cores =
            |keep: &dyn Fn(usize) -> bool| CorePair::among(keep).map_err(|error| Error::Failed(format!("{error:#}")));
        let any = cores(&|_| true)?;
        let Some(any) = any else {
            return Error::failed("memory: this process may use one core only; host and device need two");
        };
        let device_node = self.node_of(any.server);
        if numa == Numa::Local {
            let local = cores(&|core| self.node_of(core) == device_node)?.unwrap_or(any);
            return Ok(Roles { device_core: local.server, host_core: local.client, memory_node: device_node });
        }
        self.check_remote()?;
        // Chooses the first core of another node. `CorePair::among` returns a pair, so the filter also accepts the
        // device's own core.
        let pair = cores(&|core| core == any.server || self.node_of(core) != device_node)?;
        let Some(pair) = pair else {
            return Error::failed(
                "memory: --numa remote needs a core on a second node; the cores that this process may use are on one",
            );
        };
        let memory_node = self.node_of(pair.client);
        Ok(Roles { device_core: pair.server, host_core: pair.client, memory_node })
    }

    /// Checks that there is a remote node.
    ///
    /// # Errors
    /// The machine has one node only.
    pub fn check_remote(&self) -> Result<()> {
        if self.count() > 1 {
            return Ok(());
        }
        Error::wrong_use("memory: --numa remote needs two memory nodes; this machine has one, so choose --numa local")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(nodes: &[(usize, &str)]) -> Topology {
        Topology { nodes: nodes.iter().map(|(node, cores)| (*node, (*cores).to_owned())).collect() }
    }

    #[test]
    fn a_core_is_on_the_node_that_lists_it() {
        let two = of(&[(0, "0-3,8"), (1, "4-7")]);
        assert_eq!([two.node_of(8), two.node_of(5)], [0, 1]);
        assert!(two.check_remote().is_ok());
    }

    #[test]
    fn one_node_has_no_remote_memory() {
        let error = of(&[(0, "0-3")]).roles(Numa::Remote).unwrap_err();
        assert!(error.is_wrong_use() && error.to_string().contains("--numa local"), "{error}");
    }

    #[test]
    fn roles_are_two_different_cores() {
        let roles = Topology::of_this_machine().roles(Numa::Local).unwrap();
        assert_ne!(roles.device_core, roles.host_core);
    }
}
