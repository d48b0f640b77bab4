//! `lab-copy FILE BYTES`: measures how fast one processor copies into a memory and out of it, for comparison with the
//! streams of a lab.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::guest_tool;

const USAGE: &str = "usage: lab-copy FILE BYTES";
/// Block size of iperf3.
const BLOCK_BYTES: usize = 128 << 10;
const LIMIT: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    guest_tool::main("lab-copy", run)
}

fn run(arguments: &[String]) -> Result<()> {
    let [path, bytes] = arguments else { bail!(USAGE) };
    let bytes: usize = bytes.parse().context(USAGE)?;
    ensure!(bytes >= BLOCK_BYTES, "{bytes} bytes are less than a block of {BLOCK_BYTES}");
    let memory = guest_tool::map(path, bytes)?;
    let mut block = vec![1; BLOCK_BYTES];
    let into = bytes_per_s(bytes, |offset| memory.write(offset, &block));
    let out_of = bytes_per_s(bytes, |offset| {
        memory.read(offset, &mut block);
        black_box(&block);
    });
    println!("lab-copy: {} MB/s into the memory, {} MB/s out of it", into / 1_000_000, out_of / 1_000_000);
    Ok(())
}

/// Copies consecutive blocks, wrapping around after the last, and returns bytes per second.
fn bytes_per_s(bytes: usize, mut copy: impl FnMut(usize)) -> u64 {
    let (blocks, begun) = (bytes / BLOCK_BYTES, Instant::now());
    let mut copied = 0;
    while begun.elapsed() < LIMIT {
        copy(copied % blocks * BLOCK_BYTES);
        copied += 1;
    }
    ((copied * BLOCK_BYTES) as f64 / begun.elapsed().as_secs_f64()) as u64
}
