//! Programs of a rack whose library could not create its page there: only `/proc` shows that they run.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use crate::processes::Processes;
use crate::processes::program::folder_identity;
use crate::rack_dir;

/// A program that publishes nothing.
#[derive(Clone, Serialize)]
pub struct UnpublishedProgram {
    pid: i32,
    program: String,
    /// The rack directory in which it has no page.
    rack: PathBuf,
}

/// Returns the programs of the rack directories that publish nothing. To find them takes longer than to read
/// pages, so this is only done for a reason: a full file system, or no page at all.
pub fn find(directories: &[PathBuf], has_pages: bool) -> Result<Vec<UnpublishedProgram>> {
    if has_pages && !directories.iter().any(|directory| rack_dir::is_full(directory)) {
        return Ok(Vec::new());
    }
    let processes = Processes::scan()?;
    Ok(directories.iter().flat_map(|directory| of_directory(&processes, directory)).collect())
}

/// Returns the programs of one rack directory that publish nothing.
pub fn of_directory(processes: &Processes, directory: &Path) -> Vec<UnpublishedProgram> {
    let Some(identity) = folder_identity(directory) else { return Vec::new() };
    let unpublished = processes.all().filter(|program| program.is_unpublished());
    let of_rack = unpublished.filter(|program| program.rack_identity() == Some(identity));
    let shown = of_rack.map(|program| UnpublishedProgram {
        pid: program.pid,
        program: program.name.clone(),
        rack: directory.to_owned(),
    });
    shown.collect()
}

/// Returns a paragraph about the programs, if there are any.
pub fn describe(programs: &[UnpublishedProgram]) -> String {
    let Some(first) = programs.first() else { return String::new() };
    let named: Vec<String> = programs.iter().map(|program| format!("{} ({})", program.program, program.pid)).collect();
    let (shown, named) = (first.rack.display(), named.join(", "));
    let (why, remedy) = match rack_dir::is_full(&first.rack) {
        true => ("its file system is full", "Free space there"),
        false => ("its file system was full, or a limit of file sizes or a quota forbids it", "Remove the cause"),
    };
    let unseen = format!("Running over crosslane, but not shown: {named}.");
    format!("{unseen}\nThey could not create their pages in {shown}: {why}. {remedy}, and restart them.\n")
}
