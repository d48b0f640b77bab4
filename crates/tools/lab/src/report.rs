//! The result of a lab.

use std::fmt;

use crate::node::Node;

/// Exit codes other than those of scripts, as in shells and timeout(1).
const CODE_FAILED: i32 = 1;
const CODE_TIME_OVER: i32 = 124;
const CODE_INTERRUPTED: i32 = 130;
/// Number of lines of each guest that an error shows.
const LINES_SHOWN: usize = 40;

/// The result of one guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestReport {
    /// The guest.
    pub node: Node,
    /// Exit code of its script, if the script ended by itself.
    pub code: Option<i32>,
    /// All of its console output.
    pub output: String,
}

/// Why the scripts did not end by themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabFailure {
    /// The time limit was reached.
    TimeOver {
        /// The limit in seconds.
        limit_s: u64,
        /// Guests that had not ended.
        running: Vec<Node>,
    },
    /// The lab was interrupted.
    Interrupted,
    /// A machine ended before its script.
    Died {
        /// The guest.
        node: Node,
    },
}

/// The result of a lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Results by guest.
    pub guests: Vec<GuestReport>,
    /// Why the scripts did not end by themselves, if so.
    pub failure: Option<LabFailure>,
}

impl Report {
    /// Returns the exit code: that of the first failed script, 124 after the time limit, 130 when interrupted.
    pub fn code(&self) -> i32 {
        let failed = self.guests.iter().filter_map(|guest| guest.code).find(|code| *code != 0);
        match (&self.failure, failed) {
            (Some(LabFailure::TimeOver { .. }), _) => CODE_TIME_OVER,
            (Some(LabFailure::Interrupted), _) => CODE_INTERRUPTED,
            (_, Some(code)) => code,
            (Some(LabFailure::Died { .. }), None) => CODE_FAILED,
            (None, None) => 0,
        }
    }

    /// Returns the console output of a guest.
    pub fn output(&self, node: Node) -> &str {
        self.guests.iter().find(|guest| guest.node == node).map_or("", |guest| &guest.output)
    }

    /// Panics unless all scripts ended with exit code 0.
    #[track_caller]
    pub fn must_succeed(self) -> Self {
        assert!(self.code() == 0, "{self}");
        self
    }
}

impl fmt::Display for LabFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimeOver { limit_s, running } => {
                let names: Vec<String> = running.iter().map(Node::to_string).collect();
                write!(formatter, "time limit of {limit_s} s reached, guest {} still ran; ", names.join(", "))?;
                formatter.write_str("raise it with --timeout")
            }
            Self::Interrupted => formatter.write_str("interrupted"),
            Self::Died { node } => write!(formatter, "guest {node}'s machine ended before its script; see its output"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(failure) = &self.failure {
            writeln!(formatter, "{failure}")?;
        }
        for guest in &self.guests {
            let code = guest.code.map_or("no exit code".to_owned(), |code| format!("exit code {code}"));
            writeln!(formatter, "--- guest {}: {code}", guest.node)?;
            let lines: Vec<&str> = guest.output.lines().collect();
            for line in &lines[lines.len().saturating_sub(LINES_SHOWN)..] {
                writeln!(formatter, "{line}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(codes: &[Option<i32>], failure: Option<LabFailure>) -> Report {
        let guest = |(index, code): (usize, &Option<i32>)| GuestReport {
            node: Node(index as u8),
            code: *code,
            output: String::new(),
        };
        Report { guests: codes.iter().enumerate().map(guest).collect(), failure }
    }

    #[test]
    fn the_exit_code_is_that_of_the_first_failed_script_or_of_the_failure() {
        let time_over = LabFailure::TimeOver { limit_s: 1, running: vec![Node::B] };
        for (codes, failure, code) in [
            (&[Some(0), Some(0)][..], None, 0),
            (&[Some(0), Some(3)], None, 3),
            (&[Some(0), None], Some(time_over), 124),
            (&[None, None], Some(LabFailure::Interrupted), 130),
            (&[Some(0), None], Some(LabFailure::Died { node: Node::B }), 1),
            (&[Some(4), None], Some(LabFailure::Died { node: Node::B }), 4),
            (&[Some(0), None], None, 0), // Killed by the test itself.
        ] {
            assert_eq!(report(codes, failure).code(), code, "{codes:?}");
        }
    }
}
