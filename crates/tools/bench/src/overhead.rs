//! `crosslane bench overhead`: what the calls of a program that uses no lane take with the library and without it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use machine::Machine;
use serde::Serialize;
use stats::{Ratio, Table, median, ratios};
use units::NONE;

use crate::launch::{Endpoints, Launcher, Libraries, NODE_A, Transport};
use crate::probe::{Probe, ProbeOutput};
use crate::progress::Progress;

/// The schema of the JSON report.
pub const SCHEMA: &str = "crosslane.bench.overhead/1";
/// The library may take this many times the call without it, or this many nanoseconds more, whichever is more.
const RATIO_MAX: f64 = 1.05;
const DIFFERENCE_NS_MAX: f64 = 2000.0;
const LIMIT: Duration = Duration::from_secs(120);
/// A start of a program takes about a millisecond.
const STARTS_SHARE: u32 = 20;

/// The command-line options.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Options {
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub json: bool,
    /// Fewer rounds and calls: seconds, but less precise
    #[arg(long)]
    pub quick: bool,
    /// Number of alternating rounds (default: 15, or 6 with --quick)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// The library to load [default: libcrosslane.so next to this command or under /usr/lib/crosslane]
    #[arg(long, value_name = "PATH")]
    pub library: Option<PathBuf>,
}

/// The results of a run.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    /// Provenance of every number.
    kind: &'static str,
    machine: Machine,
    rounds: u32,
    /// Number of times that each call is made in a round; programs are started less often.
    calls: u32,
    rows: Vec<Row>,
}

/// One call: medians over the rounds, of the medians of each round.
#[derive(Serialize)]
struct Row {
    call: String,
    without_ns: f64,
    with_ns: f64,
    /// Median of the differences of the rounds.
    difference_ns: f64,
    /// Time with the library over the time without it, round by round.
    ratio: Ratio,
    /// Whether the medians are within [`RATIO_MAX`] or [`DIFFERENCE_NS_MAX`].
    is_within: bool,
}

impl Row {
    fn of(call: &str, without: &[f64], with: &[f64]) -> Self {
        let ratio = Ratio::of(&ratios(with, without));
        let difference_ns = median(with.iter().zip(without).map(|(with, without)| with - without)).unwrap_or(0.0);
        Self {
            call: call.to_owned(),
            without_ns: median(without.iter().copied()).unwrap_or(0.0),
            with_ns: median(with.iter().copied()).unwrap_or(0.0),
            difference_ns,
            ratio,
            is_within: ratio.median <= RATIO_MAX || difference_ns <= DIFFERENCE_NS_MAX,
        }
    }
}

/// Runs the benchmark and prints the report.
///
/// # Errors
/// A program that could not be started or failed.
pub fn main(options: &Options) -> Result<()> {
    let libraries = Libraries { library: options.library.clone(), baseline: None };
    let report = measure(options, &Launcher::with_libraries(libraries)?)?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).context("writing JSON")?);
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

fn measure(options: &Options, launcher: &Launcher) -> Result<Report> {
    let machine = Machine::describe(launcher.cores);
    let rounds = options.rounds.unwrap_or(if options.quick { Ratio::ROUNDS_MIN as u32 } else { 15 });
    let calls = if options.quick { 200 } else { 1000 };
    let mut progress = Progress::new(u64::from(rounds) * 2);
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    // By transport and round.
    let mut outputs: [Vec<Vec<(String, f64)>>; 2] = Default::default();
    for round in 1..=rounds {
        let mut order = [(0, Transport::KernelTcp), (1, Transport::Crosslane)];
        // Every second round is in reverse order, so that a drift of the machine affects both alike.
        if round % 2 == 0 {
            order.reverse();
        }
        for (index, transport) in order {
            progress.step(&format!("round {round} of {rounds}"), transport.title());
            outputs[index].push(sample(launcher, transport, calls)?);
        }
    }
    let [without, with] = &outputs;
    let names = without.first().map(|round| round.iter().map(|(name, _)| name.as_str())).into_iter().flatten();
    let rows = names.map(|name| Row::of(name, &of_call(without, name), &of_call(with, name))).collect();
    Ok(Report { schema: SCHEMA, kind: "measured", machine, rounds, calls, rows })
}

