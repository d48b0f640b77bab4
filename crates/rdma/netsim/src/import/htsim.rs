//! The files of htsim (Broadcom/csg-htsim).
//!
//! * Connection matrix (`.cm`): lines `Nodes n` and `Connections n`, then one line for each flow as
//!   `from->to [id n] start ps size bytes`.
//! * Tiers of a fat tree (`.topo`): `Nodes`, `Tiers` and `Podsize`, then for each tier its links downwards.
//!
//! What a file asks for and this simulator does not model is an error: triggers, failures, priorities, switch
//! latencies, and limits of single queues.

use sim::{Span, Time};

use super::{HostNumbers, ImportError, ImportedTopology, Source, shown};
use crate::endpoint::Flow;
use crate::rate::LinkRate;
use crate::topology::{HOSTS_MAX, HostId, NetworkLink, NetworkNode, SWITCHES_MAX, SwitchId, Topology, TopologyError};

const FLOW: &str = "write 'from->to start ps size bytes' as in 0->7 start 0 size 64000";
const KEY: &str = "write 'name value' as in Radix_Down 8";
/// Latest start of a flow, in picoseconds: about eleven days.
const START_PS_MAX: f64 = 1e18;
/// Largest number of ports of a switch, and of links between two switches.
const PORTS_MAX: u32 = 512;
/// Longest delay of a link, in nanoseconds.
const DELAY_NS_MAX: u32 = 1_000_000_000;
const TIERS_MAX: usize = 3;

pub(super) fn flows(source: &Source<'_>, hosts: &HostNumbers) -> Result<Vec<Flow>, ImportError> {
    let (mut nodes, mut connections) = (None, None);
    let mut flows = Vec::new();
    for (line, text) in source.lines() {
        // Spaces around the arrow have no meaning.
        let text = text.split("->").map(str::trim).collect::<Vec<_>>().join("->");
        let mut words = text.split_whitespace();
        let Some(first) = words.next() else { continue };
        let mut count = |what: &str| {
            let value = words.next().unwrap_or("");
            source.value::<u32>(line, value, what, "write it as in Connections 15").map(|count| (line, count))
        };
        match first {
            "Nodes" => {
                let (line, number) = count("number of nodes")?;
                check_nodes(source, line, number, hosts)?;
                nodes = Some((line, number));
            }
            "Connections" => connections = Some(count("number of connections")?),
            "Triggers" | "Failures" => {
                let (_, number) = count("number")?;
                if number > 0 {
                    return Err(not_modelled(source, line, first));
                }
            }
            "trigger" | "failure" => return Err(not_modelled(source, line, first)),
            ends if ends.contains("->") => flows.push(flow(source, line, ends, words, hosts, nodes)?),
            _ => {
                let what = format!("'{}' is neither a count nor a connection; {FLOW}", shown(first));
                return Err(source.wrong(line, what));
            }
        }
    }
    match connections {
        Some((line, count)) if count as usize != flows.len() => {
            let what = format!("Connections {count}, but {} connections follow; write {0}", flows.len());
            Err(source.wrong(line, what))
        }
        _ => Ok(flows),
    }
}

/// Refuses more nodes than the topology has hosts, because the flows are of another network then.
fn check_nodes(source: &Source<'_>, line: usize, nodes: u32, hosts: &HostNumbers) -> Result<(), ImportError> {
    let count = match hosts {
        HostNumbers::Below(count) => *count,
        HostNumbers::Listed(numbers) => numbers.len() as u32,
    };
    match nodes > count {
        true => {
            Err(source.wrong(line, format!("Nodes {nodes}, but the topology has {count} hosts; write at most {count}")))
        }
        false => Ok(()),
    }
}

fn not_modelled(source: &Source<'_>, line: usize, what: &str) -> ImportError {
    source.wrong(line, format!("'{what}' is not modelled; remove it, and give each connection a start"))
}

fn flow<'a>(
    source: &Source<'_>,
    line: usize,
    ends: &str,
    mut words: impl Iterator<Item = &'a str>,
    hosts: &HostNumbers,
    nodes: Option<(usize, u32)>,
) -> Result<Flow, ImportError> {
    let (from, to) = ends.split_once("->").unwrap_or((ends, ""));
    let number = |text: &str| source.value::<u32>(line, text, "host number", FLOW);
    let numbers = [number(from)?, number(to)?];
    if let Some((of, nodes)) = nodes
        && let Some(number) = numbers.into_iter().find(|number| *number >= nodes)
    {
        let what = format!("there is no node {number}; line {of} has {nodes}, write a number below");
        return Err(source.wrong(line, what));
    }
    let [from, to] = source.hosts(line, numbers, hosts)?;
    let (mut start, mut bytes) = (None, None);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or("");
        match word {
            "start" => {
                let ps = source.value::<f64>(line, value, "time in picoseconds", FLOW)?;
                if !(0.0..START_PS_MAX).contains(&ps) {
                    return Err(source.wrong(line, format!("'{value}' is not a time in picoseconds; {FLOW}")));
                }
                start = Some(Time::from_ps(ps as u64));
            }
            "size" => bytes = Some(source.value::<u64>(line, value, "size", FLOW)?).filter(|bytes| *bytes > 0),
            "id" | "msg" => {
                source.value::<u32>(line, value, "number", FLOW)?;
            }
            "trigger" | "send_done_trigger" | "recv_done_trigger" | "prio" | "addon" => {
                return Err(not_modelled(source, line, word));
            }
            _ => return Err(source.wrong(line, format!("'{}' is not a word of a connection; {FLOW}", shown(word)))),
        }
    }
    match (start, bytes) {
        (Some(start), Some(bytes)) => Ok(Flow::new(start, from, to, bytes)),
        (None, _) => Err(source.wrong(line, format!("the connection has no start; {FLOW}"))),
        (_, None) => Err(source.wrong(line, format!("the connection has no size above 0; {FLOW}"))),
    }
}

