//! Scenario files: topology, switches, links, workload and transport of a simulation in TOML.
//!
//! An error names the file, line, key, value and remedy in one line. `docs/netsim.md` explains every key.

mod network;
mod topology;
mod workload;

use std::path::Path;

use config::{ConfigError, nanoseconds};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use sim::{Span, Time};

use crate::endpoint::Flow;
use crate::impairment::Impairments;
use crate::network::NetworkConfig;
use crate::transport::TransportConfig;
use crate::workload::Workload;

/// The version of scenario files that this release reads.
pub const VERSION: u32 = 1;
/// Default end of a run after the last flow's start. A flow that has not finished by then never will.
const UNTIL_AFTER_START: Span = Span::from_ps(1_000_000_000_000);
/// Longest time of a scenario in nanoseconds, about eleven days: sums of a few such times are still possible.
const TIME_NS_MAX: f64 = 1e15;

/// A scenario, checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Seed of everything random.
    pub seed: u64,
    /// The topology's name: the preset's, or its kind and number of hosts.
    pub topology_name: String,
    /// The network.
    pub network: NetworkConfig,
    /// The workload.
    pub workload: Workload,
    /// The workload's flows with this seed.
    pub flows: Vec<Flow>,
    /// Settings of the endpoints.
    pub transport: TransportConfig,
    /// When the run ends, even if flows are unfinished.
    pub until: Time,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(deserialize_with = "version")]
    version: u32,
    #[serde(default = "seed_default")]
    seed: u64,
    #[serde(default, deserialize_with = "until")]
    until: Option<f64>,
    topology: topology::TopologyTable,
    #[serde(default)]
    switches: network::SwitchesTable,
    #[serde(default)]
    lines: network::LinksTable,
    workload: workload::WorkloadTable,
    #[serde(default)]
    transport: TransportConfig,
}

/// Accepts the version that this release reads.
fn version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        VERSION => Ok(VERSION),
        other => Err(D::Error::custom(format!("'{other}' is not a version that this release reads; write {VERSION}"))),
    }
}

fn seed_default() -> u64 {
    1
}

fn until<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    simulated_ns(deserializer).map(Some)
}

/// Deserializes a time that a simulation can reach, in nanoseconds.
fn simulated_ns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    match nanoseconds(deserializer)? {
        ns if ns <= TIME_NS_MAX => Ok(ns),
        ns => Err(D::Error::custom(format!("{ns:e} ns is too long; write at most 1000000 s"))),
    }
}

impl Scenario {
    /// Reads a scenario file.
    ///
    /// # Errors
    /// When it cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&path.display().to_string(), &config::read_text(path)?)
    }

    /// Parses the text of a scenario file.
    ///
    /// # Errors
    /// When it is invalid.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        let parsed: File = config::parse(file, text)?;
        debug_assert_eq!(parsed.version, VERSION);
        let topology::TopologyTable { topology, name: topology_name, hosts, losses } = parsed.topology;
        // Each table is valid by itself; what follows checks that the tables fit each other.
        let of_table = |table: &str, what: String| {
            let line = text.lines().position(|line| line.trim() == format!("[{table}]"));
            let line = line.map(|index| format!("line {}, ", index + 1)).unwrap_or_default();
            ConfigError::Invalid { file: file.to_owned(), location: format!("{line}{table}"), what }
        };
        let workload = parsed.workload.workload(&hosts).map_err(|error| of_table("workload", error.to_string()))?;
        let flows = workload.flows(&topology, parsed.seed).map_err(|error| of_table("workload", error.to_string()))?;
        let switches = parsed.switches.0;
        switches.check(&topology).map_err(|error| of_table("switches", error.to_string()))?;
        // Slower hosts take their own rate where a minimum is above it.
        parsed.transport.check(topology.fastest_host()).map_err(|error| of_table("transport", error))?;
        let mut impairments = parsed.lines.impairments(&topology);
        if !impairments.is_empty() && !losses.is_empty() {
            let what = "the topology's file has error rates too; remove them there, or remove this table";
            return Err(of_table("lines", what.to_owned()));
        }
        impairments.extend(
            losses
                .into_iter()
                .flat_map(|(link, share)| [0, 1].map(|end| (link, end, Impairments::uniform_loss(share)))),
        );
        let start = |flow: Option<&Flow>| flow.map_or(Time::ZERO, |flow| flow.start);
        let (first_start, last_start) = (start(flows.first()), start(flows.last()));
        let until = parsed.until.map_or(last_start + UNTIL_AFTER_START, |ns| Time::ZERO + Span::from_ns(ns));
        if until <= first_start && !flows.is_empty() {
            let us = |time: Time| time.since(Time::ZERO).ns() / 1e3;
            let (until, first_start) = (us(until), us(first_start));
            let what = format!("{until} us is before the first flow starts, at {first_start} us; write a later time");
            return Err(ConfigError::Invalid { file: file.to_owned(), location: "until".to_owned(), what });
        }
        Ok(Self {
            seed: parsed.seed,
            topology_name,
            network: NetworkConfig { topology, switches, impairments, seed: parsed.seed },
            workload,
            flows,
            transport: parsed.transport,
            until,
        })
    }
}

#[cfg(test)]
mod tests;
