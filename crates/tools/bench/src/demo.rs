//! `crosslane demo`: an unmodified Redis server and its clients, over kernel TCP, over AF_UNIX and over lanes.

mod report;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use machine::Machine;
use serde::Serialize;
use stats::Latencies;

use crate::floors::{self, FloorSample};
use crate::launch::{Launcher, NODE_A, Node, READY_TIMEOUT, Transport};
use crate::process::ChildGuard;
use crate::progress::Progress;
use report::Report;

/// The command-line options.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Options {
    /// Print one JSON document instead of the table
    #[arg(long)]
    pub json: bool,
    /// One round and shorter samples
    #[arg(long)]
    pub quick: bool,
    /// Number of alternating rounds (default: 3, with --quick 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
}

/// Runs the demo and prints its table.
pub fn main(options: &Options) -> Result<()> {
    let redis = Redis::find()?;
    let (rounds, sample_ms) = if options.quick { (1, 150) } else { (3, 300) };
    let plan = Plan { scenarios: Scenario::all(), rounds: options.rounds.unwrap_or(rounds), sample_ms };
    let report = run(&Launcher::new()?, &redis, &plan)?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).context("writing JSON")?);
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

/// Paths of the unmodified programs.
struct Redis {
    server: PathBuf,
    benchmark: PathBuf,
}

impl Redis {
    fn find() -> Result<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let find = |name: &str| {
            let found =
                std::env::split_paths(&path).map(|directory| directory.join(name)).find(|program| program.is_file());
            found.with_context(|| {
                format!("{name} was not found in PATH, and the demo runs a real Redis: apt-get install redis")
            })
        };
        Ok(Self { server: find("redis-server")?, benchmark: find("redis-benchmark")? })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Operation {
    Get,
    Set,
}

impl Operation {
    fn word(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Set => "set",
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Scenario {
    clients: u32,
    value_bytes: u32,
    operation: Operation,
}

impl Scenario {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for clients in [1, 50] {
            for value_bytes in [8, 4096] {
                all.extend([Operation::Get, Operation::Set].map(|operation| Self { clients, value_bytes, operation }));
            }
        }
        all
    }

    fn title(self) -> String {
        let clients = if self.clients == 1 { "1 client".to_owned() } else { format!("{} clients", self.clients) };
        format!("{} of {}, {clients}", self.operation.word().to_uppercase(), units::size(u64::from(self.value_bytes)))
    }
}

struct Plan {
    scenarios: Vec<Scenario>,
    rounds: u32,
    sample_ms: u64,
}

/// Redis has no mode in which it spins, so that there is no column for kernel TCP that does.
const TRANSPORTS: [Transport; 3] = [Transport::KernelTcp, Transport::AfUnix, Transport::Crosslane];
const FLOOR_MS: u64 = 5;

/// A sample of one transport in one scenario in one round.
struct Sample {
    latencies: Latencies,
    operations_per_s: f64,
    benchmark_operations_per_s: f64,
    floors: FloorSample,
}

/// All rounds of one transport in one scenario.
struct Cell {
    scenario: Scenario,
    transport: Transport,
    rounds: Vec<Sample>,
}

fn run(launcher: &Launcher, redis: &Redis, plan: &Plan) -> Result<Report> {
    let machine = Machine::describe(launcher.cores);
    let pairs = plan.scenarios.iter().flat_map(|scenario| TRANSPORTS.map(|transport| (*scenario, transport)));
    let mut cells: Vec<Cell> =
        pairs.map(|(scenario, transport)| Cell { scenario, transport, rounds: Vec::new() }).collect();
    let mut progress = Progress::new(cells.len() as u64 * u64::from(plan.rounds));
    if let Some(warning) = machine.busy_warning() {
        progress.warn(&warning);
    }
    let mut syscalls_ns = Vec::new();
    for round in 1..=plan.rounds {
        syscalls_ns.push(floors::syscall_ns_p50(launcher, FLOOR_MS)?);
        // All servers run for the whole round, because an idle one costs almost nothing. So samples of all transports
        // are adjacent in time.
        let servers = TRANSPORTS.map(|transport| Server::start(launcher, redis, transport));
        let servers = servers.into_iter().collect::<Result<Vec<Server>>>()?;
        for (index, cell) in cells.iter_mut().enumerate() {
            let stage = format!("round {round} of {}: Redis over each transport", plan.rounds);
            progress.step(&stage, &format!("{} over {}", cell.scenario.title(), cell.transport.title()));
            // The cells of a scenario are in the order of the transports.
            let sample = take_sample(launcher, redis, plan, cell, &servers[index % TRANSPORTS.len()]);
            let sample = sample.map_err(with_remedy);
            cell.rounds.push(
                sample.with_context(|| format!("{} over {} failed", cell.scenario.title(), cell.transport.title()))?,
            );
        }
    }
    Ok(Report::of(machine, plan, &cells, &syscalls_ns))
}

/// Failures of clients whose words do not say what to do, and the remedy.
const REMEDIES: [(&str, &str); 2] = [
    (
        "Cannot assign requested address",
        "the range of source ports is small or used up: see 'sysctl net.ipv4.ip_local_port_range', and wait a minute \
         for ports of closed connections",
    ),
    ("Too many open files", "raise the limit of open files: 'ulimit -n 4096'"),
];

/// Adds the remedy to a failure that has one.
fn with_remedy(error: anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    match REMEDIES.iter().find(|(words, _)| text.contains(words)) {
        Some((_, remedy)) => anyhow::anyhow!("{text}; {remedy}"),
        None => error,
    }
}

/// A Redis server that this process started and that is killed on drop.
struct Server {
    _process: ChildGuard,
    listens: Listens,
}

/// Where a server listens.
enum Listens {
    Port(u16),
    Path(String),
}

impl Listens {
    /// Returns the options of the server.
    fn of_server(&self) -> [String; 4] {
        let port = |port: u16| ["--port".to_owned(), port.to_string()];
        let ([option, value], [name, argument]) = match self {
            Self::Port(number) => (["--bind".to_owned(), NODE_A.to_owned()], port(*number)),
            Self::Path(path) => (["--unixsocket".to_owned(), path.clone()], port(0)),
        };
        [option, value, name, argument]
    }

