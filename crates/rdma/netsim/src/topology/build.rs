//! Topologies of known shapes: dumbbell, leaf-spine, three-tier and fat tree, and the published presets.

use std::str::FromStr;

use sim::Span;

use super::graph::{HOSTS_MAX, HostId, NetworkLink, NetworkNode, SWITCHES_MAX, SwitchId, Topology, TopologyError};
use crate::rate::LinkRate;

/// The dimensions of a Clos network of two or three tiers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiers {
    /// Number of pods; 1 in two tiers.
    pub pods: u32,
    /// Leaf switches per pod.
    pub leaves: u32,
    /// Hosts per leaf.
    pub hosts_per_leaf: u32,
    /// Spine switches per pod; in three tiers they are the aggregation tier.
    pub spines: u32,
    /// Core switches per spine of a pod. The first spine of every pod is linked to the first `cores_per_spine` cores,
    /// the second spine to the next ones, and so on. 0 in two tiers.
    pub cores_per_spine: u32,
    /// Rate of the hosts' links.
    pub host_rate: LinkRate,
    /// Rate of the links between leaves and spines.
    pub leaf_rate: LinkRate,
    /// Rate of the links between spines and cores.
    pub core_rate: LinkRate,
    /// Propagation delay of every link.
    pub delay: Span,
}

impl Tiers {
    /// Returns the load offered to the busiest links between switches, relative to their rate, when every host sends at
    /// the share `host_load` of its rate to random other hosts.
    ///
    /// Above 1, queues grow for as long as flows start, and slowdowns depend on how long that was.
    pub fn busiest_link_load(&self, host_load: f64) -> f64 {
        let [pods, leaves, under_leaf, spines, cores] =
            [self.pods, self.leaves, self.hosts_per_leaf, self.spines, self.cores_per_spine].map(f64::from);
        let (in_pod, hosts) = (leaves * under_leaf, pods * leaves * under_leaf);
        // What the hosts of a group of this size send to hosts outside it.
        let leaving_gbps =
            |group: f64| host_load * self.host_rate.gbps() * group * (hosts - group) / (hosts - 1.0).max(1.0);
        let leaf = leaving_gbps(under_leaf) / (spines * self.leaf_rate.gbps());
        let is_tiered = self.cores_per_spine > 0;
        let core = if is_tiered { leaving_gbps(in_pod) / (spines * cores * self.core_rate.gbps()) } else { 0.0 };
        leaf.max(core)
    }
}

/// A published topology (the simulation inputs of the authors of SRNIC, NSDI 2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyPreset {
    /// 256 hosts under 8 leaves and 8 spines, 100 and 400 Gb/s: not oversubscribed.
    LeafSpine256,
    /// 1,024 hosts in 16 pods of 4 leaves and 4 spines, 16 cores, 100 and 400 Gb/s: not oversubscribed.
    ThreeTier1024,
    /// 4,096 hosts in 8 pods of 32 leaves and 4 spines, 16 cores, 40 Gb/s at the edge: oversubscribed 4:1.
    ThreeTier4096,
}

impl TopologyPreset {
    /// All presets.
    pub const ALL: [Self; 3] = [Self::LeafSpine256, Self::ThreeTier1024, Self::ThreeTier4096];

    /// Returns the preset's name on the command line and in scenario files.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeafSpine256 => "leaf-spine-256",
            Self::ThreeTier1024 => "three-tier-1024",
            Self::ThreeTier4096 => "three-tier-4096",
        }
    }

    /// Returns the preset's dimensions.
    pub fn tiers(self) -> Tiers {
        let rate = |gbps| LinkRate::from_gbps(gbps).expect("the presets' rates are possible");
        let of = |pods, leaves, hosts_per_leaf, spines, cores_per_spine, [host, leaf, core]: [f64; 3]| Tiers {
            pods,
            leaves,
            hosts_per_leaf,
            spines,
            cores_per_spine,
            host_rate: rate(host),
            leaf_rate: rate(leaf),
            core_rate: rate(core),
            delay: Span::from_ns(1000.0),
        };
        match self {
            Self::LeafSpine256 => of(1, 8, 32, 8, 0, [100.0, 400.0, 400.0]),
            Self::ThreeTier1024 => of(16, 4, 16, 4, 4, [100.0, 400.0, 400.0]),
            Self::ThreeTier4096 => of(8, 32, 16, 4, 4, [40.0, 40.0, 400.0]),
        }
    }

    /// Builds the preset's topology.
    pub fn topology(self) -> Topology {
        three_tier(&self.tiers()).expect("the presets are networks")
    }
}

