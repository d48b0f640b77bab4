//! `crosslane pcie compare`: compares two sets of results.

use std::path::{Path, PathBuf};

use anyhow::Result;
use pcie::result::TestResult;
use pcie_bench::compare::{Comparison, compare};
use pcie_bench::files;
use stats::{Align, Table};

use super::figures::Labelled;
use super::parameters::{self, classified};
use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane pcie compare`: two files of results, as `bench`, `sweep` and `import` print them.
#[derive(clap::Args)]
pub struct Options {
    /// Results that serve as the reference
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// Results to compare with the reference
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Write plots of both sets into this directory, as SVG and PNG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the comparison, and writes plots if requested.
pub fn main(options: &Options) -> Result<()> {
    let (a, b) = (read(&options.a)?, read(&options.b)?);
    let comparison = compare(&a, &b);
    if comparison.differences.is_empty() {
        let (a, b) = (options.a.display(), options.b.display());
        return Err(WrongUse::of(format!("{a} and {b} have no test in common; compare runs of the same tests")).into());
    }
    parameters::make_directory(options.plot.as_deref())?;
    if options.json {
        output::print_json(&comparison)?
    } else {
        output::print(&text(options, &a, &b, &comparison))?
    }
    match &options.plot {
        None => Ok(()),
        Some(directory) => parameters::write_plots(directory, &labelled(options, &a, &b)),
    }
}

fn read(path: &Path) -> Result<Vec<TestResult>> {
    let name = path.to_string_lossy();
    if !path.exists() && (name.starts_with("published:") || name.starts_with("sim:")) {
        // The name of a device, as results have it.
        let make = if name.starts_with("sim:") {
            format!("crosslane pcie sweep --device {name} --figure bandwidth --json")
        } else {
            "crosslane pcie import FOLDER (of pcie-bench's published data)".to_owned()
        };
        return Err(WrongUse::of(format!("{name} is a device and no file of results; '{make}' prints one")).into());
    }
    files::read(path).map_err(classified)
}

/// Returns the results of tests that both sets contain, labelled with their file names if both contain a device.
fn labelled<'a>(options: &'a Options, a: &'a [TestResult], b: &'a [TestResult]) -> Vec<Labelled<'a>> {
    let shares_a_device = a.iter().any(|one| b.iter().any(|other| one.device == other.device));
    let (stem_a, stem_b) = if shares_a_device { (stem(&options.a), stem(&options.b)) } else { ("", "") };
    let (stem_a, stem_b) = if stem_a == stem_b && shares_a_device { ("A", "B") } else { (stem_a, stem_b) };
    let in_common =
        |one: &TestResult, others: &[TestResult]| !compare(std::slice::from_ref(one), others).differences.is_empty();
    let of_a = a.iter().filter(|one| in_common(one, b)).map(|result| Labelled { label: stem_a, result });
    let of_b = b.iter().filter(|one| in_common(one, a)).map(|result| Labelled { label: stem_b, result });
    of_a.chain(of_b).collect()
}

fn stem(path: &Path) -> &str {
    path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
}

fn text(options: &Options, a: &[TestResult], b: &[TestResult], comparison: &Comparison) -> String {
    const HEADS: [(&str, Align); 13] = [
        ("A", Align::Left),
        ("B", Align::Left),
        ("TEST", Align::Left),
        ("SIZE B", Align::Right),
        ("WINDOW", Align::Right),
        ("STATE", Align::Left),
        ("FIGURE", Align::Left),
        ("A", Align::Right),
        ("B", Align::Right),
        ("B - A", Align::Right),
        ("%", Align::Right),
        ("A IS", Align::Left),
        ("B IS", Align::Left),
    ];
    let mut table = Table::new(&HEADS);
    for difference in &comparison.differences {
        let state = a.iter().find(|one| one.test == difference.test).map(parameters::state);
        table.row(vec![
            difference.device_a.clone(),
            difference.device_b.clone(),
            difference.test.test.to_string(),
            difference.test.size_bytes.to_string(),
            units::size(difference.test.window_bytes),
            state.unwrap_or_default(),
            difference.figure.to_owned(),
            format!("{:.3}", difference.a),
            format!("{:.3}", difference.b),
            format!("{:+.3}", difference.difference),
            difference.percent.map_or("-".to_owned(), |percent| format!("{percent:+.1}")),
            parameters::provenance(difference.provenance_a, difference.prediction_a.as_ref()),
            parameters::provenance(difference.provenance_b, difference.prediction_b.as_ref()),
        ]);
    }
    format!(
        "A is {}, B is {}. Results only in A: {}; only in B: {}.\n\n{}{}",
        options.a.display(),
        options.b.display(),
        comparison.only_a,
        comparison.only_b,
        table.render(),
        parameters::predictions(a.iter().chain(b))
    )
}
