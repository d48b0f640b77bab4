//! The result of each flow, finished or not, as CSV.

use std::io::{self, Write};

use sim::{Span, Time};

use crate::endpoint::Flow;
use crate::ideal::IdealFct;
use crate::network::Network;
use crate::rdma::RdmaEndpoint;

/// The header line of per-flow results.
pub const FLOW_COLUMNS: &str = "flow,from,to,bytes,start_us,fct_us,ideal_fct_us,slowdown,retransmitted_packets,outcome";

/// How a flow ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowOutcome {
    /// Its sender knows that everything has arrived.
    Finished,
    /// Its sender gave up, because a request had no retries left.
    Failed,
    /// Neither, when the run ended.
    Unfinished,
}

impl FlowOutcome {
    /// Returns the outcome's name in per-flow results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Unfinished => "unfinished",
        }
    }
}

/// The result of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowRecord {
    /// The flow.
    pub flow: Flow,
    /// Completion time of a finished flow.
    pub fct: Option<Span>,
    /// Completion time alone in the network.
    pub ideal: Span,
    /// Number of packets that its sender retransmitted.
    pub retransmitted_packets: u64,
    /// How it ended.
    pub outcome: FlowOutcome,
}

/// Returns the results of all flows of a run, in the order of their start.
pub fn flow_records(network: &Network<RdmaEndpoint>, ideal: &IdealFct<'_>) -> Vec<FlowRecord> {
    let record = |flow: &Flow| FlowRecord {
        flow: *flow,
        fct: None,
        ideal: ideal.fct(flow),
        retransmitted_packets: 0,
        outcome: FlowOutcome::Unfinished,
    };
    let mut records: Vec<FlowRecord> = network.flows().iter().map(record).collect();
    for end in network.finished_flows() {
        let record = &mut records[end.id.0 as usize];
        record.fct = Some(end.at.since(record.flow.start));
        record.outcome = FlowOutcome::Finished;
    }
    for endpoint in network.endpoints() {
        endpoint.failed_flows().iter().for_each(|id| records[id.0 as usize].outcome = FlowOutcome::Failed);
        endpoint.retransmitted().for_each(|(id, packets)| records[id.0 as usize].retransmitted_packets += packets);
    }
    records
}

/// Writes the results of flows as CSV; a flow that has not finished has neither completion time nor slowdown.
///
/// # Errors
/// When the writer fails.
pub fn write_flow_records(writer: &mut dyn Write, records: &[FlowRecord]) -> io::Result<()> {
    writeln!(writer, "{FLOW_COLUMNS}")?;
    for (index, record) in records.iter().enumerate() {
        let FlowRecord { flow, fct, ideal, retransmitted_packets, outcome } = record;
        let Flow { start, from, to, bytes, .. } = flow;
        let (start_us, ideal_us) = (microseconds(start.since(Time::ZERO)), microseconds(*ideal));
        let fct_us = fct.map(microseconds).unwrap_or_default();
        let slowdown = fct.map(|fct| format!("{:.6}", fct.ps() as f64 / ideal.ps() as f64)).unwrap_or_default();
        writeln!(
            writer,
            "{index},{},{},{bytes},{start_us},{fct_us},{ideal_us},{slowdown},{retransmitted_packets},{}",
            from.0,
            to.0,
            outcome.name()
        )?;
    }
    writer.flush()
}

/// Returns a duration in microseconds, exact to the picosecond.
pub(crate) fn microseconds(span: Span) -> String {
    const PS_PER_US: u64 = 1_000_000;
    format!("{}.{:06}", span.ps() / PS_PER_US, span.ps() % PS_PER_US)
}

/// Returns a text as a field of a CSV file (RFC 4180).
pub(crate) fn csv_field(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}