impl FromStr for TopologyPreset {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|preset| preset.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("'{name}' is not a topology; try one of {names}")
        })
    }
}

fn host(number: u32) -> NetworkNode {
    NetworkNode::Host(HostId(number))
}

fn switch(number: u32) -> NetworkNode {
    NetworkNode::Switch(SwitchId(number))
}

fn check_positive(dimensions: &[(&'static str, u32)]) -> Result<(), TopologyError> {
    match dimensions.iter().find(|(_, value)| *value == 0) {
        Some((what, _)) => Err(TopologyError::Shape { what, value: "0".to_owned(), remedy: "take at least 1" }),
        None => Ok(()),
    }
}

/// Builds a dumbbell: two switches with `hosts_per_side` hosts each and one link between them.
///
/// # Errors
/// When there are no hosts or too many.
pub fn dumbbell(
    hosts_per_side: u32,
    host_rate: LinkRate,
    middle_rate: LinkRate,
    delay: Span,
) -> Result<Topology, TopologyError> {
    check_positive(&[("hosts_per_side", hosts_per_side)])?;
    let hosts = hosts_per_side.saturating_mul(2);
    TopologyError::limit("hosts", hosts.into(), HOSTS_MAX)?;
    let edges = (0..hosts).map(|number| NetworkLink {
        ends: [host(number), switch(number / hosts_per_side)],
        rate: host_rate,
        delay,
    });
    let middle = NetworkLink { ends: [switch(0), switch(1)], rate: middle_rate, delay };
    Topology::new(hosts, 2, edges.chain([middle]).collect())
}

/// Builds a two-tier leaf-spine network: every leaf is linked to every spine.
///
/// # Errors
/// When a dimension is 0 or there are too many nodes.
pub fn leaf_spine(tiers: &Tiers) -> Result<Topology, TopologyError> {
    three_tier(&Tiers { pods: 1, cores_per_spine: 0, ..*tiers })
}

/// Builds a three-tier network of pods of leaves and spines; spine i of every pod is linked to the cores of group i.
///
/// # Errors
/// When a dimension is 0, there are too many nodes, or there are several pods without cores.
pub fn three_tier(tiers: &Tiers) -> Result<Topology, TopologyError> {
    let Tiers { pods, leaves, hosts_per_leaf, spines, cores_per_spine, .. } = *tiers;
    check_positive(&[("pods", pods), ("leaves", leaves), ("hosts_per_leaf", hosts_per_leaf), ("spines", spines)])?;
    let wide = |factors: [u32; 3]| factors.iter().map(|factor| u64::from(*factor)).fold(1, u64::saturating_mul);
    TopologyError::limit("hosts", wide([pods, leaves, hosts_per_leaf]), HOSTS_MAX)?;
    let switches = wide([pods, leaves, 1]) + wide([pods, spines, 1]) + wide([spines, cores_per_spine, 1]);
    TopologyError::limit("switches", switches, SWITCHES_MAX)?;
    let (leaves_all, spines_all) = (pods * leaves, pods * spines);
    let (first_spine, first_core) = (leaves_all, leaves_all + spines_all);
    let mut links = Vec::new();
    let mut link = |a, b, rate| links.push(NetworkLink { ends: [a, b], rate, delay: tiers.delay });
    let hosts = leaves_all * hosts_per_leaf;
    (0..hosts).for_each(|number| link(host(number), switch(number / hosts_per_leaf), tiers.host_rate));
    for leaf in 0..leaves_all {
        let pod_spines = first_spine + leaf / leaves * spines;
        (0..spines).for_each(|spine| link(switch(leaf), switch(pod_spines + spine), tiers.leaf_rate));
    }
    for spine in 0..spines_all {
        let its_cores = first_core + spine % spines * cores_per_spine;
        (0..cores_per_spine)
            .for_each(|core| link(switch(first_spine + spine), switch(its_cores + core), tiers.core_rate));
    }
    Topology::new(hosts, first_core + spines * cores_per_spine, links)
}

/// Builds the fat tree of switches with `ports` ports each (Al-Fares et al., SIGCOMM 2008): `ports`^3 / 4 hosts, all
/// links of one rate, not oversubscribed.
///
/// # Errors
/// When the number of ports is odd or too small, or there are too many nodes.
pub fn fat_tree(ports: u32, rate: LinkRate, delay: Span) -> Result<Topology, TopologyError> {
    if ports < 2 || !ports.is_multiple_of(2) {
        let remedy = "take an even number from 2 to 64";
        return Err(TopologyError::Shape { what: "ports", value: ports.to_string(), remedy });
    }
    let half = ports / 2;
    three_tier(&Tiers {
        pods: ports,
        leaves: half,
        hosts_per_leaf: half,
        spines: half,
        cores_per_spine: half,
        host_rate: rate,
        leaf_rate: rate,
        core_rate: rate,
        delay,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_counts() {
        for (preset, hosts, switches, links) in [
            (TopologyPreset::LeafSpine256, 256, 16, 320),
            (TopologyPreset::ThreeTier1024, 1024, 144, 1536),
            (TopologyPreset::ThreeTier4096, 4096, 304, 5248),
        ] {
            let topology = preset.topology();
            assert_eq!((topology.hosts(), topology.switches(), topology.links().len()), (hosts, switches, links));
            assert_eq!(preset.name().parse(), Ok(preset));
        }
        assert!("leaf-spine-512".parse::<TopologyPreset>().unwrap_err().contains("try one of leaf-spine-256"));
    }

    #[test]
    fn busiest_link_load_follows_from_traffic_that_leaves_the_group_and_link_rates() {
        // Of the 255 other hosts all but 31 are under another leaf; of 1,023 and of 4,095 all but 15.
        for (preset, busiest) in [
            (TopologyPreset::LeafSpine256, 0.5 * 224.0 / 255.0),
            (TopologyPreset::ThreeTier1024, 0.5 * 1008.0 / 1023.0),
            (TopologyPreset::ThreeTier4096, 0.5 * 4.0 * 4080.0 / 4095.0),
        ] {
            let found = preset.tiers().busiest_link_load(0.5);
            assert!((found / busiest - 1.0).abs() < 1e-9, "{}: {found} and not {busiest}", preset.name());
        }
        let thin = Tiers { core_rate: LinkRate::from_gbps(40.0).unwrap(), ..TopologyPreset::ThreeTier1024.tiers() };
        assert!(
            (thin.busiest_link_load(0.5) / (5.0 * 960.0 / 1023.0) - 1.0).abs() < 1e-9,
            "cores of a tenth of the rate"
        );
    }

    #[test]
    fn a_fat_tree_of_4_ports_has_16_hosts() {
        let rate = LinkRate::from_gbps(10.0).unwrap();
        let topology = fat_tree(4, rate, Span::ZERO).unwrap();
        assert_eq!((topology.hosts(), topology.switches(), topology.links().len()), (16, 20, 48));
        let error = fat_tree(5, rate, Span::ZERO).unwrap_err().to_string();
        assert_eq!(error, "ports 5; take an even number from 2 to 64");
        assert!(fat_tree(1000, rate, Span::ZERO).unwrap_err().to_string().contains("at most 65536"));
    }

    #[test]
    fn pods_without_cores_are_refused() {
        let tiers = Tiers { cores_per_spine: 0, ..TopologyPreset::ThreeTier1024.tiers() };
        let error = three_tier(&tiers).unwrap_err().to_string();
        assert_eq!(error, "host h64 cannot be reached from host h0; link their switches");
    }
}