/// The links below the switches of a tier.
#[derive(Clone, Copy, Debug, Default)]
struct Tier {
    gbps: Option<u32>,
    radix_down: Option<u32>,
    radix_up: Option<u32>,
    bundle: Option<u32>,
    delay_ns: Option<u32>,
}

/// The lines of a `.topo` file.
#[derive(Debug, Default)]
struct Tiers {
    nodes: Option<u32>,
    tiers: Option<u32>,
    pod: Option<u32>,
    of: [Option<Tier>; TIERS_MAX],
}

pub(super) fn topology(source: &Source<'_>) -> Result<ImportedTopology, ImportError> {
    let mut tiers = Tiers::default();
    let mut current = None;
    for (line, text) in source.lines() {
        let mut words = text.split_whitespace();
        let (name, value) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let lower = name.to_ascii_lowercase();
        let number = source.value::<u32>(line, value, "number", KEY)?;
        let header = match lower.as_str() {
            "nodes" => Some(&mut tiers.nodes),
            "tiers" => Some(&mut tiers.tiers),
            "podsize" => Some(&mut tiers.pod),
            _ => None,
        };
        if let Some(header) = header {
            set(source, line, name, header, number)?;
        } else if lower == "tier" {
            let tier = tiers.of.get_mut(number as usize);
            let tier = tier.ok_or_else(|| source.wrong(line, format!("Tier {number}; write Tier 0, 1 or 2")))?;
            if tier.replace(Tier::default()).is_some() {
                return Err(source.wrong(line, format!("Tier {number} is given twice; give it once")));
            }
            current = Some(number as usize);
        } else {
            let tier = current.and_then(|current| tiers.of[current].as_mut());
            let tier = tier.ok_or_else(|| {
                source.wrong(line, format!("'{}' comes before the first tier; write 'Tier 0' before it", shown(name)))
            })?;
            tier_key(source, line, tier, name, &lower, number)?;
        }
    }
    tiers.build(source)
}

fn tier_key(
    source: &Source<'_>,
    line: usize,
    tier: &mut Tier,
    name: &str,
    lower: &str,
    number: u32,
) -> Result<(), ImportError> {
    let (slot, most) = match lower {
        "downlink_speed_gbps" => (&mut tier.gbps, 10_000),
        "radix_down" => (&mut tier.radix_down, PORTS_MAX),
        "radix_up" => (&mut tier.radix_up, PORTS_MAX),
        "bundle" => (&mut tier.bundle, PORTS_MAX),
        "downlink_latency_ns" => (&mut tier.delay_ns, DELAY_NS_MAX),
        // The radixes say the same.
        "oversubscribed" => return Ok(()),
        "switch_latency_ns" if number == 0 => return Ok(()),
        "switch_latency_ns" => {
            let what = "Switch_Latency_ns is not modelled; write 0 and add it to Downlink_Latency_ns of both sides";
            return Err(source.wrong(line, what));
        }
        "queue_up" | "queue_down" => {
            let what = format!("{name} is not modelled; remove it, and set buffer_bytes of the scenario's switches");
            return Err(source.wrong(line, what));
        }
        _ => return Err(source.wrong(line, format!("'{}' is not a property of a tier; remove it", shown(name)))),
    };
    let least = u32::from(lower != "downlink_latency_ns");
    if !(least..=most).contains(&number) {
        return Err(source.wrong(line, format!("{name} {number}; write {least} to {most}")));
    }
    set(source, line, name, slot, number)
}

fn set(source: &Source<'_>, line: usize, name: &str, slot: &mut Option<u32>, number: u32) -> Result<(), ImportError> {
    match slot.replace(number) {
        Some(_) => Err(source.wrong(line, format!("{name} is given twice; give it once"))),
        None => Ok(()),
    }
}

/// The links below a tier, checked.
#[derive(Clone, Copy, Debug)]
struct Links {
    rate: LinkRate,
    delay: Span,
    bundle: u32,
}

