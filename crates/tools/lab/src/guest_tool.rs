//! What the tools that run in guests (`src/bin`) share.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use volmem::{Mapping, Region};

/// Runs a tool with the arguments of this process, and prints its error, preceded by its name.
pub fn main(name: &str, run: impl FnOnce(&[String]) -> Result<()>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Maps the first `bytes` bytes of a file for reading and writing.
///
/// # Errors
/// Fails if the file cannot be opened or mapped.
pub fn map(path: &str, bytes: usize) -> Result<Region> {
    let file = File::options().read(true).write(true).open(path).with_context(|| path.to_owned())?;
    let mapping = Mapping::new(file.as_fd(), bytes).with_context(|| format!("mapping {bytes} bytes of {path}"))?;
    Ok(Region::of_mapping(Arc::new(mapping)))
}
