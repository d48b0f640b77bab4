//! The files of HPCC's ns-3 (alibaba-edu/High-Precision-Congestion-Control) and of those derived from it, such as
//! ConWeave's (conweave-project/conweave-ns3 236a801). They are sequences of fields; line breaks have no meaning, and
//! what follows the stated number of entries is ignored, as ns-3 does.
//!
//! * Topology: `nodes switches links`, the switches' numbers, then `a b rate delay error_rate` for each link.
//! * Flows: their number, then `from to priority port bytes start_s` for each; ConWeave's have no port. A file has no
//!   port if its first flow is on a line of its own with five fields: line breaks have a meaning only there.

use sim::{Span, Time};

use super::{HostNumbers, ImportError, ImportedTopology, Source, shown};
use crate::endpoint::Flow;
use crate::rate::LinkRate;
use crate::topology::{HOSTS_MAX, HostId, NetworkLink, NetworkNode, SWITCHES_MAX, SwitchId, Topology};
use crate::workload::FLOWS_MAX;

const FLOW: &str = "write 'from to priority port bytes start_s' as in 0 7 3 100 64000 2.0, or every flow without port";
const LINK: &str = "write 'a b rate delay error_rate' as in 0 16 100Gbps 1000ns 0";
const COUNTS: &str = "write 'nodes switches links' as in 20 4 32";
/// Number of fields of a flow in ConWeave's files.
const FIELDS_WITHOUT_PORT: usize = 5;
/// Most links of a topology.
const LINKS_MAX: u32 = 1 << 22;
/// Latest start of a flow, in seconds.
const START_S_MAX: f64 = 1e6;
/// Longest delay of a link, in nanoseconds.
const DELAY_NS_MAX: f64 = 1e9;

/// Units of ns-3's data rates, in bits per second.
const RATE_UNITS: [(&str, f64); 16] = [
    ("Gbps", 1e9),
    ("Gb/s", 1e9),
    ("GBps", 8e9),
    ("GB/s", 8e9),
    ("Mbps", 1e6),
    ("Mb/s", 1e6),
    ("MBps", 8e6),
    ("MB/s", 8e6),
    ("kbps", 1e3),
    ("kb/s", 1e3),
    ("Kbps", 1e3),
    ("Kb/s", 1e3),
    ("kBps", 8e3),
    ("KBps", 8e3),
    ("bps", 1.0),
    ("b/s", 1.0),
];
/// Units of ns-3's times, in nanoseconds. A time without a unit is in seconds.
const TIME_UNITS: [(&str, f64); 6] = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("ps", 1e-3), ("fs", 1e-6), ("s", 1e9)];

/// The fields of a file, one after the other.
struct Fields<'a> {
    source: &'a Source<'a>,
    fields: Box<dyn Iterator<Item = (usize, &'a str)> + 'a>,
    /// The line of the last field.
    line: usize,
}

impl<'a> Fields<'a> {
    fn new(source: &'a Source<'a>) -> Self {
        let fields = source.lines().flat_map(|(line, text)| text.split_whitespace().map(move |field| (line, field)));
        Self { source, fields: Box::new(fields), line: 1 }
    }

    fn next(&mut self, what: &str, remedy: &str) -> Result<&'a str, ImportError> {
        match self.fields.next() {
            Some((line, field)) => {
                self.line = line;
                Ok(field)
            }
            None => Err(self.source.wrong(self.line, format!("the file ends before a {what}; {remedy}"))),
        }
    }

    fn number(&mut self, what: &str, remedy: &str) -> Result<u32, ImportError> {
        let field = self.next(what, remedy)?;
        self.source.value(self.line, field, what, remedy)
    }

    fn wrong(&self, text: &str, what: &str, remedy: &str) -> ImportError {
        self.source.wrong(self.line, format!("'{}' is not a {what}; {remedy}", shown(text)))
    }

    /// Reads a count of at most `most`.
    fn count(&mut self, what: &str, most: u32, remedy: &str) -> Result<u32, ImportError> {
        let count = self.number(what, remedy)?;
        if count > most {
            return Err(self.source.wrong(self.line, format!("a {what} of {count}; at most {most}")));
        }
        Ok(count)
    }
}

/// Returns a number with a unit of a table; `bare` is the factor of a number without a unit.
fn quantity(text: &str, units: &[(&str, f64)], bare: Option<f64>) -> Option<f64> {
    let with_unit = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (number, factor) = with_unit.or_else(|| Some((text, bare?)))?;
    Some(number.parse::<f64>().ok()? * factor).filter(|value| value.is_finite() && *value >= 0.0)
}

