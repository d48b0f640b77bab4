//! `crosslane rnic figures`: reproduces the published figures of SRNIC with the simulator and the memory
//! budget, and adds goodput over several paths and message rates.

mod jobs;
mod pages;

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use clap::Args;
use crosslane_bench::Progress;
use pcie::result::Provenance;
use serde::Serialize;

use crate::output;

/// Options of `crosslane rnic figures`.
#[derive(Args)]
pub struct Options {
    /// The directory for figures.json, figures.md and the plots; created if it does not exist
    #[arg(value_name = "DIR", default_value = "figures")]
    directory: PathBuf,
    /// Fewer points and shorter simulations: less than a minute
    #[arg(long, conflicts_with = "long")]
    quick: bool,
    /// Flows for 10 ms, and networks of up to 4,096 hosts: about an hour on two cores, and 3 GB of memory
    #[arg(long)]
    long: bool,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of concurrent simulations [default: number of cores]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
}

/// The duration and the number of points of the simulations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    Quick,
    Default,
    Long,
}

/// A figure: its description and its values.
#[derive(Debug, Serialize)]
struct FigureData {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
    rows: Vec<Row>,
}

/// A value of a figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    series: String,
    x: f64,
    y: f64,
    provenance: Provenance,
    /// The published value, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<f64>,
    /// The NIC to which the published value applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    published_of: Option<&'static str>,
}

/// The contents of figures.json.
#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    seed: u64,
    published_source: &'static str,
    figures: &'a [FigureData],
}

const SOURCE: &str = "Wang et al., 'SRNIC: A Scalable Architecture for RDMA NICs', NSDI 2023";

/// Runs all simulations, and writes tables and plots.
pub fn main(options: &Options) -> Result<()> {
    let directory = &options.directory;
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let depth = match (options.quick, options.long) {
        (true, _) => Depth::Quick,
        (_, true) => Depth::Long,
        _ => Depth::Default,
    };
    let jobs = jobs::all(depth, options.seed);
    let threads = options.jobs.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let progress = Mutex::new(Progress::new(jobs.len() as u64));
    let stage = format!("{} simulations", jobs.len());
    let step = |done: usize| {
        let detail = format!("{done} done");
        progress.lock().unwrap_or_else(PoisonError::into_inner).step(&stage, &detail);
    };
    let outcomes = sim::sweep(&jobs, threads, jobs::Job::run, step);
    drop(progress);
    let mut rows = Vec::new();
    for outcome in outcomes {
        rows.extend(outcome.map_err(super::sim::classified)?);
    }
    let figures = pages::figures(rows);
    let report =
        Report { schema: "crosslane-rnic-figures-1", seed: options.seed, published_source: SOURCE, figures: &figures };
    let mut paths = vec![directory.join("figures.json"), directory.join("figures.md")];
    let texts = [serde_json::to_string_pretty(&report)? + "\n", pages::markdown(&figures, options.seed)];
    for (path, text) in paths.iter().zip(&texts) {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    for figure in &figures {
        paths.extend(pages::plot(figure).write(directory, figure.name)?);
    }
    output::print(&paths.iter().map(|path| format!("{}\n", path.display())).collect::<String>())
}