impl Tiers {
    fn build(&self, source: &Source<'_>) -> Result<ImportedTopology, ImportError> {
        let needed =
            |value: Option<u32>, name: &str| value.ok_or_else(|| source.whole(format!("{name} is missing; {KEY}")));
        let (nodes, pod) = (needed(self.nodes, "Nodes")?, needed(self.pod, "Podsize")?);
        let count = match needed(self.tiers, "Tiers")? {
            count @ 2..=3 => count as usize,
            count => return Err(source.whole(format!("Tiers {count}; write 2 or 3"))),
        };
        if !(2..=HOSTS_MAX).contains(&nodes) {
            return Err(source.whole(format!("Nodes {nodes}; write 2 to {HOSTS_MAX}")));
        }
        let tier = |index: usize| {
            self.of[index].ok_or_else(|| source.whole(format!("Tier {index} is missing; write 'Tier {index}'")))
        };
        let links = |index: usize| -> Result<Links, ImportError> {
            let tier = tier(index)?;
            let gbps = needed(tier.gbps, &format!("Downlink_Speed_Gbps of tier {index}"))?;
            let rate = LinkRate::from_gbps(gbps.into());
            let rate = rate.ok_or_else(|| source.whole(format!("Downlink_Speed_Gbps {gbps}; write 1 to 10000")))?;
            let ns = needed(tier.delay_ns, &format!("Downlink_Latency_ns of tier {index}"))?;
            Ok(Links { rate, delay: Span::from_ns(ns.into()), bundle: tier.bundle.unwrap_or(1) })
        };
        let down = |index: usize| needed(tier(index)?.radix_down, &format!("Radix_Down of tier {index}"));
        let up = |index: usize| needed(tier(index)?.radix_up, &format!("Radix_Up of tier {index}"));
        let divided = |what: &str, of: u32, by: u32| match of.checked_rem(by) {
            Some(0) => Ok(of / by),
            _ => Err(source.whole(format!("{what}: {of} is not a multiple of {by}; make the tiers fit each other"))),
        };
        let fits = |what: &str, is: u32, needed: u32| match is == needed {
            true => Ok(()),
            false => Err(source.whole(format!("{what} is {is}; {needed} fits the other lines"))),
        };
        let pods = divided("Nodes by Podsize", nodes, pod)?;
        let tors = divided("Podsize by Radix_Down of tier 0", pod, down(0)?)?;
        let aggs = divided("Radix_Up of tier 0 by Bundle of tier 1", up(0)?, links(1)?.bundle)?;
        fits("Bundle of tier 0", links(0)?.bundle, 1)?;
        fits("Radix_Down of tier 1", down(1)?, tors.saturating_mul(links(1)?.bundle))?;
        let mut shape = Shape { nodes, hosts_per_tor: down(0)?, pods, tors, aggs, cores_per_agg: 0 };
        let mut below = vec![links(0)?, links(1)?];
        if count == 3 {
            below.push(links(2)?);
            shape.cores_per_agg = divided("Radix_Up of tier 1 by Bundle of tier 2", up(1)?, links(2)?.bundle)?;
            fits("Radix_Down of tier 2", down(2)?, pods.saturating_mul(links(2)?.bundle))?;
        } else {
            fits("Podsize of two tiers", pod, nodes)?;
        }
        let topology = shape.topology(&below).map_err(|error| source.topology_error(&error))?;
        Ok(ImportedTopology { topology, hosts: HostNumbers::Below(nodes), losses: Vec::new() })
    }
}

/// The numbers of switches of a fat tree.
#[derive(Clone, Copy, Debug)]
struct Shape {
    nodes: u32,
    hosts_per_tor: u32,
    pods: u32,
    /// Switches of the lowest tier in a pod.
    tors: u32,
    /// Switches of the second tier in a pod.
    aggs: u32,
    /// Switches of the third tier to which one of the second is linked.
    cores_per_agg: u32,
}

impl Shape {
    /// Links the tiers as htsim does: a switch of the second tier is linked to every `aggs`-th switch of the third.
    fn topology(self, below: &[Links]) -> Result<Topology, TopologyError> {
        let Self { nodes, hosts_per_tor, pods, tors, aggs, cores_per_agg } = self;
        let (all_tors, all_aggs) = (pods * tors, pods * aggs);
        let switches = all_tors + all_aggs + aggs * cores_per_agg;
        TopologyError::limit("switches", switches.into(), SWITCHES_MAX)?;
        let switch = |number| NetworkNode::Switch(SwitchId(number));
        let mut links = Vec::new();
        let mut join = |low, high, tier: usize| {
            let Links { rate, delay, bundle } = below[tier];
            (0..bundle).for_each(|_| links.push(NetworkLink { ends: [low, high], rate, delay }));
        };
        (0..nodes).for_each(|host| join(NetworkNode::Host(HostId(host)), switch(host / hosts_per_tor), 0));
        for tor in 0..all_tors {
            let first = tor / tors * aggs;
            (first..first + aggs).for_each(|agg| join(switch(tor), switch(all_tors + agg), 1));
        }
        for agg in 0..all_aggs {
            let core = |step: u32| all_tors + all_aggs + agg % aggs + aggs * step;
            (0..cores_per_agg).for_each(|step| join(switch(all_tors + agg), switch(core(step)), 2));
        }
        Topology::new(nodes, switches, links)
    }
}
