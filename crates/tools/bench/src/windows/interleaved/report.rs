//! What the two loops found, as JSON and as text.

use anyhow::{Context, Result};
use machine::Machine;
use serde::Serialize;
use stats::{Latencies, Quantiles, Table, median, median_ratio};
use units::NONE;

use super::{Asks, Found, HAND_OVERS, How, Interleaved, Length, SIZES};
use crate::floors::{self, CacheLine};
use crate::launch::Launcher;
use crate::progress::Progress;

const SCHEMA: &str = "crosslane.bench.windows.interleaved/1";

/// What the figures are of.
const WHAT: &str = "four parties in two loops: the client and the proxy beside the server in one thread, the server \
                    and the proxy beside the client in another, each on a core of its own; unmodified sockets that \
                    do not block, the proxies' own turns, nobody sleeps; no monitors. All six hand-overs are from \
                    core to core, and each loop asks its other party in between: no better than four cores";

/// How often, and for how long.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Plan {
    /// Times that each size is measured, in turn.
    pub rounds: u32,
    /// Length of a sample.
    #[serde(flatten)]
    pub length: Length,
    /// Length of the floor beside it.
    #[serde(skip)]
    pub floor_ms: u64,
}

impl Plan {
    /// The usual one, or a shorter one.
    pub const fn new(is_quick: bool) -> Self {
        let (rounds, sample_ms) = if is_quick { (3, 40) } else { (15, 100) };
        Self { rounds, length: Length::Milliseconds(sample_ms), floor_ms: 4 }
    }

    /// So many round trips of each size, once: for whoever wants to know whether it works.
    const fn of_trips(trips: u64) -> Self {
        Self { rounds: 1, length: Length::Trips(trips), floor_ms: 1 }
    }

    /// Samples in all.
    pub const fn steps(&self) -> u64 {
        2 * SIZES.len() as u64 * self.rounds as u64
    }
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    kind: &'static str,
    what: &'static str,
    #[serde(flatten)]
    plan: Plan,
    rows: Vec<Row>,
    /// Samples that failed.
    pub failures: Vec<String>,
}

/// Round trips of one size: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
struct Row {
    size_bytes: usize,
    asks: Asks,
    rounds: usize,
    latency: Option<Quantiles>,
    cache_line_rtt_ns_p50: Option<f64>,
    p50_over_cache_line: Option<f64>,
    /// The sixth part of a round trip.
    hand_over_ns_p50: Option<f64>,
    idle_turn_ns: Option<f64>,
    idle_receive_ns: Option<f64>,
    frames_per_trip: Option<f64>,
}

/// One size in one round.
struct Sample {
    size_bytes: usize,
    asks: Asks,
    found: Found,
    line: Option<CacheLine>,
}

/// Each size, in both ways.
fn cases() -> impl Iterator<Item = (usize, Asks)> {
    SIZES.into_iter().flat_map(|size_bytes| [Asks::Both, Asks::Next].map(|asks| (size_bytes, asks)))
}

/// Measures all sizes in turn, each beside its floor.
pub fn measure(launcher: &Launcher, plan: Plan, progress: &mut Progress) -> Result<Measured> {
    let mut failures = Vec::new();
    let mut samples = Vec::new();
    let loops = Interleaved::up(launcher).map_err(|error| failures.push(format!("{error:#}"))).ok();
    for round in 1..=plan.rounds {
        for (size_bytes, asks) in cases() {
            let size = units::size(size_bytes as u64);
            progress.step(&format!("round {round} of {}: four parties in two loops", plan.rounds), &size);
            let Some(loops) = &loops else { continue };
            let line = floors::cache_line(launcher, plan.floor_ms)?;
            match loops.sample(launcher, How { size_bytes, asks, length: plan.length }) {
                Ok(found) => samples.push(Sample { size_bytes, asks, found, line }),
                Err(error) => {
                    let what = format!("{size} by four parties in two loops, round {round}: {error:#}");
                    progress.warn(&format!("failed: {what}"));
                    failures.push(what);
                }
            }
        }
    }
    Ok(Measured::of(plan, &samples, failures))
}

impl Measured {
    /// None at all, where they were not asked for.
    pub fn none() -> Self {
        Self::of(Plan { rounds: 0, ..Plan::new(true) }, &[], Vec::new())
    }

    fn of(plan: Plan, samples: &[Sample], failures: Vec<String>) -> Self {
        let row = |case: (usize, Asks)| {
            let of_case = samples.iter().filter(|sample| (sample.size_bytes, sample.asks) == case);
            Row::of(case, &of_case.collect::<Vec<_>>())
        };
        let rows = cases().filter(|_| plan.rounds > 0).map(row).collect();
        Self { kind: "measured", what: WHAT, plan, rows, failures }
    }

