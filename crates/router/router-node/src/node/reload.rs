//! Reloads the cluster file in a running node: either all differences are applied, or none, with one line that says
//! why.

use config::InvalidKey;
use ipnet::IpNet;
use router::PortId;
use router_ports::Sysctls;
use router_ports::netlink::{NetlinkError, Requests};
use tracing::{info, warn};

use super::error::NodeError;
use super::local_routes::OpenedPort;
use super::messages::Command;
use super::open_ports::{self, OpenPort};
use super::port_state::PortState;
use super::state::Node;
use crate::cluster::{Cluster, ClusterFile, ConfigDiff, Node as NodeConfig, PortKind, batching_policy, diff};

/// Everything that a reload needs, opened and checked.
struct Prepared {
    cluster: Cluster,
    changes: ConfigDiff,
    /// By port index in the new file; `None` for a port that stays open.
    opened_ports: Vec<Option<OpenPort>>,
    policy: router::batch::Policy,
}

impl Node {
    /// Reads the cluster file and applies it. Returns the differences, one line each. With `is_trial` nothing changes.
    ///
    /// # Errors
    /// Returns why nothing has changed: one line with file, line, key, value and remedy.
    pub(super) fn reload(&mut self, is_trial: bool) -> Result<Vec<String>, String> {
        let file = ClusterFile::read(&self.settings.file).map_err(|error| error.to_string())?;
        let fault = |InvalidKey { key, what }| file.error_at(&key, what).to_string();
        let mut sysctls = std::mem::take(&mut self.sysctls);
        let prepared = self.prepare(file.cluster.clone(), &mut sysctls);
        self.sysctls = sysctls;
        if is_trial || prepared.is_err() {
            self.release_unused_interfaces(&file.cluster.nodes);
            return prepared.map(|prepared| prepared.changes.lines).map_err(fault);
        }
        let prepared = prepared.map_err(fault)?;
        let mut lines = prepared.changes.lines.clone();
        let key = format!("nodes[{}]", self.settings.node);
        if let Err(error) = self.set_addresses(&prepared.cluster.nodes[self.settings.node]) {
            self.release_unused_interfaces(&file.cluster.nodes);
            let what = format!("{error}; nothing was changed");
            return Err(fault(InvalidKey::new(format!("{key}.addresses"), what)));
        }
        let cuts_before = self.mtu_cuts();
        self.commit(prepared);
        lines.iter().for_each(|line| info!("reloaded: {line}"));
        // These lines are in the log already.
        lines.extend(self.mtu_cuts().into_iter().filter(|line| !cuts_before.contains(line)));
        Ok(lines)
    }

    /// Reloads on a signal; the log has the result.
    pub(super) fn reload_by_signal(&mut self) {
        match self.reload(false) {
            Ok(lines) if lines.is_empty() => info!("reloaded: nothing has changed"),
            Ok(_) => {}
            Err(error) => warn!("not reloaded: {error}"),
        }
    }

    fn prepare(&mut self, cluster: Cluster, sysctls: &mut Sysctls) -> Result<Prepared, InvalidKey> {
        let node = self.settings.node;
        let changes = diff(&self.settings.cluster, &cluster, node)?;
        let new = &cluster.nodes[node];
        let policy = batching_policy(&cluster.interconnect);
        if let Err(error) = policy.check() {
            return Err(InvalidKey::new("interconnect.latency_target_ns", error.to_string()));
        }
        self.check_vlans(new, &changes)?;
        let mut opened_ports = Vec::new();
        for (index, kept) in changes.kept_ports.iter().enumerate() {
            let opened_port = match kept {
                Some(_) => None,
                None => Some(self.open_for_reload(new, index, sysctls)?),
            };
            opened_ports.push(opened_port);
        }
        Ok(Prepared { policy, cluster, changes, opened_ports })
    }

    fn open_for_reload(&self, node: &NodeConfig, index: usize, sysctls: &mut Sysctls) -> Result<OpenPort, InvalidKey> {
        let kernel_forwards = self.filters.kernel_forwards();
        let params = self.settings.open_port_params(node, index, &self.local_addresses, kernel_forwards);
        open_ports::open_port(&params, sysctls).map_err(|error: NodeError| {
            let key = error.key(self.settings.node).unwrap_or_else(|| "nodes".to_owned());
            InvalidKey::new(key, format!("{error}; nothing was changed"))
        })
    }

    /// The XDP program of a port accepts the VLAN tags that it was loaded with.
    fn check_vlans(&self, new: &NodeConfig, changes: &ConfigDiff) -> Result<(), InvalidKey> {
        let old = self.settings.node();
        let by_xdp = |index: usize| self.ports[index].kind == PortKind::AfXdp.as_str();
        for (index, former) in changes.kept_ports.iter().enumerate().filter_map(|(index, kept)| Some((index, (*kept)?)))
        {
            let device = &new.ports[index].device;
            if by_xdp(former) && old.vlans_of(device) != new.vlans_of(device) {
                let what = format!(
                    "'{device}' is open by af-xdp, whose VLANs change only by a restart; restore them, run 'crosslane \
                     router down' and 'up', or set kind = \"af-packet\""
                );
                return Err(InvalidKey::new(format!("nodes[{}].ports[{index}].device", self.settings.node), what));
            }
        }
        Ok(())
    }

