//! Settings of a monitor, and the configuration of its proxy.

use std::net::SocketAddr;
use std::path::PathBuf;

use control::proxy::{self as messages, Configuration};
use etcd::{RackStore, Revision};
use rack::{Access, AccessRule, Class, NodeRunDir, Rack, RunDir};
use stats_page::FallbackReason;

/// A rack in etcd, and the revision at which it was read.
#[derive(Clone, Debug)]
pub struct EtcdSource {
    /// The rack's keys.
    pub store: RackStore,
    /// The revision.
    pub revision: Revision,
}

/// Settings of a monitor.
#[derive(Clone, Debug)]
pub struct MonitorSettings {
    /// The rack.
    pub rack: Rack,
    /// Slot of the node.
    pub slot: usize,
    /// Directory of the running rack.
    pub run_dir: RunDir,
    /// Path of this program, which is also the proxy's.
    pub command: PathBuf,
    /// The rack in etcd, unless it is described by a file.
    pub etcd: Option<EtcdSource>,
    /// Whether to replace the proxy of the previous monitor, as after an upgrade.
    pub replaces_proxy: bool,
}

impl MonitorSettings {
    pub(crate) fn node(&self) -> &rack::Node {
        &self.rack.nodes[self.slot]
    }

    pub(crate) fn node_run_dir(&self) -> NodeRunDir {
        self.run_dir.node(&self.node().name)
    }

    /// Returns whether a proxy can keep the device open while another monitor opens it. A device bound to `vfio-pci`
    /// can be opened only once.
    fn may_outlive(&self) -> bool {
        let is_pci = self.rack.backend_of(self.node()) == rack::Backend::Pci;
        !(is_pci && self.rack.device.mode == Some(rack::PciMode::Vfio))
    }

    /// Returns the slot of the node that a program of this node can reach at an address, or why it cannot.
    pub(crate) fn remote_slot(&self, address: SocketAddr) -> Result<usize, FallbackReason> {
        match self.rack.slot_of(address.ip()) {
            None if address.ip().is_loopback() => Err(FallbackReason::NoListener),
            None => Err(FallbackReason::RemoteAddress),
            Some(slot) if slot == self.slot => Err(FallbackReason::NoListener),
            Some(slot) if !self.rack.allows(self.slot, slot, address.port()) => Err(FallbackReason::AccessDenied),
            Some(_) if self.node().address.is_ipv4() != address.is_ipv4() => Err(FallbackReason::RemoteAddress),
            Some(slot) => Ok(slot),
        }
    }

    /// Returns whether this node publishes a listener of another node.
    pub(crate) fn publishes(&self, port: u16) -> bool {
        self.rack.publish_of(self.node()).has(port)
    }

    /// Returns whether this node connects programs of all users.
    pub(crate) fn serves_all_users(&self) -> bool {
        *self.rack.publish_of(self.node()) != rack::Publish::Nothing
    }

    /// Returns whether the listener of this node at a port is to be announced to the node in slot `peer`, which
    /// publishes it.
    pub(crate) fn announces(&self, peer: usize, port: u16) -> bool {
        let publish = self.rack.nodes.get(peer).map(|node| self.rack.publish_of(node));
        publish.is_some_and(|publish| publish.has(port)) && self.rack.allows(peer, self.slot, port)
    }

