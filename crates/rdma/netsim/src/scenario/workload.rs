//! The table `workload` of a scenario file.

use std::path::Path;

use config::{bytes, nanoseconds};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use sim::Span;

use crate::workload::{SizeDistribution, Workload, read_trace};

/// A workload, checked during parsing, so that an error can name its line.
#[derive(Debug, Deserialize)]
#[serde(try_from = "WorkloadFile")]
pub(super) struct WorkloadTable(pub Workload);

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
    #[serde(default = "duration_default", deserialize_with = "nanoseconds")]
    duration: f64,
    trace: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Permutation,
    Incast,
    AllToAll,
    Poisson,
    Trace,
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
        Ok(Self(match file.kind {
            Kind::Permutation => Workload::Permutation { bytes },
            Kind::Incast => Workload::Incast { senders: needed(file.senders, "senders")?, bytes },
            Kind::AllToAll => Workload::AllToAll { bytes },
            Kind::Poisson => Workload::Poisson {
                sizes: needed(file.distribution, "distribution")?,
                load: needed(file.load, "load")?,
                duration: Span::from_ns(file.duration),
            },
            Kind::Trace => {
                let flows = read_trace(Path::new(&needed(file.trace, "trace")?)).map_err(|error| error.to_string())?;
                Workload::Trace(flows)
            }
        }))
    }
}
