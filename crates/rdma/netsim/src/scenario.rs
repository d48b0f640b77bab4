//! A simulation as a file: topology, switches, lines, workload and transport in TOML.
//!
//! What is wrong in one is said in a line with file, line, key, value and remedy. `docs/netsim.md` explains every key.

mod network;
mod topology;
mod workload;

use std::path::Path;

use config::{ConfigError, nanoseconds};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use sim::{Span, Time};

use crate::endpoint::Flow;
use crate::network::NetworkConfig;
use crate::transport::TransportConfig;
use crate::workload::Workload;

/// The version of scenario files that this release reads.
pub const VERSION: u32 = 1;
/// A run ends then, if the file does not say when.
const UNTIL_NS_DEFAULT: f64 = 1e9;

/// A simulation, checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Of everything random.
    pub seed: u64,
    /// The topology's name: a preset's, or kind and hosts.
    pub topology_name: String,
    /// The network.
    pub network: NetworkConfig,
    /// Who sends what to whom.
    pub workload: Workload,
    /// The flows of that, with this seed.
    pub flows: Vec<Flow>,
    /// What endpoints do.
    pub transport: TransportConfig,
    /// When the run ends, whatever is left to do.
    pub until: Time,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(deserialize_with = "version")]
    version: u32,
    #[serde(default = "seed_default")]
    seed: u64,
    #[serde(deserialize_with = "nanoseconds", default = "until_default")]
    until: f64,
    topology: topology::Part,
    #[serde(default)]
    switches: network::Switches,
    #[serde(default)]
    lines: network::Lines,
    workload: workload::Part,
    #[serde(default)]
    transport: TransportConfig,
}

/// A version that this release reads.
fn version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        VERSION => Ok(VERSION),
        other => Err(D::Error::custom(format!("'{other}' is no version that this release reads; write {VERSION}"))),
    }
}

fn seed_default() -> u64 {
    1
}

fn until_default() -> f64 {
    UNTIL_NS_DEFAULT
}

impl Scenario {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read or makes no sense.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&file, &text),
            Err(error) => Err(ConfigError::Unreadable { file, reason: error.to_string() }),
        }
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        let parsed: File = config::parse(file, text)?;
        debug_assert_eq!(parsed.version, VERSION);
        let topology::Part { topology, name: topology_name } = parsed.topology;
        let workload = parsed.workload.0;
        // The parts make sense each; these are the ones that must fit each other.
        let of_part = |part: &str, what: String| {
            let line = text.lines().position(|line| line.trim() == format!("[{part}]"));
            let line = line.map(|index| format!("line {}, ", index + 1)).unwrap_or_default();
            ConfigError::Invalid { file: file.to_owned(), location: format!("{line}{part}"), what }
        };
        let flows = workload.flows(&topology, parsed.seed).map_err(|error| of_part("workload", error.to_string()))?;
        let switches = parsed.switches.0;
        switches.check(&topology).map_err(|error| of_part("switches", error.to_string()))?;
        let impairments = parsed.lines.impairments(&topology);
        Ok(Self {
            seed: parsed.seed,
            topology_name,
            network: NetworkConfig { topology, switches, impairments, seed: parsed.seed },
            workload,
            flows,
            transport: parsed.transport,
            until: Time::ZERO + Span::from_ns(parsed.until),
        })
    }
}

#[cfg(test)]
mod tests;
