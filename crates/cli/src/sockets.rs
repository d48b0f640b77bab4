//! `crosslane bench sockets`: its options checked against each other.

use anyhow::{Result, anyhow};
use crosslane_bench::sockets::{self, Options};

use crate::wrong_use::WrongUse;

/// Measures, and prints the report.
pub fn main(options: &Options) -> Result<()> {
    options.check().map_err(|error| anyhow!(WrongUse::of(error)))?;
    sockets::main(options)
}