    /// Returns the options of redis-benchmark.
    fn of_benchmark(&self) -> Vec<String> {
        match self {
            Self::Port(port) => ["-h", NODE_A, "-p", &port.to_string()].map(str::to_owned).into(),
            Self::Path(path) => vec!["-s".to_owned(), path.clone()],
        }
    }
}

impl Server {
    fn start(launcher: &Launcher, redis: &Redis, transport: Transport) -> Result<Self> {
        let listens = match transport {
            Transport::AfUnix => Listens::Path(launcher.fresh_path()),
            _ => Listens::Port(free_port()?),
        };
        let mut command = launcher.command(transport, Node::A, &redis.server);
        command.args(listens.of_server());
        command.args(["--save", "", "--appendonly", "no", "--protected-mode", "no"]);
        command.args(["--daemonize", "no", "--dir"]).arg(launcher.scratch());
        let mut process = ChildGuard::spawn(command, launcher.server_core())?;
        process.line(READY_TIMEOUT, |line| line.contains("eady to accept connections"))?;
        Ok(Self { _process: process, listens })
    }

    /// Returns the address for the probe.
    fn address(&self) -> String {
        match &self.listens {
            Listens::Port(port) => format!("{NODE_A}:{port}"),
            Listens::Path(path) => path.clone(),
        }
    }
}

/// Returns a port of node a that is free at this moment.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((NODE_A, 0)).with_context(|| format!("cannot listen on {NODE_A}"))?;
    Ok(listener.local_addr().context("asking for the port")?.port())
}

fn take_sample(launcher: &Launcher, redis: &Redis, plan: &Plan, cell: &Cell, server: &Server) -> Result<Sample> {
    let Scenario { clients, value_bytes, operation } = cell.scenario;
    let floors = FloorSample { cache_line: floors::cache_line(launcher, FLOOR_MS)?, copy_pipeline: None };
    let timeout = Duration::from_millis(plan.sample_ms * 2) + Duration::from_secs(15);
    let (address, milliseconds) = (server.address(), plan.sample_ms.to_string());
    let args = [&address, operation.word(), &value_bytes.to_string(), &clients.to_string(), &milliseconds];
    let found = launcher.resp(cell.transport, &args, timeout)?;
    let operations_per_s = found.per_second("operations")?;
    // As many requests as the probe made in its sample, because redis-benchmark takes a number of requests and not a
    // time.
    let requests = (operations_per_s * plan.sample_ms as f64 / 1e3).clamp(500.0, 1e6) as u64;
    let benchmark_operations_per_s = benchmark(launcher, redis, cell, server, requests, timeout)?;
    Ok(Sample { latencies: found.latencies()?, operations_per_s, benchmark_operations_per_s, floors })
}

/// Returns the requests a second that redis-benchmark reports, without pipelining.
fn benchmark(
    launcher: &Launcher,
    redis: &Redis,
    cell: &Cell,
    server: &Server,
    requests: u64,
    timeout: Duration,
) -> Result<f64> {
    let mut command: Command = launcher.command(cell.transport, Node::B, &redis.benchmark);
    command.args(server.listens.of_benchmark());
    command.args(["-t", cell.scenario.operation.word(), "-P", "1", "--csv"]);
    command.args([
        "-c",
        &cell.scenario.clients.to_string(),
        "-d",
        &cell.scenario.value_bytes.to_string(),
        "-n",
        &requests.to_string(),
    ]);
    let lines = ChildGuard::spawn(command, launcher.client_core())?.finish(timeout)?;
    match requests_per_second(&lines, cell.scenario.operation) {
        Some(rate) if rate > 0.0 => Ok(rate),
        _ => bail!("redis-benchmark printed no rate: '{}'", lines.join(" ")),
    }
}

/// Parses a line such as `"GET","18148.82",...`.
fn requests_per_second(lines: &[String], operation: Operation) -> Option<f64> {
    let wanted = format!("\"{}\",", operation.word().to_uppercase());
    let line = lines.iter().find_map(|line| line.strip_prefix(&wanted))?;
    line.split(',').next()?.trim_matches('"').parse().ok()
}

/// Returns the name by which the reader can start this program.
fn own_name() -> String {
    let Ok(program) = std::env::current_exe() else { return "crosslane".to_owned() };
    let name = program.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path =
        std::env::split_paths(&path).map(|directory| directory.join(&name)).find(|found| is_same(found, &program));
    if in_path.is_some() {
        return name;
    }
    let here = std::env::current_dir().ok().and_then(|here| program.strip_prefix(here).ok().map(Path::to_owned));
    here.unwrap_or(program).display().to_string()
}

fn is_same(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_one_and_fifty_clients_small_and_large_values() {
        let all = Scenario::all();
        assert_eq!(all.len(), 8);
        for (clients, value_bytes) in [(1, 8), (1, 4096), (50, 8), (50, 4096)] {
            let has = |operation| all.contains(&Scenario { clients, value_bytes, operation });
            assert!(has(Operation::Get) && has(Operation::Set));
        }
        assert_eq!(all[0].title(), "GET of 8 B, 1 client");
    }

    #[test]
    fn the_rate_is_read_from_the_csv_of_redis_benchmark() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"18148.82\",\"0.051\"";
        assert_eq!(requests_per_second(&lines(csv), Operation::Get), Some(18148.82));
        assert_eq!(requests_per_second(&lines(csv), Operation::Set), None);
        assert_eq!(requests_per_second(&lines("\"GET\",\"fast\""), Operation::Get), None);
    }