    /// Replaces the node's own addresses. If a new one cannot be added, none is.
    fn set_addresses(&self, new: &NodeConfig) -> Result<(), NetlinkError> {
        let old = &self.settings.node().addresses;
        let mut requests = Requests::open()?;
        let mut added: Vec<IpNet> = Vec::new();
        for address in new.addresses.iter().filter(|address| !old.contains(address)) {
            if let Err(error) = requests.add_address(self.slow_path, (*address).into()) {
                // The former addresses are still there.
                added.into_iter().for_each(|network| _ = requests.remove_address(self.slow_path, network));
                return Err(error);
            }
            added.push((*address).into());
        }
        for address in old.iter().filter(|address| !new.addresses.contains(address)) {
            if let Err(error) = requests.remove_address(self.slow_path, (*address).into()) {
                warn!(%address, "cannot remove an address that the file no longer has: {error}");
            }
        }
        Ok(())
    }

    /// Applies the new file. No step can fail.
    fn commit(&mut self, prepared: Prepared) {
        let Prepared { cluster, changes, opened_ports, policy } = prepared;
        let node = cluster.nodes[self.settings.node].clone();
        self.release_interfaces(&node);
        self.follow_mtus(&node, &changes);
        let mut former: Vec<Option<PortState>> = std::mem::take(&mut self.ports).into_iter().map(Some).collect();
        let (mut opened, mut attached) = (Vec::new(), Vec::new());
        for (kept, opened_port) in changes.kept_ports.iter().zip(opened_ports) {
            let (state, one) = match (kept, opened_port) {
                (Some(index), _) => {
                    let state = former[*index].take().expect("each port stays once");
                    (state, Ok(PortId(*index as u8)))
                }
                (None, Some(OpenPort { port, config, interface, kind, fallback, opened_interface })) => {
                    let state = PortState { kind, fallback, opened_interface, ..PortState::default() };
                    attached.extend(port.map(|port| (opened.len(), port)));
                    (state, Err(OpenedPort { interface, config }))
                }
                (None, None) => unreachable!("a port that is not kept was opened"),
            };
            self.ports.push(state);
            opened.push(one);
        }
        let stays: Vec<Option<PortId>> = opened.iter().map(|one| one.as_ref().ok().copied()).collect();
        let gone = self.local.renumber_ports(&node, opened);
        self.local.set_static(&node);
        self.renumbering.push(stays.clone());
        self.command(Command::RenumberPorts(gone, stays));
        self.command(Command::SetBatching(policy));
        self.command(Command::SetRedirects(node.redirects));
        self.settings.cluster = cluster;
        self.peers.set_digest(self.settings.cluster.digest());
        self.set_stale_routes();
        self.table.set_ports_without_kernel(self.settings.node().ports_without_kernel());
        self.kernel.all().into_iter().for_each(|change| self.local.apply_kernel_change(change));
        // Ports are attached last, so that the first packets find the configuration and the routes.
        self.apply_all_effects();
        self.update_filters();
        self.attach_ports(attached);
    }

    /// Restores the settings of interfaces that an abandoned reload has opened as ports.
    fn release_unused_interfaces(&mut self, nodes: &[NodeConfig]) {
        let Some(new) = nodes.get(self.settings.node) else { return };
        let opened = new.ports.iter().filter(|port| self.settings.node().port(&port.device).is_none());
        opened.for_each(|port| self.sysctls.restore(&port.device));
    }

    /// Restores the settings of interfaces that are not ports any more.
    fn release_interfaces(&mut self, new: &NodeConfig) {
        let is_port = |device: &String| new.ports.iter().any(|port| port.device == *device);
        let former: Vec<String> = self.settings.node().ports.iter().map(|port| port.device.clone()).collect();
        former.iter().filter(|device| !is_port(device)).for_each(|device| self.sysctls.restore(device));
    }

    /// Sets changed MTUs on the kernel interfaces of TAP ports that stay open.
    fn follow_mtus(&self, new: &NodeConfig, changes: &ConfigDiff) {
        let old = self.settings.node();
        for (port, former) in
            new.ports.iter().zip(&changes.kept_ports).filter_map(|(port, kept)| Some((port, (*kept)?)))
        {
            let is_other = port.kind == PortKind::Tap && port.mtu_bytes != old.ports[former].mtu_bytes;
            if is_other && let Err(error) = open_ports::set_tap_mtu(port) {
                warn!(port = port.device, "cannot set its MTU: {error}");
            }
        }
    }
}
