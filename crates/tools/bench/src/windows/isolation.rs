//! Ping-pongs under background load: streams over the same path, or CPU-bound programs.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use stats::Latencies;

use super::rack::{RackKind, RunningRack};
use super::{DataPath, Measured, Plan, SLACK, bring_up, endpoints};
use crate::launch::{Endpoints, Launcher};
use crate::probe::Probe;
use crate::process::ChildGuard;
use crate::progress::Progress;

/// Number of streams of the background load, as an argument.
const STREAMS: &str = "8";

/// A ping-pong under background load.
#[derive(Clone, Copy, Debug)]
pub struct IsolationCase {
    pub path: DataPath,
    /// The rack that the path needs.
    pub kind: Option<RackKind>,
    pub title: &'static str,
    pub load: BackgroundLoad,
}

/// The background load of a ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundLoad {
    None,
    /// Streams over the same path.
    Streams,
    /// CPU-bound programs: how many for each core, with which nice value.
    CpuBound {
        per_core: usize,
        nice: i32,
    },
}

const QUIET: (&str, BackgroundLoad) = ("quiet", BackgroundLoad::None);
const BUSY: (&str, BackgroundLoad) = ("a busy loop for each core", BackgroundLoad::CpuBound { per_core: 1, nice: 0 });
const BUSY_NICE: (&str, BackgroundLoad) =
    ("two busy loops for each core, nice 10", BackgroundLoad::CpuBound { per_core: 2, nice: 10 });

const fn streams(title: &'static str) -> (&'static str, BackgroundLoad) {
    (title, BackgroundLoad::Streams)
}

const fn case(path: DataPath, kind: Option<RackKind>, (title, load): (&'static str, BackgroundLoad)) -> IsolationCase {
    IsolationCase { path, kind, title, load }
}

/// All cases, path by path; the quiet one of a path is the reference of the others.
pub const ISOLATION_CASES: [IsolationCase; 14] = [
    case(DataPath::WindowProxy, Some(RackKind::Proxy), QUIET),
    case(DataPath::WindowProxy, Some(RackKind::Unsliced), streams("8 streams and 1 unread, slicing off")),
    case(DataPath::WindowProxy, Some(RackKind::Sliced), streams("8 streams and 1 unread, slicing on")),
    case(DataPath::WindowProxy, Some(RackKind::Proxy), streams("8 streams and 1 unread, slicing and classes on")),
    case(DataPath::WindowProxy, Some(RackKind::Proxy), BUSY),
    case(DataPath::WindowProxy, Some(RackKind::Proxy), BUSY_NICE),
    case(DataPath::WindowDirect, Some(RackKind::Direct), QUIET),
    case(DataPath::WindowDirect, Some(RackKind::Direct), streams("8 streams and 1 unread")),
    case(DataPath::WindowDirect, Some(RackKind::Direct), BUSY),
    case(DataPath::WindowDirect, Some(RackKind::Direct), BUSY_NICE),
    case(DataPath::KernelTcp, None, QUIET),
    case(DataPath::KernelTcp, None, streams("8 streams and 1 unread")),
    case(DataPath::KernelTcp, None, BUSY),
    case(DataPath::KernelTcp, None, BUSY_NICE),
];

/// All rounds of one case of background load.
pub struct IsolationCell {
    pub case: IsolationCase,
    pub rounds: Vec<Latencies>,
    /// Rates of the streams in bytes a second.
    pub streams: Vec<f64>,
    /// Number of rounds that failed.
    pub failed: usize,
}

impl IsolationCell {
    pub fn new(case: IsolationCase) -> Self {
        Self { case, rounds: Vec::new(), streams: Vec::new(), failed: 0 }
    }
}

/// Measures the ping-pong of every case in every round.
pub fn measure(launcher: &Launcher, plan: &Plan, measured: &mut Measured, progress: &mut Progress) {
    let kinds = [RackKind::Proxy, RackKind::Unsliced, RackKind::Sliced, RackKind::Direct];
    let racks = bring_up(launcher, &kinds, measured, progress);
    for round in 1..=plan.isolation_rounds {
        take_round(launcher, plan, &racks, round, measured, progress);
    }
}

fn take_round(
    launcher: &Launcher,
    plan: &Plan,
    racks: &[(RackKind, RunningRack)],
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
) {
    for cell in &mut measured.isolation {
        let IsolationCase { path, kind, title, load } = cell.case;
        let stage = format!("round {round} of {}: background load", plan.isolation_rounds);
        progress.step(&stage, &format!("{title}, {}", path.title()));
        let Some(endpoints) = endpoints(launcher, racks, path, kind) else { continue };
        match ping_pong_under_load(launcher, plan, &endpoints, load) {
            Ok((latencies, streams)) => {
                cell.rounds.push(latencies);
                cell.streams.extend(streams);
            }
            Err(error) => {
                let what = format!("ping-pong by {}, {title}, round {round}: {error:#}", path.title());
                progress.warn(&format!("failed: {what}"));
                measured.other_failures.push(what);
                cell.failed += 1;
            }
        }
    }
}

/// Runs a ping-pong of 8 bytes under background load, and returns its latencies and the rate of the streams.
fn ping_pong_under_load(
    launcher: &Launcher,
    plan: &Plan,
    endpoints: &Endpoints,
    background: BackgroundLoad,
) -> Result<(Latencies, Option<f64>)> {
    // The streams must last longer than the ping-pong with its start, warm-up and measurement.
    let limit = Duration::from_millis(4 * plan.isolation_ms) + SLACK;
    let load_ms = (2 * plan.isolation_ms + 1000).to_string();
    let mut load = match background {
        BackgroundLoad::Streams => Some(launcher.start(endpoints, Probe::Load, &[STREAMS], &[STREAMS, &load_ms])?),
        _ => None,
    };
    if let Some(load) = &mut load {
        load.client_line("loading", SLACK)?;
    }
    let _busy_loops = match background {
        BackgroundLoad::CpuBound { per_core, nice } => busy_loops(per_core, nice)?,
        _ => Vec::new(),
    };
    let milliseconds = plan.isolation_ms.to_string();
    let args = ["blocking", "8", &milliseconds];
    let pair = launcher.start(endpoints, Probe::RoundTrip, &args[..2], &args)?.finish(limit)?;
    let streams = match load {
        Some(load) => Some(load.finish(limit)?.server.per_second("bytes")?),
        None => None,
    };
    Ok((pair.client.latencies()?, streams))
}

/// Starts CPU-bound programs on any core, which run until they are dropped.
fn busy_loops(per_core: usize, nice: i32) -> Result<Vec<ChildGuard>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let start = |_| {
        let mut command = Command::new("nice");
        command.arg("-n").arg(nice.to_string()).args(["sh", "-c", "while :; do :; done"]);
        ChildGuard::spawn(command, None)
    };
    (0..per_core * cores).map(start).collect()
}
