//! `crosslane pcie fit`: fits the parameters of the simulated hosts to the published measurements.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use pcie::fit::{Fit, Residual, SYSTEMS, SampleCounts};
use serde::Serialize;
use stats::{Align, Table};

use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane pcie fit`.
#[derive(Args)]
pub struct Options {
    /// Systems to fit: hsw, ib [default: both, and their shared parameters]. All other systems are predictions
    #[arg(long, value_name = "NAME")]
    system: Vec<String>,
    /// Folder with the published files to fit to [default: the built-in figures]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Do not search; only print the deviations of the current parameters
    #[arg(long)]
    check: bool,
    /// Use few samples for each test: seconds instead of minutes, and less precise figures
    #[arg(long)]
    quick: bool,
    /// Write the parameter files with the fitted values into this folder
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    write: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    parameters: Vec<Parameter>,
    figures: Vec<Figure>,
    required: usize,
    missed: usize,
}

#[derive(Serialize)]
struct Parameter {
    file: String,
    key: &'static str,
    before: f64,
    value: f64,
}

#[derive(Serialize)]
struct Figure {
    system: String,
    test: String,
    statistic: &'static str,
    published: f64,
    modelled: f64,
    tolerance: f64,
    is_required: bool,
    is_met: bool,
}

/// Fits the parameters unless --check is given, and prints parameters and figures. Fails if a required figure is off.
pub fn main(options: &Options) -> Result<()> {
    let names = if options.system.is_empty() { SYSTEMS.map(str::to_owned).to_vec() } else { options.system.clone() };
    let mut fit = Fit::new(&names, SampleCounts::SEARCH).map_err(WrongUse::of)?;
    if let Some(data) = &options.data {
        fit.read_published(data).map_err(WrongUse::of)?;
    }
    if !options.check {
        fit.search(&mut |pass, free| {
            eprintln!("pass {pass}: {} {} = {:.3}", free.file, free.key, free.value);
        })?;
    }
    let samples = if options.quick { SampleCounts::QUICK } else { SampleCounts::FULL };
    let report = report(&fit, fit.residuals(samples)?);
    if options.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    if let Some(folder) = &options.write {
        write(&fit, folder)?;
    }
    if report.missed > 0 {
        bail!("{} of {} required figures are outside their tolerance", report.missed, report.required);
    }
    Ok(())
}

fn write(fit: &Fit, folder: &std::path::Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    for (name, text) in fit.files() {
        let path = folder.join(name + ".toml");
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn report(fit: &Fit, residuals: Vec<(String, Vec<Residual>)>) -> Report {
    let parameter = |free: &pcie::fit::FreeParameter| {
        let (file, key, before, value) = (free.file.clone(), free.key, free.before, free.value);
        Parameter { file, key, before, value }
    };
    let figures: Vec<Figure> =
        residuals.into_iter().flat_map(|(system, all)| all.into_iter().map(move |one| figure(&system, one))).collect();
    let required = figures.iter().filter(|figure| figure.is_required).count();
    let missed = figures.iter().filter(|figure| figure.is_required && !figure.is_met).count();
    Report { parameters: fit.free().iter().map(parameter).collect(), figures, required, missed }
}

fn figure(system: &str, residual: Residual) -> Figure {
    Figure {
        system: system.to_owned(),
        is_met: residual.is_met(),
        test: residual.label,
        statistic: residual.statistic,
        published: residual.published,
        modelled: residual.simulated,
        tolerance: residual.tolerance,
        is_required: residual.is_required,
    }
}

fn text(report: &Report) -> String {
    let mut parameters = Table::new(&[
        ("FILE", Align::Left),
        ("PARAMETER", Align::Left),
        ("BEFORE", Align::Right),
        ("NOW", Align::Right),
    ]);
    for Parameter { file, key, before, value } in &report.parameters {
        parameters.row(vec![file.clone(), (*key).to_owned(), format!("{before:.3}"), format!("{value:.3}")]);
    }
    let heads = ["PUBLISHED", "MODELLED", "DIFFERENCE", "TOLERANCE"].map(|head| (head, Align::Right));
    let words = ["SYSTEM", "TEST", "FIGURE"].map(|head| (head, Align::Left));
    let mut figures = Table::new(&words.into_iter().chain(heads).chain([("VERDICT", Align::Left)]).collect::<Vec<_>>());
    for figure in &report.figures {
        let verdict = match (figure.is_met, figure.is_required) {
            (true, _) => "ok",
            (false, true) => "MISSED",
            (false, false) => "off, not required",
        };
        let numbers = [figure.published, figure.modelled, figure.modelled - figure.published, figure.tolerance];
        let words = [figure.system.clone(), figure.test.clone(), figure.statistic.to_owned()];
        let numbers = numbers.map(|number| format!("{number:.2}"));
        figures.row(words.into_iter().chain(numbers).chain([verdict.to_owned()]).collect());
    }
    let (met, required) = (report.required - report.missed, report.required);
    let watched = report.figures.len() - required;
    let watched_met = report.figures.iter().filter(|figure| !figure.is_required && figure.is_met).count();
    format!(
        "{}\n{}\n{met} of {required} required figures are within their tolerance, and {watched_met} of {watched} \
         others.\n",
        parameters.render(),
        figures.render()
    )
}
