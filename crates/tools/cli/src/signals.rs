//! Pipes that report signals.

use std::io::{self, PipeReader};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Returns a pipe that becomes readable when a signal asks the process to end (SIGHUP, SIGINT or SIGTERM).
pub fn to_end() -> io::Result<PipeReader> {
    pipe_of(&[SIGHUP, SIGINT, SIGTERM])
}

/// Returns a pipe that becomes readable after one of `signals`.
pub fn pipe_of(signals: &[i32]) -> io::Result<PipeReader> {
    let (reader, writer) = io::pipe()?;
    for signal in signals.iter().copied() {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    Ok(reader)
}
