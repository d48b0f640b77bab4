//! The plots of `bench sockets`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use plot::{Axis, Color, Figure, Series, Style};
use stats::median;

use super::report::{Report, Row};
use super::{Experiment, Measured, Point};
use crate::launch::Transport;

const TRANSPORTS: [Transport; 4] =
    [Transport::KernelTcp, Transport::KernelTcpSpinning, Transport::AfUnix, Transport::Crosslane];
/// What points and bars are.
const ROUNDS_NOTE: &str = "Points: median of the rounds; bars: their range.";
/// Size of the message whose distribution is drawn: the smallest that is common.
const DISTRIBUTION_SIZE_BYTES: u64 = 8;

/// Smaller shares are errors of the arithmetic.
const SHARE_MIN: f64 = 1e-9;

/// Writes the plots of the measurements and returns their paths.
pub fn write(directory: &Path, report: &Report, measured: &Measured) -> Result<Vec<PathBuf>> {
    let mut figures = vec![
        ("round-trip-blocking.svg", round_trips(report, Experiment::RoundTripBlocking, "blocking send and recv")),
        ("round-trip-epoll.svg", round_trips(report, Experiment::RoundTripEpoll, "through epoll_wait")),
        ("bulk.svg", bulk(report)),
        ("latency-above.svg", distribution(measured)),
    ];
    figures.retain(|(_, figure)| figure.series.iter().any(|series| !series.points.is_empty()));
    plot::write_svgs(directory, &figures)
}

fn style(transport: Transport) -> Style {
    match transport {
        Transport::KernelTcp => Style::line(Color::Vermilion),
        Transport::KernelTcpSpinning => Style::line(Color::Orange),
        Transport::AfUnix => Style::line(Color::Blue),
        Transport::Crosslane | Transport::Baseline => Style::line(Color::Green).wide(),
    }
}

/// Returns one value of each row of an experiment, by size.
fn by_size(
    report: &Report,
    experiment: Experiment,
    transport: Transport,
    value: fn(&Row) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let sizes = report.sizes(experiment).into_iter();
    sizes
        .filter_map(|size_bytes| {
            Some((size_bytes as f64, value(report.row(Point { experiment, size_bytes }, transport)?)?))
        })
        .collect()
}

/// Returns a series for each transport: one value of each row of an experiment by size, with the range of its rounds.
fn series_by_size(
    report: &Report,
    experiment: Experiment,
    value: fn(&Row) -> Option<f64>,
    rounds: fn(&Row) -> Vec<f64>,
) -> Vec<Series> {
    let series = |transport| {
        let spread = report.sizes(experiment).into_iter().filter_map(|size_bytes| {
            let (low, high) = range(&rounds(report.row(Point { experiment, size_bytes }, transport)?))?;
            Some((size_bytes as f64, low, high))
        });
        let points = by_size(report, experiment, transport, value);
        Series::new(Transport::title(transport), style(transport), points).with_spread(spread.collect())
    };
    TRANSPORTS.map(series).into()
}

/// Returns the smallest and the largest of some values.
fn range(values: &[f64]) -> Option<(f64, f64)> {
    let low = values.iter().copied().reduce(f64::min)?;
    Some((low, values.iter().copied().fold(low, f64::max)))
}

fn round_trips(report: &Report, experiment: Experiment, how: &str) -> Figure {
    let rounds = |row: &Row| row.p50_ns_by_round.iter().map(|ns| ns / 1e3).collect();
    let mut series = series_by_size(report, experiment, |row| Some(row.latency.as_ref()?.p50_ns / 1e3), rounds);
    let lines = by_size(report, experiment, Transport::KernelTcp, |row| Some(row.cache_line_rtt_ns_p50? / 1e3));
    series.extend(level("floor: cache line", &lines));
    Figure {
        title: format!("Round trip by message size, {how}: p50"),
        x: Axis::Bytes("message size"),
        y: Axis::Decades("round trip (µs)"),
        series,
        notes: vec![ROUNDS_NOTE.to_owned()],
    }
}

fn bulk(report: &Report) -> Figure {
    let experiment = Experiment::Bulk;
    let rounds = |row: &Row| row.rate_per_s_by_round.iter().map(|rate| rate / 1e9).collect();
    let mut series = series_by_size(report, experiment, |row| Some(row.rate_per_s? / 1e9), rounds);
    let copies = by_size(report, experiment, Transport::KernelTcp, |row| Some(row.copy_pipeline_bytes_per_s? / 1e9));
    series.extend(level("bound: two-copy pipeline", &copies));
    Figure {
        title: "Bulk by write size".to_owned(),
        x: Axis::Bytes("write size"),
        y: Axis::Decades("rate (GB/s)"),
        series,
        notes: vec![ROUNDS_NOTE.to_owned()],
    }
}

fn distribution(measured: &Measured) -> Figure {
    let experiment = Experiment::RoundTripBlocking;
    let mut series = Vec::new();
    for transport in TRANSPORTS {
        let cell = measured.cell(Point { experiment, size_bytes: DISTRIBUTION_SIZE_BYTES }, transport);
        let Some(latencies) = cell.and_then(super::Cell::merged) else { continue };
        // The longest has none above it, which no logarithmic axis shows.
        let above = latencies.cumulative().into_iter().map(|(ns, share)| (ns / 1e3, (1.0 - share) * 100.0));
        let points = above.filter(|(_, share)| *share > SHARE_MIN).collect();
        series.push(Series::new(transport.title(), style(transport), points));
    }
    Figure {
        title: format!("Round trip of {}, blocking: all rounds", units::size(DISTRIBUTION_SIZE_BYTES)),
        x: Axis::Decades("round trip (µs)"),
        y: Axis::Decades("round trips that take longer (%)"),
        series,
        notes: Vec::new(),
    }
}

/// Returns a bound as a horizontal line over the sizes of `values`.
fn level(title: &str, values: &[(f64, f64)]) -> Option<Series> {
    let level = median(values.iter().map(|(_, value)| *value))?;
    let points = values.iter().map(|(size, _)| (*size, level)).collect();
    Some(Series::new(title, Style::floor(), points))
}
