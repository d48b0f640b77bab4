//! `lab-spoil FILE BYTES SEED`: overwrites a whole memory with pseudorandom data, like a hostile node.

use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use lab::guest_tool;

const USAGE: &str = "usage: lab-spoil FILE BYTES SEED";

fn main() -> ExitCode {
    guest_tool::main("lab-spoil", run)
}

fn run(arguments: &[String]) -> Result<()> {
    let [path, bytes, seed] = arguments else { bail!(USAGE) };
    let (bytes, seed): (usize, u64) = (bytes.parse().context(USAGE)?, seed.parse().context(USAGE)?);
    let memory = guest_tool::map(path, bytes)?;
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
