//! The plots: for each interconnect, latency by load and by size, p50 and p99, with a line for each batching policy.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use plot::{Axis, Color, Figure, Series, Style};
use router_bench::interconnect::{Batching, Hop, LoadRow};
use router_bench::report::Report;
use router_bench::statistics::Quantiles;

use super::batching_name;

/// A quantile: its name, and its accessors for a row and a hop.
struct Quantile {
    name: &'static str,
    of_row: fn(&LoadRow) -> f64,
    /// The values of the rounds, where they are known.
    rounds_us: fn(&LoadRow) -> &[Option<f64>],
    of_hop: fn(&Quantiles) -> f64,
}

const QUANTILES: [Quantile; 2] = [
    Quantile { name: "p50", of_row: |row| row.p50_us, rounds_us: |_| &[], of_hop: |hop| hop.p50_us },
    Quantile { name: "p99", of_row: |row| row.p99_us, rounds_us: |row| &row.rounds_p99_us, of_hop: |hop| hop.p99_us },
];

/// Writes plots into a directory, each as soon as its data is complete.
pub struct Plots<'a> {
    directory: &'a Path,
    written: BTreeSet<String>,
    failed: Option<anyhow::Error>,
}

impl<'a> Plots<'a> {
    /// Creates the directory before anything is measured, so that a failure is reported at once.
    pub fn into_directory(directory: &'a Path) -> Result<Plots<'a>> {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(Plots { directory, written: BTreeSet::new(), failed: None })
    }

    /// Writes the plots of the report that are not written yet, and returns their paths. Keeps the first error for
    /// [`Self::finish`], since a failed plot must not end the measurement.
    pub fn write(&mut self, report: &Report) -> Vec<PathBuf> {
        let new = |(name, _): &(String, Figure)| !self.written.contains(name);
        let figures: Vec<(String, Figure)> = figures(report).into_iter().filter(new).collect();
        self.written.extend(figures.iter().map(|(name, _)| name.clone()));
        let written = plot::write_svgs(self.directory, &figures);
        written.unwrap_or_else(|error| {
            self.failed.get_or_insert(error);
            Vec::new()
        })
    }

    /// Returns the first error.
    pub fn finish(self) -> Result<()> {
        self.failed.map_or(Ok(()), Err)
    }
}

/// Returns all plots of a report, each with its file name.
fn figures(report: &Report) -> Vec<(String, Figure)> {
    let rows = [&report.loads, &report.loads_by_size].into_iter().flatten().map(|row| row.interconnect);
    let kinds: BTreeSet<&'static str> = report.hops.iter().map(|hop| hop.interconnect).chain(rows).collect();
    kinds.iter().flat_map(|kind| QUANTILES.iter().flat_map(|quantile| of_kind(report, kind, quantile))).collect()
}

fn of_kind(report: &Report, kind: &'static str, quantile: &Quantile) -> Vec<(String, Figure)> {
    let of_kind = |rows: &[LoadRow]| rows.iter().filter(|row| row.interconnect == kind).cloned().collect::<Vec<_>>();
    let (loads, by_size) = (of_kind(&report.loads), of_kind(&report.loads_by_size));
    let mut sizes: Vec<usize> = loads.iter().map(|row| row.frame_bytes).collect();
    sizes.dedup();
    let mut figures: Vec<(String, Figure)> = sizes
        .into_iter()
        .map(|bytes| {
            let name = format!("router-{kind}-{}-by-load-{bytes}.svg", quantile.name);
            let rows: Vec<LoadRow> = loads.iter().filter(|row| row.frame_bytes == bytes).cloned().collect();
            (name, by_load(kind, bytes, &rows, quantile))
        })
        .collect();
    if let Some(load_mpps) = by_size.first().map(|row| row.load_mpps) {
        let name = format!("router-{kind}-{}-by-size.svg", quantile.name);
        figures.push((name, by_size_at(kind, load_mpps, &by_size, quantile)));
    }
    let hops: Vec<&Hop> = report.hops.iter().filter(|hop| hop.interconnect == kind).collect();
    if !hops.is_empty() {
        figures.push((format!("router-{kind}-{}-hop.svg", quantile.name), hop(kind, &hops, quantile)));
    }
    figures
}

/// Returns the name of an interconnect in a title.
fn title_of(kind: &str) -> &'static str {
    match kind {
        "lanes" => "lanes",
        "windows" => "windows (500 ns one way)",
        "rnic_lanes" => "the RDMA transport in lanes",
        _ => "the RDMA transport over UDP",
    }
}

fn by_load(kind: &str, bytes: usize, rows: &[LoadRow], quantile: &Quantile) -> Figure {
    Figure {
        title: format!(
            "{} by load, frames of {bytes} B over {}\nonly loads that the policy carries; without packets that a \
             machine stall delayed",
            quantile.name,
            title_of(kind)
        ),
        x: Axis::Linear("load (Mpps)"),
        y: Axis::Decades("latency (µs)"),
        series: by_batching(rows, |row| row.load_mpps, quantile),
        notes: bars_note(rows, quantile),
    }
}

