//! `crosslane compare`: runs a client command over kernel TCP and over lanes, in alternating rounds.
//!
//! The pages of counters of the client's processes are in a folder of its own that keeps them, so that those of a
//! client that has ended can be read.

mod report;
mod trial;

use std::ffi::OsString;
use std::fs::{DirBuilder, Permissions};
use std::io::PipeReader;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use machine::Machine;
use stats_page::reader::read_rack;
use stats_page::{FallbackReason, KEEP_PAGES, STAT_FOLDER};

use crate::run::Joining;
use crate::{output, run, signals};
pub use report::SCHEMA;
use report::{Connections, Report};
use trial::Trial;

const AFTER_HELP: &str = "The server must run under 'crosslane run' already: it serves both sides. A connection gets a \
                          lane once it is busy, with its fourth request or later: a client of short connections is \
                          measured on kernel TCP on both sides, once with the library and once without it.";

/// Options of `crosslane compare`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Options {
    /// Number of rounds, each of which runs the command once over either path; 6 are the fewest with a 95% interval
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON (schema crosslane-compare/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    joining: Joining,
    /// Client and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CLIENT ARGS")]
    command: Vec<OsString>,
}

/// What carries the connections of a run of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Kernel,
    Lanes,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel TCP",
            Self::Lanes => "lanes",
        }
    }
}

/// All runs of the client.
struct Trials {
    kernel: Vec<Trial>,
    lanes: Vec<Trial>,
    /// Connections of all runs over lanes.
    connections: Connections,
}

/// Runs the rounds and prints the report.
pub fn main(options: &Options) -> Result<()> {
    let shown = shown(&options.command);
    let stop = signals::to_end().context("preparing for signals")?;
    let machine = Machine::describe(None);
    let trials = run_rounds(options, &shown, &stop)?;
    let report = Report::of(shown, machine, trials);
    if options.json { output::print_json(&report) } else { output::print(&report.text()) }
}

/// Runs all rounds. The first begins over lanes, so that a client whose busy connections get none is not measured at
/// all; the order alternates, so that a drift of the machine affects both sides alike.
fn run_rounds(options: &Options, shown: &str, stop: &PipeReader) -> Result<Trials> {
    let mut trials = Trials { kernel: Vec::new(), lanes: Vec::new(), connections: Connections::default() };
    for round in 0..options.rounds {
        let order = if round % 2 == 0 { [Side::Lanes, Side::Kernel] } else { [Side::Kernel, Side::Lanes] };
        for side in order {
            match side {
                Side::Kernel => trials.kernel.push(over_kernel(options, shown, stop)?),
                Side::Lanes => {
                    let (trial, connections) = over_lanes(options, shown, stop)?;
                    trials.lanes.push(trial);
                    trials.connections.add(&connections);
                }
            }
        }
    }
    Ok(trials)
}

fn over_kernel(options: &Options, shown: &str, stop: &PipeReader) -> Result<Trial> {
    let (program, arguments) = options.command.split_first().context("no client given; name one after --")?;
    let mut command = Command::new(program);
    // The library may be preloaded for this command already.
    command.args(arguments).env("CROSSLANE_OFF", "1");
    finish(&mut command, shown, Side::Kernel, stop)
}

fn over_lanes(options: &Options, shown: &str, stop: &PipeReader) -> Result<(Trial, Connections)> {
    let folder = tempfile::tempdir().context("making a folder for counters; check TMPDIR")?;
    let pages = folder.path().join(STAT_FOLDER);
    DirBuilder::new().recursive(true).mode(0o700).create(&pages)?;
    std::fs::set_permissions(&pages, Permissions::from_mode(0o700 | KEEP_PAGES))?;
    let mut command = run::command(&options.joining, &options.command, true)?;
    // What may be set for this command would keep the client from lanes, or make a connection without one fail.
    command.env_remove("CROSSLANE_OFF").env_remove("CROSSLANE_REQUIRE_LANE").env("CROSSLANE_STATS", folder.path());
    let trial = finish(&mut command, shown, Side::Lanes, stop)?;
    let connections = connections(folder.path())?;
    // Without a reason none was busy, which is no fault of the client.
    if connections.over_lanes() == 0 && !connections.reasons.is_empty() {
        bail!("'{shown}' {}", without_lanes(&connections));
    }
    Ok((trial, connections))
}

/// Runs the client. Its failure is an error of one line.
fn finish(command: &mut Command, shown: &str, side: Side, stop: &PipeReader) -> Result<Trial> {
    let side = side.name();
    let trial = Trial::run(command, stop).with_context(|| format!("'{shown}' over {side}"))?;
    if !trial.status.success() {
        let said = trial.output.last().map(|line| format!(" ('{line}')")).unwrap_or_default();
        bail!("'{shown}' over {side} failed: {}{said}; start its server, or correct the command", trial.status);
    }
    Ok(trial)
}

/// Returns the sum over all processes of the client.
fn connections(folder: &Path) -> Result<Connections> {
    let snapshot = read_rack(folder).context("reading the counters of the client")?;
    let mut sum = Connections::default();
    for process in snapshot.processes {
        let reasons = process.fallbacks.into_iter().map(|(reason, count)| (reason.to_owned(), count)).collect();
        sum.add(&Connections {
            lane: process.lane.connections_total,
            window: process.window.connections_total,
            kernel: process.kernel.connections_total,
            reasons,
        });
    }
    Ok(sum)
}

/// Returns why a client whose busy connections used no lane is not compared.
fn without_lanes(connections: &Connections) -> String {
    let most = connections.reasons.iter().max_by_key(|(_, count)| **count);
    let known = |name: &str| FallbackReason::ALL.iter().find(|reason| reason.name() == name);
    let why = match most.and_then(|(name, _)| known(name)) {
        Some(FallbackReason::NoAnswer) => {
            "its server does not look for lanes; start it with crosslane run, in the same rack"
        }
        Some(reason) => &format!("{}; change that, or see crosslane doctor", reason.explanation()),
        None => "the reason is unknown here; see crosslane doctor",
    };
    format!("used no lane, so both sides would be kernel TCP ({}): {why}", connections.reasons())
}

/// Returns a command line as it would be typed, roughly.
fn shown(command: &[OsString]) -> String {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy().escape_debug().to_string()).collect();
    words.join(" ")
}