/// Returns the times of a call in all rounds.
fn of_call(rounds: &[Vec<(String, f64)>], name: &str) -> Vec<f64> {
    rounds.iter().filter_map(|round| round.iter().find(|(known, _)| known == name)).map(|(_, ns)| *ns).collect()
}

/// Returns the time of each call of the probe, whose peer runs without the library, and of starts of a program.
fn sample(launcher: &Launcher, transport: Transport, calls: u32) -> Result<Vec<(String, f64)>> {
    let run = launcher.launcher_words(transport);
    let (times, starts) = (calls.to_string(), (calls / STARTS_SHARE).max(1).to_string());
    let endpoints = Endpoints { client: run.clone(), address: format!("{NODE_A}:0"), ..Endpoints::default() };
    let output = launcher.pair_until_client_ends(&endpoints, Probe::Overhead, &[&times], LIMIT)?;
    let mut samples = named(&output);
    let mut command = vec![OsString::from("start"), starts.into()];
    command.extend(run);
    command.push("/bin/true".into());
    let started = launcher.run_bare(Probe::Overhead, &command, LIMIT)?;
    samples.push(("run_program".to_owned(), started.value("start")?));
    Ok(samples)
}

fn named(output: &ProbeOutput) -> Vec<(String, f64)> {
    output.values().map(|(name, ns)| (name.to_owned(), ns)).collect()
}

impl Report {
    fn text(&self) -> String {
        format!(
            "Each figure is measured: a C program that uses no lane, without the library and with it, {} alternating\n\
             rounds, medians over the rounds of the medians of {} calls. The ratio is the time with the library over\n\
             the time without it, with the 95% interval of its median by ranks. The peer runs without the library.\n\
             \"within\": at most {RATIO_MAX} times, or {} us more.\n{}\n\n{}",
            self.rounds,
            self.calls,
            DIFFERENCE_NS_MAX / 1000.0,
            self.machine.sentence(),
            self.table().render()
        )
    }

    fn table(&self) -> Table {
        let mut table = Table::numeric(["", "without, us", "with, us", "more, us", "ratio", "95% interval", "within"]);
        for row in &self.rows {
            let micros = |ns: f64| format!("{:.2}", ns / 1000.0);
            let interval = match row.ratio {
                Ratio { interval: [low, high], rounds: Ratio::ROUNDS_MIN.., .. } => format!("{low:.2} to {high:.2}"),
                _ => NONE.to_owned(),
            };
            table.row(vec![
                row.call.replace('_', " "),
                micros(row.without_ns),
                micros(row.with_ns),
                micros(row.difference_ns),
                format!("{:.2}", row.ratio.median),
                interval,
                if row.is_within { "yes" } else { "no" }.to_owned(),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_measured_on_both_sides() {
        // `env PROGRAM ...` starts a program as `crosslane run` does.
        let launcher = Launcher::with_wrapper("env").unwrap();
        let options = Options { quick: true, rounds: Some(1), ..Options::default() };
        let report = measure(&options, &launcher).unwrap();
        assert!(report.rows.len() > 30, "{}", report.text());
        assert!(report.rows.iter().all(|row| row.without_ns > 0.0 && row.with_ns > 0.0), "{}", report.text());
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!((&json["schema"], &json["kind"]), (&SCHEMA.into(), &"measured".into()));
        let text = report.text();
        for call in ["connect refused", "accept", "fork", "run program"] {
            assert!(text.contains(call), "{call} in {text}");
        }
    }

    #[test]
    fn a_call_is_within_the_bound_by_ratio_or_by_difference() {
        let is_within = |without: f64, with: f64| Row::of("x", &[without; 7], &[with; 7]).is_within;
        assert!(is_within(100.0, 1900.0) && is_within(1e6, 1.04e6));
        assert!(!is_within(1000.0, 3100.0) && !is_within(1e6, 1.06e6));
    }
}
