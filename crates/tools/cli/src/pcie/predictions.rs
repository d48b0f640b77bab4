//! `crosslane pcie predictions`: compares the predictions for current servers with published figures of them.

use anyhow::{Result, bail};
use pcie::host::{System, names};
use pcie::predictions::{self, Comparison, Relation};
use serde::Serialize;
use stats::{Align, Table};

use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane pcie predictions`.
#[derive(clap::Args)]
pub struct Options {
    /// Only this system [default: all that are predictions]
    #[arg(long, value_name = "NAME")]
    system: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What the classes of tests are.
const CLASSES: &str = "\
LATENCY: without IOMMU. BANDWIDTH: transfers of 1 KB or more, local memory, no IOMMU. WITH IOMMU: latencies, and
bandwidths of writes to local memory. The error of any other figure is unknown: no published figure supports it.";

#[derive(Serialize)]
struct Report {
    systems: Vec<PredictedSystem>,
    figures: Vec<Figure>,
}

#[derive(Serialize)]
struct PredictedSystem {
    system: String,
    description: String,
    rests_on: String,
    latency_error_percent: Option<f64>,
    bandwidth_error_percent: Option<f64>,
    iommu_error_percent: Option<f64>,
}

#[derive(Serialize)]
struct Figure {
    system: &'static str,
    figure: &'static str,
    unit: &'static str,
    relation: &'static str,
    /// Whether the figure is a bound, and the prediction keeps it.
    is_kept: bool,
    published: f64,
    predicted: f64,
    deviation_percent: f64,
    /// Absent if none is stated.
    #[serde(skip_serializing_if = "Option::is_none")]
    stated_error_percent: Option<f64>,
    source: &'static str,
}

/// Prints what each prediction rests on, its stated errors, and the published figures beside the predicted ones. Fails
/// if a figure is beyond the stated error.
pub fn main(options: &Options) -> Result<()> {
    let systems = predicted_systems(options.system.as_deref())?;
    let figures = predictions::compare(options.system.as_deref())?;
    let beyond = figures.iter().filter(|figure| !figure.is_within_error()).count();
    let report = Report { systems, figures: figures.iter().map(figure).collect() };
    if options.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    if beyond > 0 {
        bail!("{beyond} of {} figures are beyond the stated error of their prediction", figures.len());
    }
    Ok(())
}

fn predicted_systems(only: Option<&str>) -> Result<Vec<PredictedSystem>> {
    let mut systems = Vec::new();
    for name in names().filter(|name| only.is_none_or(|wanted| wanted == *name)) {
        let system = System::named(name)?;
        let Some(prediction) = system.parameters().prediction.clone() else { continue };
        systems.push(PredictedSystem {
            system: name.to_owned(),
            description: system.description().to_owned(),
            rests_on: prediction.rests_on,
            latency_error_percent: prediction.latency_error_percent,
            bandwidth_error_percent: prediction.bandwidth_error_percent,
            iommu_error_percent: prediction.iommu_error_percent,
        });
    }
    match only {
        Some(name) if systems.is_empty() => {
            System::named(name).map_err(WrongUse::of)?;
            Err(WrongUse::of(format!("'{name}' is not a prediction; see crosslane pcie fit --check")).into())
        }
        _ => Ok(systems),
    }
}

fn figure(comparison: &Comparison) -> Figure {
    let figure = comparison.figure;
    Figure {
        system: figure.system,
        figure: figure.what,
        unit: figure.unit,
        relation: match figure.relation {
            Relation::Equal => "equal",
            Relation::AtLeast => "at least",
            Relation::AtMost => "at most",
        },
        is_kept: figure.relation != Relation::Equal && comparison.deviation_percent == 0.0,
        published: figure.published,
        predicted: comparison.predicted,
        deviation_percent: comparison.deviation_percent,
        stated_error_percent: comparison.error_percent,
        source: figure.source,
    }
}

fn text(report: &Report) -> String {
    let heads = ["LATENCY", "BANDWIDTH", "WITH IOMMU"].map(|head| (head, Align::Right));
    let mut systems = Table::new(&[("SYSTEM", Align::Left), heads[0], heads[1], heads[2], ("RESTS ON", Align::Left)]);
    let error = |percent: Option<f64>| percent.map_or("unknown".to_owned(), |percent| format!("+-{percent:.0}%"));
    for one in &report.systems {
        let errors = [one.latency_error_percent, one.bandwidth_error_percent, one.iommu_error_percent].map(error);
        systems.row([one.system.clone()].into_iter().chain(errors).chain([one.rests_on.clone()]).collect());
    }
    let heads = ["PUBLISHED", "PREDICTED", "DIFFERENCE", "STATED"].map(|head| (head, Align::Right));
    let left = |head| (head, Align::Left);
    let columns = [left("SYSTEM"), left("FIGURE"), left("UNIT"), left("")];
    let mut figures = Table::new(&columns.into_iter().chain(heads).chain([left("SOURCE")]).collect::<Vec<_>>());
    for one in &report.figures {
        let words = [one.system, one.figure, one.unit, if one.relation == "equal" { "" } else { one.relation }];
        let numbers = [
            format!("{:.1}", one.published),
            format!("{:.1}", one.predicted),
            if one.is_kept { "kept".to_owned() } else { format!("{:+.1}%", one.deviation_percent) },
            error(one.stated_error_percent),
        ];
        figures.row(words.map(str::to_owned).into_iter().chain(numbers).chain([one.source.to_owned()]).collect());
    }
    let figures = if report.figures.is_empty() {
        "There is no published figure of it: nothing but the sources above supports the prediction.\n".to_owned()
    } else {
        format!("Published figures:\n\n{}", figures.render())
    };
    format!("Stated errors by class of test:\n\n{}\n{CLASSES}\n\n{figures}", systems.render())
}
