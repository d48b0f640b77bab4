//! Reads files of flows and topologies: this simulator's traces, and the files of HPCC's ns-3 and of htsim.
//!
//! An error names the file, the line, the text found and the remedy in one line.

mod htsim;
mod ns3;
mod trace;

use std::path::Path;
use std::str::FromStr;

use config::ConfigError;
use thiserror::Error;

use crate::endpoint::Flow;
use crate::topology::{HostId, Topology, TopologyError};

/// A file that cannot be imported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ImportError {
    /// The file cannot be read or is not text.
    #[error(transparent)]
    Unreadable(#[from] ConfigError),
    /// A line is invalid.
    #[error("{file}, line {line}: {what}")]
    Line {
        /// The file's path.
        file: String,
        /// The line number, from 1.
        line: usize,
        /// The defect and the remedy.
        what: String,
    },
    /// The file as a whole is invalid.
    #[error("{file}: {what}")]
    Whole {
        /// The file's path.
        file: String,
        /// The defect and the remedy.
        what: String,
    },
}

/// A format of files of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowFormat {
    /// Lines `start_us,from,to,bytes`.
    Trace,
    /// The flow file of HPCC's ns-3: the number of flows, then `from to priority port bytes start_s`; or of ConWeave's,
    /// without the port.
    Ns3,
    /// The connection matrix of htsim (`.cm`).
    Htsim,
}

/// A format of files of topologies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyFormat {
    /// The topology file of HPCC's ns-3: counts, the switches' numbers, then links.
    Ns3,
    /// The tiers of htsim's fat trees (`.topo`).
    Htsim,
}

/// The hosts that a file of flows may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostNumbers {
    /// All numbers below this one.
    Below(u32),
    /// These numbers, ascending: the position of a number is its host's.
    Listed(Vec<u32>),
}

impl HostNumbers {
    /// Returns the host with this number in a file, and otherwise the numbers that hosts have.
    fn host(&self, number: u32) -> Result<HostId, String> {
        match self {
            Self::Below(hosts) if number < *hosts => Ok(HostId(number)),
            Self::Below(hosts) => Err(format!("a number from 0 to {}", hosts.saturating_sub(1))),
            Self::Listed(numbers) => match numbers.binary_search(&number) {
                Ok(index) => Ok(HostId(index as u32)),
                Err(_) => {
                    let ends = (numbers.first().copied().unwrap_or(0), numbers.last().copied().unwrap_or(0));
                    Err(format!("a number from {} to {} that is no switch of the topology file", ends.0, ends.1))
                }
            },
        }
    }
}

/// A topology read from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedTopology {
    /// The topology.
    pub topology: Topology,
    /// The numbers that files of flows give to its hosts.
    pub hosts: HostNumbers,
    /// The share of packets lost in each direction of links that lose any: the link's index and the share.
    pub losses: Vec<(usize, f64)>,
}

/// Reads a file of flows between these hosts, in the order of the file.
///
/// # Errors
/// When the file cannot be read, a line is no flow between two of the hosts, or there is no flow.
pub fn read_flows(path: &Path, format: FlowFormat, hosts: &HostNumbers) -> Result<Vec<Flow>, ImportError> {
    let (file, text) = read(path)?;
    parse_flows(&file, &text, format, hosts)
}

/// Parses the text of a file of flows; `file` is its name in errors.
///
/// # Errors
/// When a line is no flow between two of the hosts, or there is no flow.
pub fn parse_flows(file: &str, text: &str, format: FlowFormat, hosts: &HostNumbers) -> Result<Vec<Flow>, ImportError> {
    let source = Source { file, text };
    let flows = match format {
        FlowFormat::Trace => trace::flows(&source, hosts)?,
        FlowFormat::Ns3 => ns3::flows(&source, hosts)?,
        FlowFormat::Htsim => htsim::flows(&source, hosts)?,
    };
    match flows.is_empty() {
        true => Err(source.whole(format!("there is no flow; {}", format.remedy()))),
        false => Ok(flows),
    }
}

/// Reads a topology file.
///
/// # Errors
/// When it cannot be read or is invalid.
pub fn read_topology(path: &Path, format: TopologyFormat) -> Result<ImportedTopology, ImportError> {
    let (file, text) = read(path)?;
    parse_topology(&file, &text, format)
}

/// Parses the text of a topology file; `file` is its name in errors.
///
/// # Errors
/// When it is invalid.
pub fn parse_topology(file: &str, text: &str, format: TopologyFormat) -> Result<ImportedTopology, ImportError> {
    let source = Source { file, text };
    match format {
        TopologyFormat::Ns3 => ns3::topology(&source),
        TopologyFormat::Htsim => htsim::topology(&source),
    }
}

impl FlowFormat {
    const fn remedy(self) -> &'static str {
        match self {
            Self::Trace => "write one line start_us,from,to,bytes for each flow",
            Self::Ns3 => {
                "write their number, then one line 'from to priority port bytes start_s', or without port, for each"
            }
            Self::Htsim => "write one line 'from->to start ps size bytes' for each",
        }
    }
}

fn read(path: &Path) -> Result<(String, String), ImportError> {
    Ok((path.display().to_string(), config::read_text(path)?))
}

/// The text of a file, with its name for errors.
struct Source<'a> {
    file: &'a str,
    text: &'a str,
}

impl<'a> Source<'a> {
    /// Returns the lines with their numbers, without blank lines and comments, from # to the end of a line.
    fn lines(&self) -> impl Iterator<Item = (usize, &'a str)> + use<'a> {
        let text = self.text.strip_prefix('\u{feff}').unwrap_or(self.text);
        let without_comment = |line: &'a str| line.split_once('#').map_or(line, |(before, _)| before).trim();
        let lines = text.lines().enumerate().map(move |(index, line)| (index + 1, without_comment(line)));
        lines.filter(|(_, line)| !line.is_empty())
    }

    fn wrong(&self, line: usize, what: impl Into<String>) -> ImportError {
        ImportError::Line { file: self.file.to_owned(), line, what: what.into() }
    }

    fn whole(&self, what: impl Into<String>) -> ImportError {
        ImportError::Whole { file: self.file.to_owned(), what: what.into() }
    }

    /// Parses a value; `what` and `remedy` are for the error.
    fn value<T: FromStr>(&self, line: usize, text: &str, what: &str, remedy: &str) -> Result<T, ImportError> {
        text.parse().map_err(|_| self.wrong(line, format!("'{}' is not a {what}; {remedy}", shown(text))))
    }

    /// Returns the two hosts of a flow.
    fn hosts(&self, line: usize, numbers: [u32; 2], hosts: &HostNumbers) -> Result<[HostId; 2], ImportError> {
        let host = |number| {
            hosts.host(number).map_err(|range| self.wrong(line, format!("there is no host {number}; write {range}")))
        };
        let ends = [host(numbers[0])?, host(numbers[1])?];
        if ends[0] == ends[1] {
            return Err(self.wrong(line, format!("host {0} sends to itself; name two hosts", numbers[0])));
        }
        Ok(ends)
    }

    fn topology_error(&self, error: &TopologyError) -> ImportError {
        self.whole(error.to_string())
    }
}

/// Returns the beginning of a text, for one line of an error.
fn shown(text: &str) -> String {
    const CHARACTERS_MAX: usize = 60;
    let short: String = text.chars().take(CHARACTERS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARACTERS_MAX).is_some() { short + "..." } else { short }
}

#[cfg(test)]
mod tests;
