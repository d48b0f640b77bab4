//! The plots of `bench windows`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use plot::{Axis, Color, Figure, Series, Style};
use stats::median;

use super::report::{Report, Row};
use super::{DataPath, Experiment};

/// Writes all plots and returns their paths.
pub fn write(directory: &Path, report: &Report) -> Result<Vec<PathBuf>> {
    let p50 = |row: &Row| Some(row.latency.as_ref()?.p50_ns / 1e3);
    let p99 = |row: &Row| Some(row.latency.as_ref()?.p99_ns / 1e3);
    let figures = [
        ("windows-round-trip.svg", round_trips(report, "Round trip between nodes by message size: p50", p50)),
        ("windows-round-trip-p99.svg", round_trips(report, "Round trip between nodes by message size: p99", p99)),
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
        DataPath::WindowDirect => Style::line(Color::Green),
        DataPath::WindowProxy => Style::line(Color::Green).wide(),
    }
}

fn lines(report: &Report, experiment: Experiment, value: impl Fn(&Row) -> Option<f64>) -> Vec<Series> {
    let series = |path: &DataPath| {
        let point = |size_bytes: &u64| Some((*size_bytes as f64, value(report.row(experiment, *size_bytes, *path)?)?));
        let points: Vec<(f64, f64)> = report.sizes(experiment).iter().filter_map(point).collect();
        (!points.is_empty()).then(|| Series { title: path.title().to_owned(), style: style(*path), points })
    };
    experiment.paths().iter().filter_map(series).collect()
}

fn round_trips(report: &Report, title: &str, value: impl Fn(&Row) -> Option<f64>) -> Figure {
    let mut series = lines(report, Experiment::RoundTrip, value);
    let floors = report.rows.iter().filter_map(|row| Some(row.cache_line_rtt_ns_p50? / 1e3));
    series.extend(level("floor: cache line", median(floors), &report.sizes(Experiment::RoundTrip)));
    figure(title, "message size", "round trip (µs)", series)
}

fn timed(report: &Report) -> Figure {
    let experiment = Experiment::TimedRoundTrip;
    let mut series = lines(report, experiment, |row| Some(row.latency.as_ref()?.p50_ns / 1e3));
    series.extend(level("modelled: the wire alone", Some(2.0 * super::ONE_WAY_NS / 1e3), &report.sizes(experiment)));
    figure("Round trip over gen3x16, 500 ns one way: p50", "message size", "round trip (µs)", series)
}

fn bulk(report: &Report) -> Figure {
    let experiment = Experiment::Bulk;
    let mut series = lines(report, experiment, |row| Some(row.bytes_per_s? / 1e9));
    let mapping = |size: &u64| {
        Some((*size as f64, report.row(experiment, *size, DataPath::KernelTcp)?.mapping_bytes_per_s? / 1e9))
    };
    let points = report.sizes(experiment).iter().filter_map(mapping).collect();
    series.push(Series { title: "memcpy into a mapping".to_owned(), style: Style::floor(), points });
    figure("Bulk between nodes by write size", "write size", "rate (GB/s)", series)
}

fn level(title: &str, value: Option<f64>, sizes: &[u64]) -> Option<Series> {
    let value = value?;
    let points = sizes.iter().map(|size| (*size as f64, value)).collect();
    Some(Series { title: title.to_owned(), style: Style::floor(), points })
}

fn figure(title: &str, x: &'static str, y: &'static str, series: Vec<Series>) -> Figure {
    Figure { title: title.to_owned(), x: Axis::Bytes(x), y: Axis::Decades(y), series }
}
