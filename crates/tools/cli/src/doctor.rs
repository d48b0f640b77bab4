//! `crosslane doctor`: checks what this machine offers, what is missing, and how to get it.

mod hardware;
mod libraries;
mod limits;
mod machine;
mod sandbox;
mod tools;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::{library, output, rack_dir};
use stats::{Align, Table};

/// Options of `crosslane doctor`.
#[derive(clap::Args)]
pub struct Options {
    /// Print JSON (schema crosslane-doctor/1)
    #[arg(long)]
    json: bool,
    /// The rack to check [default: as for run]
    #[arg(long, value_name = "DIR")]
    rack: Option<PathBuf>,
    /// The library to check [default: as for run]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    /// Present and fit for use.
    Ok,
    /// Works but could be better, or an optional part is missing.
    Note,
    /// Missing, and lanes do not work without it.
    Missing,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), remedy: None }
    }

    fn note(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Note, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn missing(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Missing, found: found.into(), remedy: Some(remedy.into()) }
    }
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    lanes_work: bool,
    checks: &'a [Check],
}

/// Runs all checks and prints the report. Fails if lanes cannot work on this machine.
pub fn main(options: &Options) -> Result<()> {
    let checks = checks(options.rack.as_deref(), options.library.as_deref());
    let missing = checks.iter().filter(|check| check.status == Status::Missing).count();
    if options.json {
        output::print_json(&Report { schema: "crosslane-doctor/1", lanes_work: missing == 0, checks: &checks })?;
    } else {
        output::print(&describe(&checks))?;
    }
    if missing > 0 {
        bail!("lanes cannot work here: {missing} of {} checks failed; follow the remedies above", checks.len());
    }
    Ok(())
}

fn checks(rack: Option<&Path>, library: Option<&Path>) -> Vec<Check> {
    let directory = rack_dir::chosen(rack);
    let found = library::find(library).ok();
    let machine = machine::checks(rack, library);
    let denied = machine.iter().filter(|check| machine::CALLS.contains(&check.name) && check.status != Status::Ok);
    let denied: Vec<&str> = denied.map(|check| check.name).collect();
    [
        machine,
        limits::checks(),
        sandbox::checks(&directory, &denied),
        libraries::checks(found.as_deref(), &directory),
        hardware::checks(),
        tools::checks(),
    ]
    .concat()
}

fn describe(checks: &[Check]) -> String {
    let mut table = Table::new(&[("", Align::Left), ("WHAT", Align::Left), ("FOUND", Align::Left)]);
    for check in checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Note => "note",
            Status::Missing => "MISSING",
        };
        let remedy = check.remedy.as_ref().map(|remedy| format!(" -> {remedy}")).unwrap_or_default();
        table.row(vec![mark.to_owned(), check.name.to_owned(), format!("{}{remedy}", check.found)]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_that_is_not_ok_has_a_remedy() {
        let checks = checks(None, None);
        assert!(checks.len() > 25);
        for check in &checks {
            assert_eq!(check.status == Status::Ok, check.remedy.is_none(), "{check:?}");
            assert!(!check.found.is_empty() && !check.found.contains('\n'), "{check:?}");
        }
        let text = describe(&checks);
        assert_eq!(text.lines().count(), checks.len() + 1);
    }
}