pub(super) fn topology(source: &Source<'_>) -> Result<ImportedTopology, ImportError> {
    let mut fields = Fields::new(source);
    let nodes = fields.count("number of nodes", HOSTS_MAX + SWITCHES_MAX, COUNTS)?;
    let switches = fields.count("number of switches", SWITCHES_MAX.min(nodes), COUNTS)?;
    let links = fields.count("number of links", LINKS_MAX, COUNTS)?;
    let mut is_switch = vec![false; nodes as usize];
    for _ in 0..switches {
        let number = fields.number("switch number", COUNTS)?;
        match is_switch.get_mut(number as usize) {
            Some(is_switch) if !*is_switch => *is_switch = true,
            Some(_) => return Err(source.wrong(fields.line, format!("switch {number} is listed twice; list it once"))),
            None => return Err(no_node(&fields, number, nodes)),
        }
    }
    let hosts: Vec<u32> = (0..nodes).filter(|node| !is_switch[*node as usize]).collect();
    let switch_numbers: Vec<u32> = (0..nodes).filter(|node| is_switch[*node as usize]).collect();
    let node = |fields: &mut Fields<'_>| {
        let number = fields.number("node number", LINK)?;
        let index = |numbers: &[u32]| numbers.binary_search(&number).unwrap_or(0) as u32;
        match is_switch.get(number as usize) {
            Some(true) => Ok(NetworkNode::Switch(SwitchId(index(&switch_numbers)))),
            Some(false) => Ok(NetworkNode::Host(HostId(index(&hosts)))),
            None => Err(no_node(fields, number, nodes)),
        }
    };
    let (mut network, mut losses) = (Vec::new(), Vec::new());
    for index in 0..links as usize {
        let ends = [node(&mut fields)?, node(&mut fields)?];
        let (rate, delay, loss) = (rate(&mut fields)?, delay(&mut fields)?, loss(&mut fields)?);
        network.push(NetworkLink { ends, rate, delay });
        if loss > 0.0 {
            losses.push((index, loss));
        }
    }
    let names = hosts.iter().chain(&switch_numbers).map(u32::to_string).collect();
    let topology = Topology::named(hosts.len() as u32, switches, network, names);
    let topology = topology.map_err(|error| source.topology_error(&error))?;
    Ok(ImportedTopology { topology, hosts: HostNumbers::Listed(hosts), losses })
}

fn no_node(fields: &Fields<'_>, number: u32, nodes: u32) -> ImportError {
    let what = format!("there is no node {number}; write a number from 0 to {}", nodes.saturating_sub(1));
    fields.source.wrong(fields.line, what)
}

fn rate(fields: &mut Fields<'_>) -> Result<LinkRate, ImportError> {
    let text = fields.next("rate", LINK)?;
    let rate = quantity(text, &RATE_UNITS, Some(1.0)).and_then(|bps| LinkRate::from_gbps(bps / 1e9));
    rate.ok_or_else(|| fields.wrong(text, "rate from 1Mbps to 10000Gbps", LINK))
}

fn delay(fields: &mut Fields<'_>) -> Result<Span, ImportError> {
    let text = fields.next("delay", LINK)?;
    let ns = quantity(text, &TIME_UNITS, Some(1e9)).filter(|ns| *ns <= DELAY_NS_MAX);
    ns.map(Span::from_ns).ok_or_else(|| fields.wrong(text, "delay from 0ns to 1s", LINK))
}

fn loss(fields: &mut Fields<'_>) -> Result<f64, ImportError> {
    let text = fields.next("error rate", LINK)?;
    let share: f64 = fields.source.value(fields.line, text, "share of packets", LINK)?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(fields.wrong(text, "share of packets from 0 to 1", LINK)) }
}

/// Returns whether the flows of a file have a port. Without one, each is on a line of its own.
fn has_port(source: &Source<'_>, flows: u32) -> Result<bool, ImportError> {
    let mut lines =
        source.lines().skip(1).take(flows as usize).map(|(line, text)| (line, text.split_whitespace().count()));
    if lines.next().is_none_or(|(_, fields)| fields != FIELDS_WITHOUT_PORT) {
        return Ok(true);
    }
    match lines.find(|(_, fields)| *fields != FIELDS_WITHOUT_PORT) {
        Some((line, fields)) => {
            let what =
                format!("a flow of {fields} fields after a first one without port; write all with a port, or none");
            Err(source.wrong(line, what))
        }
        None => Ok(false),
    }
}

pub(super) fn flows(source: &Source<'_>, hosts: &HostNumbers) -> Result<Vec<Flow>, ImportError> {
    let mut fields = Fields::new(source);
    let count = fields.count("number of flows", FLOWS_MAX as u32, FLOW)?;
    let has_port = has_port(source, count)?;
    let mut flows = Vec::new();
    let mut priority_of_all = None;
    for _ in 0..count {
        let numbers = [fields.number("host number", FLOW)?, fields.number("host number", FLOW)?];
        let ends = source.hosts(fields.line, numbers, hosts)?;
        let priority = fields.number("priority", FLOW)?;
        let first = *priority_of_all.get_or_insert(priority);
        if priority != first {
            let what = format!("priority {priority} after {first}; switches have one data queue here, write {first}");
            return Err(source.wrong(fields.line, what));
        }
        if has_port {
            fields.number("port", FLOW)?;
        }
        let text = fields.next("size", FLOW)?;
        let bytes = text.parse::<u64>().ok().filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| fields.wrong(text, "positive size", FLOW))?;
        let text = fields.next("start time", FLOW)?;
        let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..START_S_MAX).contains(seconds));
        let seconds = seconds.ok_or_else(|| fields.wrong(text, "time in seconds", FLOW))?;
        flows.push(Flow::new(Time::ZERO + Span::from_ns(seconds * 1e9), ends[0], ends[1], bytes));
    }
    Ok(flows)
}
