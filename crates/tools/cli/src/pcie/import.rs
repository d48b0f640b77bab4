//! `crosslane pcie import`: the data published with the paper, as results.

use std::path::PathBuf;

use super::figures::Labelled;
use anyhow::Result;
use pcie_bench::{files, import};

use super::parameters::{self, judged};
use crate::output;

/// What to read.
#[derive(clap::Args)]
pub struct Options {
    /// A file of pcie-bench/data, a system's folder, or a folder of such folders
    #[arg(value_name = "DIR|FILE.csv")]
    path: PathBuf,
    /// Write pictures of all results into this directory, as SVG and PNG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

pub fn main(options: &Options) -> Result<()> {
    let imported = import::import(&options.path).map_err(judged)?;
    if imported.rows_skipped > 0 {
        let rows = imported.rows_skipped;
        eprintln!("crosslane: left out {rows} rows in cache state DThrash, which no test here has");
    }
    parameters::make_directory(options.plot.as_deref())?;
    output::print(&files::json(&imported.results).map_err(judged)?)?;
    let Some(directory) = &options.plot else { return Ok(()) };
    let labelled: Vec<Labelled<'_>> = imported.results.iter().map(|result| Labelled { label: "", result }).collect();
    parameters::write_pictures(directory, &labelled)
}