    #[test]
    fn a_real_redis_is_measured_over_each_transport() {
        // `env PROGRAM ...` starts a program as `crosslane run` does, so that Crosslane is kernel TCP here.
        let redis = Redis::find().unwrap();
        let launcher = Launcher::with_wrapper("env").unwrap();
        let scenarios = vec![
            Scenario { clients: 1, value_bytes: 8, operation: Operation::Get },
            Scenario { clients: 5, value_bytes: 4096, operation: Operation::Set },
        ];
        let report = run(&launcher, &redis, &Plan { scenarios, rounds: 2, sample_ms: 20 }).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["schema"], report::SCHEMA);
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 6);
        for row in rows {
            assert_eq!(row["kind"], "measured");
            for figure in ["p50_ns", "p99_ns", "p999_ns", "max_ns"] {
                assert!(row["latency"][figure].as_f64().unwrap() > 0.0, "{row}");
            }
            assert!(row["redis_benchmark_operations_per_s"].as_f64().unwrap() > 0.0, "{row}");
        }
        let text = report.text();
        for words in ["Floors, ", " run -- ", "GET of 8 B, 1 client", "than kernel TCP", "than AF_UNIX"] {
            assert!(text.contains(words), "{words} in {text}");
        }
    }

    #[test]
    fn a_failure_whose_words_do_not_say_what_to_do_gets_the_remedy() {
        let text = |words: &str| with_remedy(anyhow::anyhow!("redis-benchmark: {words}")).to_string();
        assert!(text("connect: Cannot assign requested address").contains("net.ipv4.ip_local_port_range"));
        assert_eq!(text("refused"), "redis-benchmark: refused");
    }

    #[test]
    fn an_error_names_a_crosslane_that_cannot_start() {
        let redis = Redis::find().unwrap();
        let launcher = Launcher::with_wrapper("/nonexistent/crosslane").unwrap();
        let error =
            run(&launcher, &redis, &Plan { scenarios: Scenario::all(), rounds: 1, sample_ms: 20 }).err().unwrap();
        assert!(format!("{error:#}").contains("cannot start `/nonexistent/crosslane "), "{error:#}");
    }
}
