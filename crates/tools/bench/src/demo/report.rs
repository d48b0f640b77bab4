//! The report of the demo: one table with an explanation.

use machine::Machine;
use serde::Serialize;
use stats::{Quantiles, Table, median, median_ratio};

use super::{Cell, Operation, Plan, own_name};
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
}

/// Improvement over kernel TCP as a factor: lower latencies, higher rates.
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

/// Returns the row of a cell; `None` without rounds.
fn row(cell: &Cell, kernel: &Cell) -> Option<Row> {
    let (this, kernel) = (Rounds::of(cell), Rounds::of(kernel));
    Some(Row {
        kind: "measured",
        clients: cell.scenario.clients,
        value_bytes: cell.scenario.value_bytes,
        operation: cell.scenario.operation,
        transport: cell.transport,
        operations_per_s: median(this.operations.iter().copied())?,
        redis_benchmark_operations_per_s: median(this.benchmark.iter().copied())?,
        times_kernel_tcp: Improvement {
            p50: median_ratio(&kernel.p50_ns, &this.p50_ns),
            p99: median_ratio(&kernel.p99_ns, &this.p99_ns),
            p999: median_ratio(&kernel.p999_ns, &this.p999_ns),
            operations: median_ratio(&this.operations, &kernel.operations),
            redis_benchmark_operations: median_ratio(&this.benchmark, &kernel.benchmark),
        },
        latency: Quantiles::over_rounds(cell.rounds.iter().map(|sample| &sample.latencies))?,
    })
}

impl Report {
    pub(super) fn of(machine: Machine, plan: &Plan, cells: &[Cell], syscalls_ns: &[f64]) -> Self {
        let samples: Vec<FloorSample> =
            cells.iter().flat_map(|cell| cell.rounds.iter().map(|sample| sample.floors)).collect();
        let kernel = |of: &Cell| {
            cells.iter().find(|cell| cell.scenario == of.scenario && cell.transport == Transport::KernelTcp)
        };
        Self {
            schema: SCHEMA,
            kind: "measured",
            machine,
            rounds: plan.rounds,
            sample_ms: plan.sample_ms,
            floors: FloorSummary::of(&samples, syscalls_ns),
            rows: cells.iter().filter_map(|cell| row(cell, kernel(cell)?)).collect(),
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
            "This is one unmodified redis-server (node a) and its unmodified clients (node b), over kernel\n\
             TCP and over Crosslane's lanes in shared memory: the latency of each request in µs (no pipelining), and\n\
             operations a second of that client (ops/s) and of redis-benchmark (bench). All measured; {rounds}.\n\n\
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
        let side = ["p50", "p99", "p99.9", "ops/s", "bench"];
        let header = [""].into_iter().chain(side).chain(side).chain(side);
        let groups = [("", 1), ("kernel TCP", 5), ("Crosslane", 5), ("times better", 5)];
        let mut table = Table::numeric(header).groups(groups);
        let mut clients = None;
        for pair in self.rows.chunks_exact(2) {
            let [kernel, lanes] = pair else { continue };
            if clients != Some(kernel.clients) {
                table.section(if kernel.clients == 1 {
                    "1 client".to_owned()
                } else {
                    format!("{} clients", kernel.clients)
                });
            }
            clients = Some(kernel.clients);
            let mut line = vec![format!(
                "  {} {}",
                kernel.operation.word().to_uppercase(),
                units::size(u64::from(kernel.value_bytes))
            )];
            line.extend(figures(kernel));
            line.extend(figures(lanes));
            let times = &lanes.times_kernel_tcp;
            line.extend(
                [times.p50, times.p99, times.p999, times.operations, times.redis_benchmark_operations]
                    .map(units::times),
            );
            table.row(line);
        }
        table
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
