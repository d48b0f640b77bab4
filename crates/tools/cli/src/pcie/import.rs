//! `crosslane pcie import`: converts the data published with the paper to results.

use std::path::PathBuf;

use anyhow::Result;
use pcie_bench::{files, import};

use super::figures::Labelled;
use super::parameters::{self, classified};
use crate::output;

/// Options of `crosslane pcie import`.
#[derive(clap::Args)]
pub struct Options {
    /// A file of pcie-bench/data, a system's folder, or a folder of such folders
    #[arg(value_name = "DIR|FILE.csv")]
    path: PathBuf,
    /// Write plots of all results into this directory, as SVG and PNG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// Prints the results as JSON, and writes plots if requested.
pub fn main(options: &Options) -> Result<()> {
    let imported = import::import(&options.path).map_err(classified)?;
    if imported.rows_skipped > 0 {
        let rows = imported.rows_skipped;
        eprintln!("crosslane: omitted {rows} rows with cache state DThrash, which this program does not support");
    }
    parameters::make_directory(options.plot.as_deref())?;
    output::print(&files::json(&imported.results).map_err(classified)?)?;
    let Some(directory) = &options.plot else { return Ok(()) };
    parameters::write_plots(directory, &Labelled::unlabelled(&imported.results))
}
