//! The table `topology` of a scenario file.

use std::path::PathBuf;

use serde::Deserialize;
use sim::Span;

use super::simulated_ns;
use crate::import::{HostNumbers, ImportedTopology, TopologyFormat, read_topology};
use crate::rate::LinkRate;
use crate::topology::{
    HostId, NetworkLink, NetworkNode, SwitchId, Tiers, Topology, TopologyPreset, dumbbell, fat_tree, three_tier,
};

/// A topology, checked during parsing, so that an error can name its line.
#[derive(Debug, Deserialize)]
#[serde(try_from = "TopologyFile")]
pub(super) struct TopologyTable {
    pub topology: Topology,
    /// The preset's name, or the kind and the number of hosts in the same form.
    pub name: String,
    /// The numbers that files of flows give to the hosts.
    pub hosts: HostNumbers,
    /// The links that lose packets by the topology's file, and the share that each loses.
    pub losses: Vec<(usize, f64)>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyFile {
    kind: Kind,
    preset: Option<String>,
    hosts_per_side: Option<u32>,
    pods: Option<u32>,
    leaves: Option<u32>,
    hosts_per_leaf: Option<u32>,
    spines: Option<u32>,
    cores_per_spine: Option<u32>,
    ports: Option<u32>,
    host_gbps: Option<f64>,
    middle_gbps: Option<f64>,
    leaf_gbps: Option<f64>,
    core_gbps: Option<f64>,
    #[serde(default = "delay_default", deserialize_with = "simulated_ns")]
    delay: f64,
    hosts: Option<Vec<String>>,
    switches: Option<Vec<String>>,
    lines: Option<Vec<LinkFile>>,
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Preset,
    Dumbbell,
    LeafSpine,
    ThreeTier,
    FatTree,
    Graph,
    Ns3,
    Htsim,
}

impl Kind {
    /// Returns the kind's name in scenario files.
    const fn name(self) -> &'static str {
        match self {
            Self::Preset => "preset",
            Self::Dumbbell => "dumbbell",
            Self::LeafSpine => "leaf-spine",
            Self::ThreeTier => "three-tier",
            Self::FatTree => "fat-tree",
            Self::Graph => "graph",
            Self::Ns3 => "ns3",
            Self::Htsim => "htsim",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFile {
    ends: [String; 2],
    gbps: f64,
    #[serde(default = "delay_default", deserialize_with = "simulated_ns")]
    delay: f64,
}

fn delay_default() -> f64 {
    1000.0
}

/// Returns the value of a key that the kind of topology requires.
fn needed<T>(value: Option<T>, key: &str) -> Result<T, String> {
    value.ok_or_else(|| format!("{key} is missing; this kind of topology needs it"))
}

fn rate(gbps: Option<f64>, key: &str) -> Result<LinkRate, String> {
    let gbps = needed(gbps, key)?;
    LinkRate::from_gbps(gbps).ok_or_else(|| format!("{key} is {gbps}; write Gb/s from 0.001 to 10000"))
}

impl TryFrom<TopologyFile> for TopologyTable {
    type Error = String;

    fn try_from(file: TopologyFile) -> Result<Self, String> {
        let (delay, kind) = (Span::from_ns(file.delay), file.kind);
        let built = match kind {
            Kind::Preset => {
                let preset: TopologyPreset = needed(file.preset, "preset")?.parse()?;
                return Ok(Self { name: preset.name().to_owned(), ..Self::named(kind, preset.topology()) });
            }
            Kind::Ns3 => return Self::imported(kind, file.file, TopologyFormat::Ns3),
            Kind::Htsim => return Self::imported(kind, file.file, TopologyFormat::Htsim),
            Kind::Graph => return file.graph().map(|topology| Self::named(kind, topology)),
            Kind::Dumbbell => {
                let (host, middle) = (rate(file.host_gbps, "host_gbps")?, rate(file.middle_gbps, "middle_gbps")?);
                dumbbell(needed(file.hosts_per_side, "hosts_per_side")?, host, middle, delay)
            }
            Kind::FatTree => fat_tree(needed(file.ports, "ports")?, rate(file.host_gbps, "host_gbps")?, delay),
            Kind::LeafSpine => three_tier(&file.tiers(false)?),
            Kind::ThreeTier => three_tier(&file.tiers(true)?),
        };
        built.map(|topology| Self::named(kind, topology)).map_err(|error| error.to_string())
    }
}

impl TopologyTable {
    fn named(kind: Kind, topology: Topology) -> Self {
        let (name, hosts) = (format!("{}-{}", kind.name(), topology.hosts()), HostNumbers::Below(topology.hosts()));
        Self { name, topology, hosts, losses: Vec::new() }
    }

    fn imported(kind: Kind, file: Option<PathBuf>, format: TopologyFormat) -> Result<Self, String> {
        let imported = read_topology(&needed(file, "file")?, format).map_err(|error| error.to_string())?;
        let ImportedTopology { topology, hosts, losses } = imported;
        Ok(Self { hosts, losses, ..Self::named(kind, topology) })
    }
}

impl TopologyFile {
    fn tiers(&self, has_cores: bool) -> Result<Tiers, String> {
        let leaf_rate = rate(self.leaf_gbps, "leaf_gbps")?;
        Ok(Tiers {
            pods: if has_cores { needed(self.pods, "pods")? } else { 1 },
            leaves: needed(self.leaves, "leaves")?,
            hosts_per_leaf: needed(self.hosts_per_leaf, "hosts_per_leaf")?,
            spines: needed(self.spines, "spines")?,
            cores_per_spine: if has_cores { needed(self.cores_per_spine, "cores_per_spine")? } else { 0 },
            host_rate: rate(self.host_gbps, "host_gbps")?,
            leaf_rate,
            core_rate: if has_cores { rate(self.core_gbps, "core_gbps")? } else { leaf_rate },
            delay: Span::from_ns(self.delay),
        })
    }

    fn graph(self) -> Result<Topology, String> {
        let (hosts, switches) = (needed(self.hosts, "hosts")?, self.switches.unwrap_or_default());
        let mut names = hosts.clone();
        names.extend(switches.iter().cloned());
        let mut sorted: Vec<&String> = names.iter().collect();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("'{}' names two nodes; give each its own name", twice[0]));
        }
        let node = |name: &String| match names.iter().position(|known| known == name) {
            Some(index) if index < hosts.len() => Ok(NetworkNode::Host(HostId(index as u32))),
            Some(index) => Ok(NetworkNode::Switch(SwitchId((index - hosts.len()) as u32))),
            None => Err(format!("link end '{name}' is neither in hosts nor in switches; add it to one of them")),
        };
        let link = |file: &LinkFile| {
            let ends = [node(&file.ends[0])?, node(&file.ends[1])?];
            Ok(NetworkLink { ends, rate: rate(Some(file.gbps), "gbps")?, delay: Span::from_ns(file.delay) })
        };
        let links: Result<Vec<NetworkLink>, String> = needed(self.lines, "lines")?.iter().map(link).collect();
        let (hosts, switches) = (hosts.len() as u32, switches.len() as u32);
        Topology::named(hosts, switches, links?, names).map_err(|error| error.to_string())
    }
}
