//! `lab-spoil FILE BYTES SEED`: overwrites a whole memory with pseudorandom data, like a hostile node.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use volmem::{Mapping, Region};

const USAGE: &str = "usage: lab-spoil FILE BYTES SEED";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-spoil: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<()> {
    let [path, bytes, seed] = arguments else { bail!(USAGE) };
    let (bytes, seed): (usize, u64) = (bytes.parse().context(USAGE)?, seed.parse().context(USAGE)?);
    let file = File::options().read(true).write(true).open(path).with_context(|| path.clone())?;
    let mapping = Mapping::new(file.as_fd(), bytes).with_context(|| format!("mapping {bytes} bytes of {path}"))?;
    let memory = Region::of_mapping(Arc::new(mapping));
    let mut state = seed | 1;
    for offset in (0..bytes).step_by(size_of::<u64>()) {
        // xorshift64: the quality of the numbers does not matter, and the same seed gives the same numbers.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memory.store_u64(offset, state, Ordering::Relaxed);
    }
    println!("lab-spoil: {bytes} bytes of {path}");
    Ok(())
}
