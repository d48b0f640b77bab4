//! Reads flows from a trace file: one flow per line as `start_us,from,to,bytes`; lines that begin with # are comments.

use std::path::Path;

use sim::{Span, Time};
use thiserror::Error;

use crate::endpoint::Flow;
use crate::topology::HostId;

/// A trace that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{file}: {reason}; check the path")]
    Unreadable {
        /// The file's path.
        file: String,
        /// The error text of the system.
        reason: String,
    },
    /// A line is not a flow.
    #[error("{file}, line {line}: '{text}' is not a {what}; write start_us,from,to,bytes as in 1.5,0,7,64000")]
    Line {
        /// The file's path.
        file: String,
        /// The line number, from 1.
        line: usize,
        /// The text found.
        text: String,
        /// What was expected.
        what: &'static str,
    },
}

/// Reads a trace file.
///
/// # Errors
/// When the file cannot be read or a line is not a flow.
pub fn read_trace(path: &Path) -> Result<Vec<Flow>, TraceError> {
    let file = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&file, &text),
        Err(error) => Err(TraceError::Unreadable { file, reason: error.to_string() }),
    }
}

fn parse(file: &str, text: &str) -> Result<Vec<Flow>, TraceError> {
    let is_flow = |line: &(usize, &str)| !line.1.trim().is_empty() && !line.1.starts_with('#');
    text.lines().enumerate().filter(is_flow).map(|(index, line)| flow(file, index + 1, line)).collect()
}

fn flow(file: &str, line: usize, text: &str) -> Result<Flow, TraceError> {
    let wrong = |text: &str, what| TraceError::Line { file: file.to_owned(), line, text: text.to_owned(), what };
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let &[start, from, to, bytes] = fields.as_slice() else { return Err(wrong(text, "flow")) };
    let us: f64 = start.parse().map_err(|_| wrong(start, "time in microseconds"))?;
    if !(0.0..1e12).contains(&us) {
        return Err(wrong(start, "time in microseconds"));
    }
    let host = |text: &str| text.parse().map(HostId).map_err(|_| wrong(text, "host number"));
    let bytes: u64 = bytes.parse().ok().filter(|bytes| *bytes > 0).ok_or_else(|| wrong(bytes, "positive size"))?;
    let start = Time::ZERO + Span::from_ns(us * 1000.0);
    Ok(Flow::new(start, host(from)?, host(to)?, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_flow() {
        let flows = parse("a.csv", "# start_us,from,to,bytes\n\n1.5,0,7,64000\n0, 3, 2, 1\n").unwrap();
        assert_eq!((flows.len(), flows[0].start, flows[0].to), (2, Time::from_ps(1_500_000), HostId(7)));
        assert_eq!((flows[1].from, flows[1].bytes), (HostId(3), 1));
    }

    #[test]
    fn an_invalid_line_is_named_with_its_number() {
        for (line, expected) in [
            ("1,2,3", "a.csv, line 2: '1,2,3' is not a flow; write start_us,from,to,bytes as in 1.5,0,7,64000"),
            ("-1,0,1,9", "a.csv, line 2: '-1' is not a time in microseconds; write"),
            ("1,x,1,9", "a.csv, line 2: 'x' is not a host number; write"),
            ("1,0,1,0", "a.csv, line 2: '0' is not a positive size; write"),
        ] {
            let error = parse("a.csv", &format!("#\n{line}\n")).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
