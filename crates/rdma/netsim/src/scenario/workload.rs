//! The table `workload` of a scenario file.

use std::path::PathBuf;

use config::bytes;
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use sim::Span;

use super::simulated_ns;
use crate::import::{FlowFormat, HostNumbers, ImportError, read_flows};
use crate::workload::{SizeDistribution, Workload};

/// A workload, checked during parsing, so that an error can name its line.
#[derive(Debug, Deserialize)]
#[serde(try_from = "WorkloadFile")]
pub(super) enum WorkloadTable {
    /// A pattern.
    Pattern(Workload),
    /// A file of flows, which is read once the hosts are known.
    File(FlowFormat, PathBuf),
}

impl WorkloadTable {
    /// Returns the workload; reads a file of flows between these hosts.
    pub fn workload(self, hosts: &HostNumbers) -> Result<Workload, ImportError> {
        match self {
            Self::Pattern(workload) => Ok(workload),
            Self::File(format, path) => read_flows(&path, format, hosts).map(Workload::Trace),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkloadFile {
    kind: Kind,
    #[serde(default = "bytes_default", deserialize_with = "bytes")]
    bytes: u64,
    senders: Option<u32>,
    #[serde(default, deserialize_with = "distribution")]
    distribution: Option<SizeDistribution>,
    #[serde(default, deserialize_with = "load")]
    load: Option<f64>,
    #[serde(default = "duration_default", deserialize_with = "simulated_ns")]
    duration: f64,
    trace: Option<PathBuf>,
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Permutation,
    Incast,
    AllToAll,
    Poisson,
    Trace,
    Ns3,
    Htsim,
}

fn bytes_default() -> u64 {
    1_000_000
}

fn duration_default() -> f64 {
    1e7
}

fn distribution<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SizeDistribution>, D::Error> {
    let name = String::deserialize(deserializer)?;
    SizeDistribution::find(&name).map(Some).map_err(D::Error::custom)
}

fn load<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let load = f64::deserialize(deserializer)?;
    if load > 0.0 && load <= 1.0 {
        return Ok(Some(load));
    }
    Err(D::Error::custom(format!("'{load}' is not a load; write more than 0 and at most 1 of a host's rate")))
}

fn needed<T>(value: Option<T>, key: &str) -> Result<T, String> {
    value.ok_or_else(|| format!("{key} is missing; this kind of workload needs it"))
}

impl TryFrom<WorkloadFile> for WorkloadTable {
    type Error = String;

    fn try_from(file: WorkloadFile) -> Result<Self, String> {
        let bytes = file.bytes;
        if bytes == 0 {
            return Err("bytes is 0; write at least 1".to_owned());
        }
        let pattern = match file.kind {
            Kind::Permutation => Workload::Permutation { bytes },
            Kind::Incast => Workload::Incast { senders: needed(file.senders, "senders")?, bytes },
            Kind::AllToAll => Workload::AllToAll { bytes },
            Kind::Poisson => Workload::Poisson {
                sizes: needed(file.distribution, "distribution")?,
                load: needed(file.load, "load")?,
                duration: Span::from_ns(file.duration),
            },
            Kind::Trace => return Ok(Self::File(FlowFormat::Trace, needed(file.trace, "trace")?)),
            Kind::Ns3 => return Ok(Self::File(FlowFormat::Ns3, needed(file.file, "file")?)),
            Kind::Htsim => return Ok(Self::File(FlowFormat::Htsim, needed(file.file, "file")?)),
        };
        Ok(Self::Pattern(pattern))
    }
}
