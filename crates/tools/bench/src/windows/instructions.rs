//! Counts the instructions of the proxy's engine, with valgrind.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Modelled;
use crate::process::ChildGuard;

/// Returns the instructions of two engines for a frame of 8 bytes, one sending and one receiving: the difference of two
/// runs under callgrind.
pub fn per_frame(modelled: &Modelled) -> Result<f64> {
    const FRAMES: u64 = 20_000;
    const LIMIT: Duration = Duration::from_secs(60);
    let program = std::env::current_exe().context("finding this program")?;
    let run = |frames: u64| {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&program);
        command.args(&modelled.work_arguments).arg(frames.to_string());
        let mut guard = ChildGuard::spawn(command, None).context("valgrind counts instructions; install it")?;
        guard.complete(LIMIT)?;
        collected(&guard.stderr_text()).context("callgrind printed no number of instructions")
    };
    Ok((run(2 * FRAMES)? - run(FRAMES)?) / FRAMES as f64)
}

/// Parses the number in callgrind's `Collected : N`.
fn collected(stderr: &str) -> Option<f64> {
    let line = stderr.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_instructions_is_found_in_callgrinds_output() {
        assert_eq!(collected("==7== Events    : Ir\n==7== Collected : 123456\n==7==\n"), Some(123_456.0));
        assert_eq!(collected("valgrind: no such program"), None);
    }
}