    /// A table; `beside` tells p50 in ns, and how many floors it is, of the same size by proxies as processes.
    pub fn text(&self, beside: impl Fn(u64) -> (Option<f64>, Option<f64>)) -> String {
        if self.plan.rounds == 0 {
            return String::new();
        }
        let header = ["size", "p50", "p99", "max", "x floor", "a hand-over, ns", "p50", "p99", "x floor"];
        let header = header.into_iter().chain(["frames", "proxy", "program", "p50", "x floor"]);
        let groups = [("", 1), ("asking both", 5), ("asking whose turn it is", 3), ("", 1), ("idle look, ns", 2)];
        let mut table = Table::numeric(header).groups(groups.into_iter().chain([("as processes", 2)]));
        let number = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), |value| format!("{value:.0}"));
        for pair in self.rows.chunks_exact(2) {
            let [both, next] = [&pair[0], &pair[1]];
            let micros = |row: &Row, of: fn(&Quantiles) -> f64| units::micros(row.latency.as_ref().map(of));
            let (beside_ns, beside_floors) = beside(both.size_bytes as u64);
            table.row(vec![
                units::size(both.size_bytes as u64),
                micros(both, |all| all.p50_ns),
                micros(both, |all| all.p99_ns),
                micros(both, |all| all.max_ns),
                units::times(both.p50_over_cache_line),
                number(both.hand_over_ns_p50),
                micros(next, |all| all.p50_ns),
                micros(next, |all| all.p99_ns),
                units::times(next.p50_over_cache_line),
                both.frames_per_trip.map_or_else(|| NONE.to_owned(), |frames| format!("{frames:.2}")),
                number(both.idle_turn_ns),
                number(both.idle_receive_ns),
                units::micros(beside_ns),
                units::times(beside_floors),
            ]);
        }
        format!("measured, us, {} rounds, {}:\n\n{}", self.plan.rounds, self.what, table.render())
    }
}

impl Row {
    fn of((size_bytes, asks): (usize, Asks), samples: &[&Sample]) -> Self {
        let all = |value: fn(&Sample) -> f64| samples.iter().map(|sample| value(sample)).collect::<Vec<f64>>();
        let p50s = all(|sample| sample.found.latencies.quantile_ns(0.5));
        let lines: Vec<f64> = samples.iter().filter_map(|sample| Some(sample.line?.rtt_ns_p50)).collect();
        Self {
            size_bytes,
            asks,
            rounds: samples.len(),
            latency: quantiles(samples.iter().map(|sample| &sample.found.latencies)),
            cache_line_rtt_ns_p50: median(lines.iter().copied()),
            p50_over_cache_line: median_ratio(&p50s, &lines),
            hand_over_ns_p50: median(p50s.iter().map(|ns| ns / f64::from(HAND_OVERS))),
            idle_turn_ns: median(all(|sample| sample.found.idle_turn_ns)),
            idle_receive_ns: median(all(|sample| sample.found.idle_receive_ns)),
            frames_per_trip: median(all(|sample| sample.found.frames_per_trip)),
        }
    }
}

/// Medians of each round's quantiles; the maximum and the count are of all rounds.
pub fn quantiles<'a>(rounds: impl Iterator<Item = &'a Latencies>) -> Option<Quantiles> {
    let rounds: Vec<Quantiles> = rounds.map(Latencies::quantiles).collect();
    Some(Quantiles {
        p50_ns: median(rounds.iter().map(|round| round.p50_ns))?,
        p99_ns: median(rounds.iter().map(|round| round.p99_ns))?,
        p999_ns: median(rounds.iter().map(|round| round.p999_ns))?,
        max_ns: rounds.iter().map(|round| round.max_ns).fold(0.0, f64::max),
        samples: rounds.iter().map(|round| round.samples).sum(),
    })
}

/// The two loops alone, without the rest of `bench windows`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    command: String,
    machine: Machine,
    where_cores_suffice: Measured,
}

/// Measures the two loops alone, and prints.
pub fn main(is_quick: bool, is_json: bool, trips: Option<u64>) -> Result<()> {
    let launcher = Launcher::new()?;
    let machine = Machine::describe(launcher.cores);
    let plan = trips.map_or(Plan::new(is_quick), Plan::of_trips);
    let mut progress = Progress::new(plan.steps());
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    let measured = measure(&launcher, plan, &mut progress)?;
    drop(progress);
    let words = [(is_quick, " --quick"), (is_json, " --json")].map(|(is_given, word)| if is_given { word } else { "" });
    let command = format!("crosslane bench windows --interleaved{}", words.concat());
    let report = Report { schema: SCHEMA, command, machine, where_cores_suffice: measured };
    if is_json {
        println!("{}", serde_json::to_string_pretty(&report).context("writing JSON")?);
    } else {
        print!("{}\n\n{}", report.machine.sentence(), report.where_cores_suffice.text(|_| (None, None)));
    }
    let failures = &report.where_cores_suffice.failures;
    failures.first().map_or(Ok(()), |first| Err(anyhow::anyhow!("{} samples failed, first {first}", failures.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(size_bytes: usize, ns: f64) -> Sample {
        let mut latencies = Latencies::new();
        latencies.add(ns, 100);
        let found = Found { latencies, idle_turn_ns: 50.0, idle_receive_ns: 20.0, frames_per_trip: 2.0 };
        let line = Some(CacheLine { rtt_ns_p50: 100.0, rtt_ns_p99: 120.0, rtt_ns_untimed: 90.0 });
        Sample { size_bytes, asks: Asks::Both, found, line }
    }

    #[test]
    fn rows_are_medians_in_multiples_of_the_floor_beside_them_and_say_what_they_are() {
        let samples = [sample(8, 900.0), sample(8, 600.0), sample(8, 50_000.0)];
        let measured = Measured::of(Plan::new(true), &samples, Vec::new());
        let json = serde_json::to_value(&measured).unwrap();
        assert_eq!((&json["kind"], &json["rounds"]), (&"measured".into(), &3.into()));
        let row = &json["rows"][0];
        assert_eq!(row["p50_over_cache_line"].as_f64().map(f64::round), Some(9.0));
        assert_eq!(row["hand_over_ns_p50"].as_f64().map(f64::round), Some(150.0));
        assert_eq!(json["rows"][1]["latency"], serde_json::Value::Null);
        let text = measured.text(|_| (Some(8_500.0), Some(85.0)));
        for words in ["measured", "four parties in two loops", "as processes", "8.50", "0.90"] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
    }
}
