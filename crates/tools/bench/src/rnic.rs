//! `crosslane bench rnic`: SENDs and WRITEs between two live RDMA NICs, over UDP and over lanes, compared with bare UDP
//! datagrams and with the floors of this machine; round trips alone and beside a busy thread.
//!
//! Both ends are threads of this process. The NICs wait by the same policy as lanes (`wait::spin`); bare UDP
//! sockets spin without a pause.

mod bare;
mod ends;
mod verbs;

use anyhow::{Context, Result};
use machine::Machine;
use rnic::nic::TransportPolicy;
use serde::Serialize;
use stats::{Latencies, Quantiles, Ratio, Table, median, ratios};
use units::NONE;

use crate::progress::Progress;
use bare::BusyThread;
use verbs::Setup;

/// The schema of the JSON report.
pub const SCHEMA: &str = "crosslane.bench.rnic/1";
const MEGABYTE: f64 = 1e6;
const MILLISECOND_NS: f64 = 1e6;

/// The command-line options.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Print one JSON document instead of tables
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter rounds: seconds, but less precise
    #[arg(long)]
    pub quick: bool,
    /// Number of alternating rounds (default: 15, or 3 with --quick)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Bytes of the SENDs whose round trips are measured
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_000))]
    pub bytes: u32,
    /// Bytes of each WRITE of the stream
    #[arg(
        long, value_name = "BYTES", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=262_144)
    )]
    pub write_bytes: u32,
}

/// What carries the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    BareUdp,
    GoBackNUdp,
    GoBackNUdpDelayedAcks,
    SrnicUdp,
    SrnicUdpDelayedAcks,
    SrnicLanes,
    Floor,
}

impl Transport {
    const ALL: [Self; 7] = [
        Self::BareUdp,
        Self::GoBackNUdp,
        Self::GoBackNUdpDelayedAcks,
        Self::SrnicUdp,
        Self::SrnicUdpDelayedAcks,
        Self::SrnicLanes,
        Self::Floor,
    ];

    fn title(self, experiment: Experiment) -> &'static str {
        match self {
            Self::BareUdp => "bare UDP",
            Self::GoBackNUdp => "go-back-n, UDP (RoCEv2)",
            Self::GoBackNUdpDelayedAcks => "the same, delayed acknowledgements",
            Self::SrnicUdp => "srnic, UDP",
            Self::SrnicUdpDelayedAcks => "the same, delayed acknowledgements",
            Self::SrnicLanes => "srnic, lanes",
            Self::Floor if experiment == Experiment::Writes => "one copy (floor)",
            Self::Floor => "cache line (floor)",
        }
    }

    /// Returns how the NICs are set up; `None` for what is not an RDMA NIC.
    fn setup(self) -> Option<Setup> {
        let (policy, by_lanes, delays_acks) = match self {
            Self::BareUdp | Self::Floor => return None,
            Self::GoBackNUdp => (TransportPolicy::GoBackN, false, false),
            Self::GoBackNUdpDelayedAcks => (TransportPolicy::GoBackN, false, true),
            Self::SrnicUdp => (TransportPolicy::Srnic, false, false),
            Self::SrnicUdpDelayedAcks => (TransportPolicy::Srnic, false, true),
            Self::SrnicLanes => (TransportPolicy::Srnic, true, false),
        };
        Some(Setup { policy, by_lanes, delays_acks })
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Experiment {
    /// A SEND, and a SEND back.
    RoundTrips,
    /// The same beside a thread that computes all the time.
    RoundTripsBesideBusyThread,
    /// WRITEs in one direction, 16 at a time.
    Writes,
}

impl Experiment {
    /// The busy thread comes last: threads remember for seconds that others need their processors.
    const ALL: [Self; 3] = [Self::RoundTrips, Self::Writes, Self::RoundTripsBesideBusyThread];

    /// Returns the transports; delayed acknowledgements are for round trips.
    fn transports(self) -> Vec<Transport> {
        let delays = |transport: &Transport| transport.setup().is_some_and(|setup| setup.delays_acks);
        Transport::ALL.into_iter().filter(|transport| self != Self::Writes || !delays(transport)).collect()
    }

    fn title(self, options: &Options) -> String {
        match self {
            Self::RoundTrips => format!("Round trips of SENDs of {} bytes", options.bytes),
            Self::RoundTripsBesideBusyThread => {
                format!("Round trips of SENDs of {} bytes beside one busy thread", options.bytes)
            }
            Self::Writes => format!("Stream of WRITEs of {} bytes", options.write_bytes),
        }
    }
}

/// How long and how often to measure.
struct Plan {
    rounds: u32,
    trips: u32,
    stream_bytes: u64,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let (rounds, trips, stream_bytes) = if options.quick { (3, 1000, 4 << 20) } else { (15, 5000, 32 << 20) };
        Self { rounds: options.rounds.unwrap_or(rounds), trips, stream_bytes }
    }
}

