//! The comparison of two builds of the library as text.

use std::path::Path;

use clap::ValueEnum;
use stats::{Ratio, Table};
use units::NONE;

use super::report::Report;
use super::{Experiment, Point};
use crate::launch::{Libraries, Transport};

/// Returns the method and a table of all experiments.
pub fn text(report: &Report) -> String {
    let Libraries { library, baseline } = &report.libraries;
    let shown = |path: &Option<_>| path.as_deref().map_or_else(String::new, |path: &Path| path.display().to_string());
    format!(
        "Each figure is measured: the same C programs over two builds of the library, {} alternating rounds, medians\n\
         over the rounds. The ratio is the library's time for an operation over the baseline's, of the p50 of round\n\
         trips and of rates: above 1 the library is slower. It is the median of the ratios of the rounds, with its\n\
         95% interval by ranks (from the sign test, which assumes no distribution; not for fewer than {} rounds).\n\
         Library: {}\nBaseline: {}\n{}\n\n{}",
        report.rounds,
        Ratio::ROUNDS_MIN,
        shown(library),
        shown(baseline),
        report.machine.sentence(),
        table(report).render()
    )
}

fn table(report: &Report) -> Table {
    let mut table = Table::numeric(["", "baseline", "library", "ratio of time", "95% interval"]);
    for experiment in Experiment::value_variants() {
        let sizes = report.sizes(*experiment);
        if !sizes.is_empty() {
            table.section(report.heading(*experiment));
        }
        for size_bytes in sizes {
            let point = Point { experiment: *experiment, size_bytes };
            let ratio = report.row(point, Transport::Crosslane).and_then(|row| row.time_over_baseline);
            table.row(vec![
                format!("  {}", units::size(size_bytes)),
                figure(report, point, Transport::Baseline),
                figure(report, point, Transport::Crosslane),
                ratio.map_or_else(|| NONE.to_owned(), |ratio| format!("{:.3}", ratio.median)),
                interval(ratio),
            ]);
        }
    }
    table
}

fn figure(report: &Report, point: Point, transport: Transport) -> String {
    let row = report.row(point, transport);
    let (value, write): (_, fn(Option<f64>) -> String) = match point.experiment {
        Experiment::RoundTripBlocking | Experiment::RoundTripEpoll => {
            (row.and_then(|row| Some(row.latency.as_ref()?.p50_ns)), units::micros)
        }
        Experiment::Bulk => (row.and_then(|row| row.rate_per_s), units::gigabytes),
        _ => (row.and_then(|row| row.rate_per_s), units::rate),
    };
    report.cell(point, transport, value, write)
}

/// Returns the interval, if there are enough rounds for one.
fn interval(ratio: Option<Ratio>) -> String {
    match ratio {
        Some(Ratio { interval: [low, high], rounds: Ratio::ROUNDS_MIN.., .. }) => format!("{low:.3} to {high:.3}"),
        _ => NONE.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_of_too_few_rounds_is_not_shown() {
        let of = |count: usize| {
            let ratios: Vec<f64> = (0..count).map(|round| 1.0 + round as f64 / 100.0).collect();
            interval(Some(Ratio::of(&ratios)))
        };
        assert_eq!((of(5).as_str(), of(6).as_str(), of(15).as_str()), ("-", "1.000 to 1.050", "1.030 to 1.110"));
        assert_eq!(interval(None), "-");
    }
}