fn by_size_at(kind: &str, load_mpps: f64, rows: &[LoadRow], quantile: &Quantile) -> Figure {
    // A slow machine carries thousands of packets a second, not millions.
    let digits = if load_mpps < 0.1 { 4 } else { 2 };
    Figure {
        title: format!(
            "{} by size at {load_mpps:.digits$} Mpps over {}\nonly sizes at which the policy carries the load; without \
             packets that a machine stall delayed",
            quantile.name,
            title_of(kind)
        ),
        x: Axis::Bytes("frame"),
        y: Axis::Decades("latency (µs)"),
        series: by_batching(rows, |row| row.frame_bytes as f64, quantile),
        notes: bars_note(rows, quantile),
    }
}

/// Returns the note that says what the bars are, if there are any.
fn bars_note(rows: &[LoadRow], quantile: &Quantile) -> Vec<String> {
    let has_bars = rows.iter().any(|row| !(quantile.rounds_us)(row).is_empty());
    has_bars.then(|| "Bars: range of the rounds.".to_owned()).into_iter().collect()
}

/// Returns a line for each policy with the points at which it carries the load. The adaptive line is wide and drawn
/// last, on top.
fn by_batching(rows: &[LoadRow], x: fn(&LoadRow) -> f64, quantile: &Quantile) -> Vec<Series> {
    let line = |(index, batching): (usize, Batching)| {
        let shown = || rows.iter().filter(|row| row.batching == batching && row.is_carried());
        let points = shown().map(|row| (x(row), (quantile.of_row)(row))).collect();
        let spread = shown().filter_map(|row| {
            let rounds = (quantile.rounds_us)(row).iter().flatten().copied();
            Some((x(row), rounds.clone().reduce(f64::min)?, rounds.reduce(f64::max)?))
        });
        let spread = spread.collect();
        let style = match batching {
            Batching::Fixed(_) => Style::of_index(index),
            Batching::Adaptive => Style::line(Color::Black).wide(),
        };
        Series::new(batching_name(batching), style, points).with_spread(spread)
    };
    Batching::all().enumerate().map(line).collect()
}

/// Returns the figure of one hop with a line for each batch size.
fn hop(kind: &str, hops: &[&Hop], quantile: &Quantile) -> Figure {
    let mut batches: Vec<u8> = hops.iter().map(|hop| hop.batch).collect();
    batches.dedup();
    let line = |(index, batch): (usize, &u8)| {
        let points = hops.iter().filter(|hop| hop.batch == *batch);
        let points = points.map(|hop| (hop.frame_bytes as f64, (quantile.of_hop)(&hop.latency))).collect();
        let title = if *batch == 1 { "1 packet".to_owned() } else { format!("{batch} packets together") };
        Series::new(title, Style::of_index(index), points)
    };
    Figure {
        title: format!("{} of one hop over {}, without other traffic", quantile.name, title_of(kind)),
        x: Axis::Bytes("frame"),
        y: Axis::Decades("((T4 - T1) - (T3 - T2)) / 2 (µs)"),
        series: batches.iter().enumerate().map(line).collect(),
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(batching: Batching, load_mpps: f64, delivered_mpps: f64) -> LoadRow {
        LoadRow {
            interconnect: "lanes",
            frame_bytes: 64,
            load_mpps,
            batching,
            p50_us: 2.0,
            p99_us: 9.0,
            undisturbed_share: 1.0,
            p99_all_us: 9.0,
            delivered_mpps,
            packets_per_message: 1.0,
            rounds_p99_us: vec![Some(9.0), Some(8.0), None, Some(11.0)],
            control_rounds_p99_us: Vec::new(),
        }
    }

    #[test]
    fn each_policy_has_a_line_of_the_points_at_which_it_carries_the_load() {
        let rows = [
            row(Batching::Fixed(1), 1.0, 1.0),
            row(Batching::Fixed(1), 8.0, 3.0),
            row(Batching::Adaptive, 1.0, 1.0),
            row(Batching::Adaptive, 8.0, 8.0),
        ];
        let figure = by_load("lanes", 64, &rows, &QUANTILES[1]);
        let points = |title: &str| {
            let line = figure.series.iter().find(|series| series.title == title).expect("a line");
            line.points.clone()
        };
        assert_eq!(points("fixed 1"), [(1.0, 9.0)]);
        assert_eq!(points("adaptive"), [(1.0, 9.0), (8.0, 9.0)]);
        let adaptive = figure.series.iter().find(|series| series.title == "adaptive").expect("a line");
        assert_eq!(adaptive.spread, [(1.0, 8.0, 11.0), (8.0, 8.0, 11.0)], "of the rounds that have a value");
        assert_eq!(points("fixed 32"), []);
        assert_eq!(figure.series.last().map(|series| series.title.as_str()), Some("adaptive"), "on top");
        let by_size = by_size_at("lanes", 1.0, &rows[..1], &QUANTILES[0]);
        assert_eq!(by_size.series[0].points, [(64.0, 2.0)]);
        assert!(by_size.title.contains("at 1.00 Mpps"), "{}", by_size.title);
        let slow = by_size_at("lanes", 0.0009, &rows[..1], &QUANTILES[0]).title;
        assert!(slow.contains("at 0.0009 Mpps"), "{slow}");
    }
}
