//! The report of the demo: one table with an explanation.

use machine::Machine;
use serde::Serialize;
use stats::{Quantiles, Table, median, median_ratio};

use super::{Cell, Operation, Plan, Scenario, own_name};
use crate::floors::{FloorSample, FloorSummary};
use crate::launch::Transport;

pub const SCHEMA: &str = "crosslane.demo/1";

/// The results of the demo.
#[derive(Serialize)]
pub struct Report {
    pub schema: &'static str,
    /// Provenance of every number.
    pub kind: &'static str,
    pub machine: Machine,
    pub rounds: u32,
    pub sample_ms: u64,
    pub floors: FloorSummary,
    pub rows: Vec<Row>,
}

/// One transport in one scenario: medians over the rounds; ratios are formed round by round.
#[derive(Serialize)]
pub struct Row {
    pub kind: &'static str,
    pub clients: u32,
    pub value_bytes: u32,
    operation: Operation,
    pub transport: Transport,
    pub latency: Quantiles,
    pub operations_per_s: f64,
    pub redis_benchmark_operations_per_s: f64,
    pub times_kernel_tcp: Improvement,
    pub times_af_unix: Improvement,
}

/// Improvement over another transport as a factor: lower latencies, higher rates.
#[derive(Serialize)]
pub struct Improvement {
    pub p50: Option<f64>,
    pub p99: Option<f64>,
    pub p999: Option<f64>,
    pub operations: Option<f64>,
    pub redis_benchmark_operations: Option<f64>,
}

/// The rounds of one cell, by figure.
struct Rounds {
    p50_ns: Vec<f64>,
    p99_ns: Vec<f64>,
    p999_ns: Vec<f64>,
    operations: Vec<f64>,
    benchmark: Vec<f64>,
}

impl Rounds {
    fn of(cell: &Cell) -> Self {
        let quantile = |quantile| cell.rounds.iter().map(|sample| sample.latencies.quantile_ns(quantile)).collect();
        Self {
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            operations: cell.rounds.iter().map(|sample| sample.operations_per_s).collect(),
            benchmark: cell.rounds.iter().map(|sample| sample.benchmark_operations_per_s).collect(),
        }
    }
}

impl Improvement {
    fn of(this: &Rounds, other: &Rounds) -> Self {
        Self {
            p50: median_ratio(&other.p50_ns, &this.p50_ns),
            p99: median_ratio(&other.p99_ns, &this.p99_ns),
            p999: median_ratio(&other.p999_ns, &this.p999_ns),
            operations: median_ratio(&this.operations, &other.operations),
            redis_benchmark_operations: median_ratio(&this.benchmark, &other.benchmark),
        }
    }

    fn cells(&self) -> [String; 5] {
        [self.p50, self.p99, self.p999, self.operations, self.redis_benchmark_operations].map(units::times)
    }
}

/// Returns the row of a cell, given those of the transports that it is compared with; `None` without rounds.
fn row(cell: &Cell, kernel: &Cell, unix: &Cell) -> Option<Row> {
    let (this, kernel, unix) = (Rounds::of(cell), Rounds::of(kernel), Rounds::of(unix));
    Some(Row {
        kind: "measured",
        clients: cell.scenario.clients,
        value_bytes: cell.scenario.value_bytes,
        operation: cell.scenario.operation,
        transport: cell.transport,
        operations_per_s: median(this.operations.iter().copied())?,
        redis_benchmark_operations_per_s: median(this.benchmark.iter().copied())?,
        times_kernel_tcp: Improvement::of(&this, &kernel),
        times_af_unix: Improvement::of(&this, &unix),
        latency: Quantiles::over_rounds(cell.rounds.iter().map(|sample| &sample.latencies))?,
    })
}

impl Report {
    pub(super) fn of(machine: Machine, plan: &Plan, cells: &[Cell], syscalls_ns: &[f64]) -> Self {
        let samples: Vec<FloorSample> =
            cells.iter().flat_map(|cell| cell.rounds.iter().map(|sample| sample.floors)).collect();
        let same = |of: &Cell, transport| {
            cells.iter().find(|cell| cell.scenario == of.scenario && cell.transport == transport)
        };
        let row = |cell| row(cell, same(cell, Transport::KernelTcp)?, same(cell, Transport::AfUnix)?);
        Self {
            schema: SCHEMA,
            kind: "measured",
            machine,
            rounds: plan.rounds,
            sample_ms: plan.sample_ms,
            floors: FloorSummary::of(&samples, syscalls_ns),
            rows: cells.iter().filter_map(row).collect(),
        }
    }

    pub fn text(&self) -> String {
        let name = own_name();
        let rounds = if self.rounds == 1 {
            "one round".to_owned()
        } else {
            format!("medians of {} alternating rounds", self.rounds)
        };
        format!(
            "This is one unmodified redis-server (node a) and its unmodified clients (node b), over kernel TCP, over\n\
             AF_UNIX (by a path, as it can be used on one machine), and over Crosslane's lanes in shared memory: the\n\
             latency of each request in µs (no pipelining), operations a second of that client (ops/s), and of\n\
             redis-benchmark. The ends of kernel TCP and AF_UNIX sleep between requests, those of lanes spin for some\n\
             microseconds first. All measured; {rounds}.\n\n\
             {}\n{}\n{}\n\n\
             Your own programs run the same way, each side on this machine:\n\
             \x20   {name} run -- YOUR-SERVER ARGS...\n\
             \x20   {name} run -- YOUR-CLIENT ARGS...\n\
             and `{name} stat` shows which connections took a lane.\n",
            self.table().render(),
            self.floors.sentence(),
            self.machine.sentence(),
        )
    }

    fn table(&self) -> Table {
        let mut table = Table::numeric(["", "p50", "p99", "p99.9", "ops/s", "redis-benchmark"]);
        for rows in self.rows.chunk_by(|one, other| one.scenario() == other.scenario()) {
            let Some(lanes) = rows.iter().find(|row| row.transport == Transport::Crosslane) else { continue };
            table.section(lanes.scenario().title());
            let mut line = |name: &str, cells: [String; 5]| {
                table.row([format!("  {name}")].into_iter().chain(cells).collect());
            };
            rows.iter().for_each(|row| line(row.transport.title(), figures(row)));
            line("better than kernel TCP", lanes.times_kernel_tcp.cells());
            line("better than AF_UNIX", lanes.times_af_unix.cells());
        }
        table
    }
}

impl Row {
    fn scenario(&self) -> Scenario {
        Scenario { clients: self.clients, value_bytes: self.value_bytes, operation: self.operation }
    }
}

fn figures(row: &Row) -> [String; 5] {
    let latency = &row.latency;
    [
        units::micros(Some(latency.p50_ns)),
        units::micros(Some(latency.p99_ns)),
        units::micros(Some(latency.p999_ns)),
        units::rate(Some(row.operations_per_s)),
        units::rate(Some(row.redis_benchmark_operations_per_s)),
    ]
}
