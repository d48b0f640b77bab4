//! Plots of a run: slowdowns by flow size, and the tail of completion times.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use netsim::experiments::FctResult;
use netsim::results::{SizeBin, SummaryStats};
use plot::{Axis, Color, Figure, Line, Marker, Series, Style};

/// Most points of the curve of completion times.
const POINTS_MAX: usize = 400;

/// Checks the name of an SVG file.
pub fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match (path.extension().is_some_and(|extension| extension == "svg"), path.file_stem()) {
        (true, Some(_)) => Ok(path),
        _ => Err(format!("'{text}' is not the name of an SVG file; write FILE.svg")),
    }
}

/// Writes the slowdowns by flow size into this file, and the completion times into the one beside it whose name ends in
/// `-fct.svg`. Writes nothing if no flow finished.
///
/// # Errors
/// Names the file that cannot be written.
pub fn write(path: &Path, network: &str, result: &FctResult) -> Result<()> {
    if result.finished.is_empty() {
        return Ok(());
    }
    slowdowns(network, result).write_svg(path)?;
    completion_times(network, result).write_svg(&beside(path))
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_stem().map_or_else(OsString::new, OsString::from);
    name.push("-fct.svg");
    path.with_file_name(name)
}

fn title(what: &str, network: &str, result: &FctResult) -> String {
    let FctResult { flows, flows_ended, .. } = result;
    format!("{what}, modelled\n{network}, {flows_ended} of {flows} flows")
}

fn slowdowns(network: &str, result: &FctResult) -> Figure {
    let series = |name: &str, color: Color, value: fn(&SummaryStats) -> Option<f64>| {
        let point = |bin: &SizeBin| Some((bin.bytes_max as f64, value(&bin.slowdown)?));
        Series::new(name, Style::line(color), result.bins.iter().filter_map(point).collect())
    };
    let all = [
        series("p99", Color::Vermilion, |slowdown| slowdown.p99),
        series("p95", Color::Green, |slowdown| slowdown.p95),
        series("p50", Color::Blue, |slowdown| Some(slowdown.p50)),
    ];
    Figure {
        title: title("Slowdown by flow size", network, result),
        x: Axis::Bytes("flows of up to this size (bytes)"),
        y: Axis::Decades("completion time / ideal completion time"),
        series: all.into_iter().filter(|series| !series.points.is_empty()).collect(),
        notes: vec!["A point is a bin of 5% of the flows; p95 needs 20 flows, p99 needs 100.".to_owned()],
    }
}

/// Returns the share of flows that take at least a time, for all times.
fn completion_times(network: &str, result: &FctResult) -> Figure {
    let mut fcts_us: Vec<f64> = result.finished.iter().map(|flow| flow.fct.ns() / 1e3).collect();
    fcts_us.sort_unstable_by(f64::total_cmp);
    let count = fcts_us.len();
    let point = |index: usize| (fcts_us[index], 100.0 * (count - index) as f64 / count as f64);
    let points = tail_indices(count).into_iter().map(point).collect();
    let style = Style { color: Color::Blue, line: Line::Solid, marker: Marker::Circle, wide: false };
    Figure {
        title: title("Flow completion times", network, result),
        x: Axis::Decades("completion time (us)"),
        y: Axis::Decades("flows that take at least this time (%)"),
        series: vec![Series::new("all flows that finished", style, points)],
        notes: Vec::new(),
    }
}

/// Returns at most about [`POINTS_MAX`] indices of a sorted list, evenly spaced on a logarithmic axis of what remains.
fn tail_indices(count: usize) -> Vec<usize> {
    let remaining = |point: usize| (count as f64).powf(1.0 - point as f64 / POINTS_MAX as f64).round() as usize;
    let mut indices: Vec<usize> = (0..=POINTS_MAX).map(|point| count - remaining(point).clamp(1, count)).collect();
    indices.dedup();
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_begins_at_the_first_flow_and_ends_at_the_last() {
        for count in [1, 2, 15, 400, 12_345, 1_000_000] {
            let indices = tail_indices(count);
            assert!(indices.is_sorted() && indices.len() <= POINTS_MAX + 1, "{count}");
            assert_eq!((indices[0], indices[indices.len() - 1]), (0, count - 1));
        }
        assert_eq!(tail_indices(5), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn the_second_plot_lies_beside_the_first() {
        assert_eq!(beside(Path::new("out/a.b.svg")), Path::new("out/a.b-fct.svg"));
        assert!(parse_path("a.png").is_err() && parse_path(".svg").is_err() && parse_path("a").is_err());
        assert_eq!(parse_path("x/a.svg"), Ok(PathBuf::from("x/a.svg")));
    }
}
