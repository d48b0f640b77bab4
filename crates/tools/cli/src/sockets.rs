//! `crosslane bench sockets`: checks the options and the libraries before anything is measured.

use anyhow::{Result, anyhow};
use crosslane_bench::sockets::{self, Options};

use crate::library;
use crate::wrong_use::WrongUse;

/// Checks the options, runs the benchmark and prints the report.
pub fn main(options: &Options) -> Result<()> {
    options.check().map_err(|error| anyhow!(WrongUse::of(error)))?;
    for (option, path) in [("--library", &options.library), ("--baseline", &options.baseline)] {
        path.as_deref().map(|path| library::find_given(path, option)).transpose()?;
    }
    sockets::main(options)
}