/// The result of one measurement.
enum Sample {
    Latencies(Latencies),
    BytesPerSecond(f64),
}

impl Sample {
    /// Returns the figure whose ratio is formed in each round: the median in nanoseconds, or bytes per second.
    fn figure(&self) -> f64 {
        match self {
            Self::Latencies(latencies) => latencies.quantiles().p50_ns,
            Self::BytesPerSecond(rate) => *rate,
        }
    }
}

/// The results of a run.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    /// Provenance of every number.
    kind: &'static str,
    machine: Machine,
    rounds: u32,
    round_trips: u32,
    bytes: u32,
    write_bytes: u32,
    rows: Vec<Row>,
    #[serde(skip)]
    titles: Vec<(Experiment, String)>,
}

/// One transport in one experiment: medians over the rounds.
#[derive(Serialize)]
struct Row {
    experiment: Experiment,
    transport: Transport,
    #[serde(skip_serializing_if = "Option::is_none")]
    round_trip: Option<Quantiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<f64>,
    /// The median round trip, or the rate, over that of bare UDP, round by round.
    ratio_to_bare_udp: Ratio,
}

impl Row {
    fn of(experiment: Experiment, transport: Transport, rounds: &[Sample], bare: &[Sample]) -> Self {
        let figures = |samples: &[Sample]| samples.iter().map(Sample::figure).collect::<Vec<_>>();
        let latencies = rounds.iter().filter_map(|sample| match sample {
            Sample::Latencies(latencies) => Some(latencies),
            Sample::BytesPerSecond(_) => None,
        });
        Self {
            experiment,
            transport,
            round_trip: Quantiles::over_rounds(latencies),
            bytes_per_s: (experiment == Experiment::Writes).then(|| median(figures(rounds))).flatten(),
            ratio_to_bare_udp: Ratio::of(&ratios(&figures(rounds), &figures(bare))),
        }
    }
}

/// Runs the benchmark and prints the report.
///
/// # Errors
/// A socket or shared memory that could not be made, or a NIC that gave up.
pub fn main(options: &Options) -> Result<()> {
    let report = measure(options, &Plan::of(options))?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).context("writing JSON")?);
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

fn measure(options: &Options, plan: &Plan) -> Result<Report> {
    let machine = Machine::describe(None);
    let steps: usize = Experiment::ALL.iter().map(|experiment| experiment.transports().len()).sum();
    let mut progress = Progress::new(steps as u64 * u64::from(plan.rounds));
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    let mut rows = Vec::new();
    for experiment in Experiment::ALL {
        let _busy = (experiment == Experiment::RoundTripsBesideBusyThread).then(BusyThread::start);
        let transports = experiment.transports();
        let mut samples: Vec<Vec<Sample>> = transports.iter().map(|_| Vec::new()).collect();
        for round in 1..=plan.rounds {
            let mut order: Vec<usize> = (0..transports.len()).collect();
            // Every second round is in reverse order, so that a drift of the machine affects all alike.
            if round % 2 == 0 {
                order.reverse();
            }
            for index in order {
                let transport = transports[index];
                progress.step(&experiment.title(options), transport.title(experiment));
                let sample = sample(experiment, transport, options, plan)
                    .with_context(|| format!("{}, {}", experiment.title(options), transport.title(experiment)))?;
                samples[index].push(sample);
            }
        }
        let rows_of = transports.iter().zip(&samples);
        rows.extend(rows_of.map(|(transport, rounds)| Row::of(experiment, *transport, rounds, &samples[0])));
    }
    let titles = Experiment::ALL.map(|experiment| (experiment, experiment.title(options))).to_vec();
    let (bytes, write_bytes) = (options.bytes, options.write_bytes);
    let (rounds, round_trips) = (plan.rounds, plan.trips);
    Ok(Report { schema: SCHEMA, kind: "measured", machine, rounds, round_trips, bytes, write_bytes, rows, titles })
}

