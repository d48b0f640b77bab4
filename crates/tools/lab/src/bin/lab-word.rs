//! `lab-word FILE BYTES OFFSET [VALUE]`: prints or stores a word of a device's memory.
//!
//! For scripts in a guest: busybox cannot access files that can only be mapped.

use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use lab::guest_tool;

const USAGE: &str = "usage: lab-word FILE BYTES OFFSET [VALUE], numbers in decimal or as in 0x1000";
const WORD_BYTES: usize = size_of::<u64>();

fn main() -> ExitCode {
    guest_tool::main("lab-word", run)
}

fn run(arguments: &[String]) -> Result<()> {
    let [path, bytes, offset, value @ ..] = arguments else { bail!(USAGE) };
    let (bytes, offset) = (number(bytes)? as usize, number(offset)? as usize);
    let fits = offset.is_multiple_of(WORD_BYTES) && bytes >= WORD_BYTES && offset <= bytes - WORD_BYTES;
    ensure!(fits, "offset {offset}: not a word of {bytes} bytes; use a multiple of {WORD_BYTES} below that");
    let memory = guest_tool::map(path, bytes)?;
    match value {
        [] => println!("{:#x}", memory.load_u64(offset, Ordering::Acquire)),
        [value] => memory.store_u64(offset, number(value)?, Ordering::Release),
        _ => bail!(USAGE),
    }
    Ok(())
}

fn number(text: &str) -> Result<u64> {
    let parsed = text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16));
    parsed.with_context(|| format!("'{text}' is not a number; {USAGE}"))
}