    /// Returns the configuration of the node's proxy. `direct_obstacle` says why programs cannot write windows, if they
    /// cannot.
    pub fn configuration(&self, direct_obstacle: Option<&str>) -> Configuration {
        let rack = &self.rack;
        let node = |node: &rack::Node| messages::Node { name: node.name.clone(), address: node.address };
        let partition = |partition: rack::Partition| messages::Partition {
            class: match partition.class {
                Class::Latency => messages::Class::Latency,
                Class::Bulk => messages::Class::Bulk,
            },
            core: partition.core,
        };
        let layout = rack.window_layout();
        let spans = |spans: rack::Spans| messages::Spans {
            offset_bytes: spans.offset_bytes,
            span_bytes: spans.span_bytes,
            count: spans.count,
        };
        Configuration {
            version: messages::VERSION,
            own_slot: self.slot as u8,
            slots: rack.slots() as u8,
            nodes: rack.nodes.iter().map(node).collect(),
            rack_directory: self.node_run_dir().directory,
            control_partition_bytes: rack::CONTROL_PARTITION_BYTES,
            data_bytes: layout.data_bytes,
            spans: layout.spans.filter(|_| direct_obstacle.is_none()).map(spans),
            return_ns: rack.timeouts.return_ns as u64,
            successor_socket: self.may_outlive().then(|| self.node_run_dir().successor_socket()),
            keeps_partitions: rack.is_coherent(),
            partitions: rack.data_partitions().into_iter().map(partition).collect(),
            slice_bytes: rack.proxy.slice_bytes,
            is_failover: rack.failover,
            failover_port: rack.failover_port,
            timing: rack
                .link
                .as_ref()
                .map(|link| messages::Timing { name: link.timing.as_str().to_owned(), one_way_ns: link.one_way_ns }),
            access: access(rack, self.slot),
            publish: match rack.publish_of(self.node()) {
                rack::Publish::Nothing => None,
                rack::Publish::All => Some(messages::Publish::All),
                rack::Publish::Ports(ports) => Some(messages::Publish::Ports(ports.ranges().to_vec())),
            },
        }
    }
}

/// Returns the access rules for connections to the node in `slot`.
fn access(rack: &Rack, slot: usize) -> messages::Access {
    let rule = |rule: &AccessRule| messages::Rule {
        from: rule.from_node().and_then(|from| rack.node(from)).map(|(slot, _)| slot as u8),
        ports: rule.ports.as_ref().map(|ports| ports.ranges().to_vec()),
        allows: rule.action == Access::Allow,
    };
    let rules = rack.access.iter().filter(|rule| rule.applies_to(&rack.nodes[slot].name)).map(rule).collect();
    messages::Access { rules, allows_others: rack.access_default == Access::Allow }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::proxy::ToProxy;
    use rack::{ACCESS_PARTS_MAX, Backend, RackFile};
    use std::path::Path;

    fn settings(rules: &str) -> MonitorSettings {
        let text = Rack::example(3, Backend::Shm, None, rack::Trust::Proxy).to_string() + rules;
        let rack = RackFile::parse(Path::new("r.toml"), text.as_bytes()).unwrap().rack;
        let run_dir = RunDir::new(Path::new("/base"), &rack, Path::new("/r.toml"));
        MonitorSettings { rack, slot: 1, run_dir, command: PathBuf::new(), etcd: None, replaces_proxy: false }
    }

    #[test]
    fn the_proxy_enforces_the_rules_by_which_the_monitor_answers() {
        let rules = [
            "[[access]]\nto = \"a\"\naction = \"deny\"",
            "[[access]]\nfrom = \"a\"\nto = \"b\"\nports = \"80,6000-6010\"\naction = \"deny\"",
            "[[access]]\nfrom = \"c\"\nports = 81\naction = \"allow\"",
            "[[access]]\nfrom = \"c\"\naction = \"deny\"",
        ];
        let settings = settings(&format!("\n{}\n", rules.join("\n")));
        let configuration = settings.configuration(None);
        for from in [0, 2] {
            for port in [1, 79, 80, 81, 5999, 6000, 6005, 6010, 6011, 65535] {
                let allows = settings.rack.allows(from, settings.slot, port);
                assert_eq!(configuration.access.admits(from as u8, port), allows, "{from} {port}");
            }
        }
        assert_eq!(configuration.access.rules.len(), 3, "one speaks of another node");
    }

    #[test]
    fn the_maximum_number_of_rules_fits_a_message() {
        let rule = "[[access]]\nfrom = \"c\"\nports = \"60000-60001\"\naction = \"allow\"\n";
        let configuration = settings(&format!("\n{}", rule.repeat(ACCESS_PARTS_MAX / 2))).configuration(None);
        let (own, _proxys) = control::Channel::pair().unwrap();
        own.send(&ToProxy::Configure(Box::new(configuration)), &[]).unwrap();
    }
}
