//! The parts of a run.

use std::fmt;
use std::str::FromStr;

use router_node::interconnect::TransportKind;

use crate::interconnect::{kinds, name};

/// A part of the benchmark, which can be run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Forwarding tables: `fib`.
    Fib,
    /// The forwarding core, except for churn: `core`.
    Core,
    /// Forwarding while routes change: `churn`, in `core`.
    Churn,
    /// Forwarding between virtual Ethernet interfaces, compared with the kernel: `ethernet`.
    Ethernet,
    /// TCP streams and echo requests between virtual Ethernet interfaces, compared with the kernel and with a simple
    /// forwarder: `streams`.
    Streams,
    /// One hop, the gain of batches, and rates: `hops`, `gains`, `rates`, and the published hops.
    Interconnect,
    /// Latency by load and by size: `loads` and `loads_by_size`, and the `rates` that loads are shares of.
    Latency,
    /// Adaptive batches compared with the best fixed one: `adaptive`, and the `rates` and `loads` that it is derived
    /// from.
    Adaptive,
}

impl Part {
    /// All parts, in the order in which they are measured.
    pub const ALL: [Part; 8] = [
        Part::Fib,
        Part::Core,
        Part::Churn,
        Part::Ethernet,
        Part::Streams,
        Part::Interconnect,
        Part::Latency,
        Part::Adaptive,
    ];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Part::Fib => "fib",
            Part::Core => "core",
            Part::Churn => "churn",
            Part::Ethernet => "ethernet",
            Part::Streams => "streams",
            Part::Interconnect => "interconnect",
            Part::Latency => "latency",
            Part::Adaptive => "adaptive",
        }
    }

    /// Returns whether the part is measured between two nodes, over an interconnect.
    pub fn is_between_nodes(self) -> bool {
        matches!(self, Part::Interconnect | Part::Latency | Part::Adaptive)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The error for an unknown part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no part has this name; choose of {}", Part::ALL.map(Part::name).join(", "))]
pub struct UnknownPart;

impl FromStr for Part {
    type Err = UnknownPart;

    fn from_str(text: &str) -> Result<Part, UnknownPart> {
        Part::ALL.into_iter().find(|part| part.name() == text).ok_or(UnknownPart)
    }
}

/// The error for an unknown interconnect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no interconnect has this name; choose one of {}", kinds().map(name).join(", "))]
pub struct UnknownKind;

/// Returns the interconnect with this name in reports.
///
/// # Errors
/// Fails if no interconnect has this name.
pub fn kind(text: &str) -> Result<TransportKind, UnknownKind> {
    kinds().into_iter().find(|kind| name(*kind) == text).ok_or(UnknownKind)
}

/// The parts of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The selected parts; empty means all.
    only: Vec<Part>,
}

impl Parts {
    /// Everything.
    pub const ALL: Parts = Parts { only: Vec::new() };

    /// Returns these parts, or all if `parts` is empty.
    pub fn only(parts: &[Part]) -> Parts {
        Parts { only: parts.to_vec() }
    }

    /// Returns whether all parts are selected.
    pub fn is_all(&self) -> bool {
        self.only.is_empty()
    }

    /// Returns whether this part is selected.
    pub fn has(&self, part: Part) -> bool {
        self.is_all() || self.only.contains(&part)
    }

    /// Returns whether a selected part satisfies the predicate.
    pub fn any(&self, predicate: impl Fn(Part) -> bool) -> bool {
        Part::ALL.into_iter().any(|part| self.has(part) && predicate(part))
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
        let choices = "choose of fib, core, churn, ethernet, streams, interconnect, latency, adaptive";
        assert_eq!(error, format!("no part has this name; {choices}"));
        let error = kind("rnic").expect_err("no interconnect").to_string();
        assert!(error.ends_with("; choose one of lanes, windows, rnic_lanes, rnic_udp"), "{error}");
        assert!(Parts::ALL.has(Part::Fib) && !Parts::only(&[Part::Core]).has(Part::Fib));
    }
}