fn sample(experiment: Experiment, transport: Transport, options: &Options, plan: &Plan) -> Result<Sample> {
    let bytes = options.bytes;
    Ok(match (experiment, transport.setup(), transport) {
        (Experiment::Writes, Some(setup), _) => {
            Sample::BytesPerSecond(setup.write(options.write_bytes, plan.stream_bytes)?)
        }
        (Experiment::Writes, None, Transport::Floor) => Sample::BytesPerSecond(bare::copy(plan.stream_bytes)),
        (Experiment::Writes, None, _) => Sample::BytesPerSecond(bare::stream(plan.stream_bytes)?),
        (_, Some(setup), _) => Sample::Latencies(setup.round_trips(bytes, plan.trips)?),
        (_, None, Transport::Floor) => Sample::Latencies(bare::line_bounces(plan.trips)),
        (_, None, _) => Sample::Latencies(bare::round_trips(bytes, plan.trips)?),
    })
}

impl Report {
    fn text(&self) -> String {
        let mut text = format!(
            "Each figure is measured: two threads of this process, {} alternating rounds, medians over the rounds.\n\
             The ratio is to bare UDP in the same round, of medians or of rates, with the 95% interval of its median\n\
             by ranks. Bare UDP spins and acknowledges nothing; the stream of bare UDP sends datagrams of 4 KiB.\n\
             {}; the threads are not pinned.\n",
            self.rounds,
            self.machine.description()
        );
        for (experiment, title) in &self.titles {
            text.push_str(&format!("\n{title}\n{}", self.table(*experiment).render()));
        }
        text
    }

    fn table(&self, experiment: Experiment) -> Table {
        let ratio_columns = ["to bare UDP", "95% interval"];
        let mut table = match experiment {
            Experiment::Writes => Table::numeric(["", "MB/s"].into_iter().chain(ratio_columns)),
            _ => Table::numeric(["", "p50, us", "p99, us", "p99.9, us", "max, ms"].into_iter().chain(ratio_columns)),
        };
        for row in self.rows.iter().filter(|row| row.experiment == experiment) {
            let mut cells = vec![row.transport.title(experiment).to_owned()];
            if let Some(Quantiles { p50_ns, p99_ns, p999_ns, max_ns, .. }) = row.round_trip {
                cells.extend([p50_ns, p99_ns, p999_ns].map(|ns| format!("{:.2}", ns / 1000.0)));
                cells.push(format!("{:.2}", max_ns / MILLISECOND_NS));
            }
            cells.extend(row.bytes_per_s.map(|rate| format!("{:.0}", rate / MEGABYTE)));
            cells.push(format!("{:.2}", row.ratio_to_bare_udp.median));
            cells.push(match row.ratio_to_bare_udp {
                Ratio { interval: [low, high], rounds: Ratio::ROUNDS_MIN.., .. } => format!("{low:.2} to {high:.2}"),
                _ => NONE.to_owned(),
            });
            table.row(cells);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_carrier_is_measured_in_every_experiment() {
        let options = Options { json: false, quick: true, rounds: Some(1), bytes: 64, write_bytes: 10_000 };
        let report = measure(&options, &Plan { trips: 50, stream_bytes: 200_000, ..Plan::of(&options) }).unwrap();
        let count = |experiment| report.rows.iter().filter(|row| row.experiment == experiment).count();
        assert_eq!(Experiment::ALL.map(count), [7, 5, 7], "{}", report.text());
        let is_measured = |row: &Row| row.ratio_to_bare_udp.median > 0.0 && row.ratio_to_bare_udp.rounds == 1;
        assert!(report.rows.iter().all(is_measured), "{}", report.text());
        assert!(report.rows.iter().all(|row| row.round_trip.is_some() != row.bytes_per_s.is_some()));
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!((&json["schema"], &json["kind"]), (&SCHEMA.into(), &"measured".into()));
        let text = report.text();
        for words in ["Round trips of SENDs of 64 bytes", "beside one busy thread", "WRITEs of 10000 bytes", "one copy"]
        {
            assert!(text.contains(words), "{words} in {text}");
        }
    }
}
