//! What a run measures.

use std::fmt;
use std::str::FromStr;

use router_node::interconnect::TransportKind;

use crate::interconnect::{kinds, name};

/// A part of the benchmark, which can be run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Forwarding tables: `fib`.
    Fib,
    /// The forwarding core, but for churn: `core`.
    Core,
    /// Forwarding while routes change: `churn`, in `core`.
    Churn,
    /// Between virtual Ethernet, beside the kernel: `ethernet`.
    Ethernet,
    /// One hop, what batches gain, rates: `hops`, `gains`, `rates`, and what was published of hops.
    Interconnect,
    /// By load and by size: `loads` and `loads_by_size`, and the `rates` that loads are shares of.
    Latency,
    /// Adaptive batches beside the best fixed one: `adaptive`, and the `rates` and `loads` that it is of.
    Adaptive,
}

impl Part {
    /// All, in the order in which they are measured.
    pub const ALL: [Part; 7] =
        [Part::Fib, Part::Core, Part::Churn, Part::Ethernet, Part::Interconnect, Part::Latency, Part::Adaptive];

    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Part::Fib => "fib",
            Part::Core => "core",
            Part::Churn => "churn",
            Part::Ethernet => "ethernet",
            Part::Interconnect => "interconnect",
            Part::Latency => "latency",
            Part::Adaptive => "adaptive",
        }
    }

    /// Whether it goes between two nodes, over an interconnect.
    pub fn is_between_nodes(self) -> bool {
        matches!(self, Part::Interconnect | Part::Latency | Part::Adaptive)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// What is no part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no part has this name; choose of {}", Part::ALL.map(Part::name).join(", "))]
pub struct NoPart;

impl FromStr for Part {
    type Err = NoPart;

    fn from_str(text: &str) -> Result<Part, NoPart> {
        Part::ALL.into_iter().find(|part| part.name() == text).ok_or(NoPart)
    }
}

/// What is no interconnect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no interconnect has this name; choose one of {}", kinds().map(name).join(", "))]
pub struct NoKind;

/// The interconnect that a report calls so.
///
/// # Errors
/// When it calls none so.
pub fn kind(text: &str) -> Result<TransportKind, NoKind> {
    kinds().into_iter().find(|kind| name(*kind) == text).ok_or(NoKind)
}

/// The parts of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Empty means all.
    only: Vec<Part>,
}

impl Parts {
    /// Everything.
    pub const ALL: Parts = Parts { only: Vec::new() };

    /// These; all, if there is none.
    pub fn only(parts: &[Part]) -> Parts {
        Parts { only: parts.to_vec() }
    }

    /// Whether nothing was left out.
    pub fn is_all(&self) -> bool {
        self.only.is_empty()
    }

    /// Whether this one is among them.
    pub fn has(&self, part: Part) -> bool {
        self.is_all() || self.only.contains(&part)
    }

    /// Whether one of them is so.
    pub fn any(&self, is_it: impl Fn(Part) -> bool) -> bool {
        Part::ALL.into_iter().any(|part| self.has(part) && is_it(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_interconnects_are_known_by_their_names() {
        for part in Part::ALL {
            assert_eq!(part.name().parse(), Ok(part));
        }
        for known in kinds() {
            assert_eq!(kind(name(known)), Ok(known));
        }
        let error = "cores".parse::<Part>().expect_err("no part").to_string();
        let choices = "choose of fib, core, churn, ethernet, interconnect, latency, adaptive";
        assert_eq!(error, format!("no part has this name; {choices}"));
        let error = kind("rnic").expect_err("no interconnect").to_string();
        assert!(error.ends_with("; choose one of lanes, windows, rnic_lanes, rnic_udp"), "{error}");
        assert!(Parts::ALL.has(Part::Fib) && !Parts::only(&[Part::Core]).has(Part::Fib));
    }
}
