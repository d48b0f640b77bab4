//! `crosslane bench overhead`: checks the library before anything is measured.

use anyhow::Result;
use crosslane_bench::overhead::{self, Options};

use crate::library;

/// Checks the library, runs the benchmark and prints the report.
pub fn main(options: &Options) -> Result<()> {
    options.library.as_deref().map(|path| library::find_given(path, "--library")).transpose()?;
    overhead::main(options)
}
