//! The plots of `bench windows`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use plot::{Axis, Color, Figure, Series, Style};
use stats::{Quantiles, median};

use super::report::{Report, Row};
use super::{DataPath, Experiment};

/// Writes all plots and returns their paths.
pub fn write(directory: &Path, report: &Report) -> Result<Vec<PathBuf>> {
    let figures = [
        ("windows-round-trip.svg", round_trips(report, "p50", |row| &row.p50_ns_by_round, |latency| latency.p50_ns)),
        (
            "windows-round-trip-p99.svg",
            round_trips(report, "p99", |row| &row.p99_ns_by_round, |latency| latency.p99_ns),
        ),
        ("windows-timed.svg", timed(report)),
        ("windows-bulk.svg", bulk(report)),
    ];
    plot::write_svgs(directory, &figures)
}

fn style(path: DataPath) -> Style {
    match path {
        DataPath::KernelTcp => Style::line(Color::Vermilion),
        DataPath::AfUnix => Style::line(Color::Blue),
        DataPath::DirectLane => Style::line(Color::Orange),
        DataPath::WindowDirect => Style::line(Color::Purple),
        DataPath::WindowProxy => Style::line(Color::Green).wide(),
    }
}

/// Returns a series for each path: one value of each row of an experiment by size, with the range of its rounds.
fn lines(
    report: &Report,
    experiment: Experiment,
    value: impl Fn(&Row) -> Option<f64>,
    rounds: impl Fn(&Row) -> Vec<f64>,
) -> Vec<Series> {
    let series = |path: &DataPath| {
        let row = |size_bytes: &u64| report.row(experiment, *size_bytes, *path);
        let point = |size_bytes: &u64| Some((*size_bytes as f64, value(row(size_bytes)?)?));
        let bar = |size_bytes: &u64| {
            let rounds = rounds(row(size_bytes)?);
            let low = rounds.iter().copied().reduce(f64::min)?;
            Some((*size_bytes as f64, low, rounds.iter().copied().fold(low, f64::max)))
        };
        let sizes = report.sizes(experiment);
        let points: Vec<(f64, f64)> = sizes.iter().filter_map(point).collect();
        let spread = sizes.iter().filter_map(bar).collect();
        (!points.is_empty()).then(|| Series::new(path.title(), style(*path), points).with_spread(spread))
    };
    experiment.paths().iter().filter_map(series).collect()
}

fn us(rounds_ns: &[f64]) -> Vec<f64> {
    rounds_ns.iter().map(|ns| ns / 1e3).collect()
}

fn round_trips(report: &Report, quantile: &str, rounds: fn(&Row) -> &Vec<f64>, value: fn(&Quantiles) -> f64) -> Figure {
    let value = |row: &Row| row.latency.as_ref().map(|latency| value(latency) / 1e3);
    let mut series = lines(report, Experiment::RoundTrip, value, |row| us(rounds(row)));
    let title = format!("Round trip between nodes by message size: {quantile}");
    let floors = report.rows.iter().filter_map(|row| Some(row.cache_line_rtt_ns_p50? / 1e3));
    series.extend(level("floor: cache line", median(floors), &report.sizes(Experiment::RoundTrip)));
    figure(&title, "message size", "round trip (µs)", series)
}

fn timed(report: &Report) -> Figure {
    let experiment = Experiment::TimedRoundTrip;
    let p50 = |row: &Row| Some(row.latency.as_ref()?.p50_ns / 1e3);
    let mut series = lines(report, experiment, p50, |row| us(&row.p50_ns_by_round));
    series.extend(level("modelled: the wire alone", Some(2.0 * super::ONE_WAY_NS / 1e3), &report.sizes(experiment)));
    figure("Round trip over gen3x16, 500 ns one way: p50", "message size", "round trip (µs)", series)
}

fn bulk(report: &Report) -> Figure {
    let experiment = Experiment::Bulk;
    let rounds = |row: &Row| row.bytes_per_s_by_round.iter().map(|rate| rate / 1e9).collect();
    let mut series = lines(report, experiment, |row| Some(row.bytes_per_s? / 1e9), rounds);
    let mapping = |size: &u64| {
        Some((*size as f64, report.row(experiment, *size, DataPath::KernelTcp)?.mapping_bytes_per_s? / 1e9))
    };
    let points = report.sizes(experiment).iter().filter_map(mapping).collect();
    series.push(Series::new("memcpy into a mapping", Style::floor(), points));
    figure("Bulk between nodes by write size", "write size", "rate (GB/s)", series)
}

fn level(title: &str, value: Option<f64>, sizes: &[u64]) -> Option<Series> {
    let value = value?;
    let points = sizes.iter().map(|size| (*size as f64, value)).collect();
    Some(Series::new(title, Style::floor(), points))
}

fn figure(title: &str, x: &'static str, y: &'static str, series: Vec<Series>) -> Figure {
    let notes = vec!["Points: median of the rounds; bars: their range.".to_owned()];
    Figure { title: title.to_owned(), x: Axis::Bytes(x), y: Axis::Decades(y), series, notes }
}
