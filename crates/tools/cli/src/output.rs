//! Output to stdout, whose reader may close it early.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes `text`. A pipe that the reader has closed (`crosslane stat | head`) is not an error.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("writing to stdout"),
    }
}

/// Writes `value` as indented JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}
