//! Programs of a rack that have no page there: only `/proc` shows that they run.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use super::closed::{self, ClosedByKernel};
use crate::processes::program::folder_identity;
use crate::processes::{Processes, Program};
use crate::rack_dir;

/// A program without a page.
#[derive(Clone, Serialize)]
pub struct ProgramWithoutPage {
    pub pid: i32,
    pub program: String,
    /// The rack directory in which it has no page; `None` if it has overwritten its environment, which names that.
    pub rack: Option<PathBuf>,
    /// Closed connections to its listeners, if it is idle.
    pub closed: Vec<ClosedByKernel>,
}

/// The programs of a rack that have no page, by the cause.
#[derive(Clone, Default)]
pub struct WithoutPage {
    /// Those whose library could not create one.
    pub unpublished: Vec<ProgramWithoutPage>,
    /// Those of which no connection has proved busy; with an unknown rack, those of this user.
    pub idle: Vec<ProgramWithoutPage>,
}

impl ProgramWithoutPage {
    fn new(program: &Program, rack: Option<PathBuf>, closed: Vec<ClosedByKernel>) -> Self {
        Self { pid: program.pid, program: program.name.clone(), rack, closed }
    }
}

impl WithoutPage {
    /// Returns whether none is known to be in the rack.
    pub fn is_empty(&self) -> bool {
        self.unpublished.is_empty() && self.idle.iter().all(|program| program.rack.is_none())
    }

    /// Returns those of a directory's programs that have no page.
    pub fn of_programs<'a>(
        processes: &Processes,
        programs: impl Iterator<Item = &'a Program>,
        directory: &Path,
    ) -> Self {
        let mut found = Self::default();
        for program in programs.filter(|program| !program.has_page()) {
            let shown = |closed| ProgramWithoutPage::new(program, Some(directory.to_owned()), closed);
            if program.is_unpublished() {
                found.unpublished.push(shown(Vec::new()));
            } else {
                found.idle.push(shown(closed::of_listeners(processes, program)));
            }
        }
        found
    }

    /// Returns paragraphs about the programs, if there are any.
    pub fn describe(&self) -> String {
        describe_unpublished(&self.unpublished) + &describe_idle(&self.idle)
    }
}

/// Returns the programs of the rack directories that have no page. To find them takes longer than to read pages, so
/// this is only done for a reason: a full file system, or no page at all.
pub fn find(directories: &[PathBuf], has_pages: bool) -> Result<WithoutPage> {
    if has_pages && !directories.iter().any(|directory| rack_dir::is_full(directory)) {
        return Ok(WithoutPage::default());
    }
    let processes = Processes::scan()?;
    let mut all = WithoutPage::default();
    for directory in directories {
        let WithoutPage { unpublished, idle } =
            WithoutPage::of_programs(&processes, of_rack(&processes, directory), directory);
        all.unpublished.extend(unpublished);
        all.idle.extend(idle);
    }
    if !has_pages {
        all.idle.extend(of_unknown_rack(&processes));
    }
    Ok(all)
}

/// Returns the programs of this user with the library that have no page, and whose rack nothing shows.
fn of_unknown_rack(processes: &Processes) -> impl Iterator<Item = ProgramWithoutPage> {
    let uid = rustix::process::geteuid().as_raw();
    let is_one = move |program: &&Program| {
        program.uid == uid && program.has_overwritten_environment() && program.has_idle_library()
    };
    let shown = |program: &Program| ProgramWithoutPage::new(program, None, closed::of_listeners(processes, program));
    processes.all().filter(is_one).map(shown)
}

/// Returns the programs that meet in a rack directory, with a page or without.
pub fn of_rack<'a>(processes: &'a Processes, directory: &Path) -> impl Iterator<Item = &'a Program> + use<'a> {
    let identity = folder_identity(directory);
    processes.all().filter(move |program| identity.is_some() && program.rack_identity() == identity)
}

fn named<'a>(programs: impl Iterator<Item = &'a ProgramWithoutPage>) -> String {
    let named: Vec<String> = programs.map(|program| format!("{} ({})", program.program, program.pid)).collect();
    named.join(", ")
}

fn describe_unpublished(programs: &[ProgramWithoutPage]) -> String {
    let Some(first) = programs.first() else { return String::new() };
    let rack = first.rack.as_deref().unwrap_or(Path::new("?"));
    let (shown, named) = (rack.display(), named(programs.iter()));
    let (why, remedy) = match () {
        () if rack_dir::is_full(rack) => ("its file system is full", "Free space there"),
        () if rack_dir::is_on_overlay(rack) => {
            ("it is on an overlay file system, which cannot keep them", "Give a directory on another one")
        }
        () => ("its file system was full, or a limit of file sizes or a quota forbids it", "Remove the cause"),
    };
    let unseen = format!("Running over crosslane, but not shown: {named}.");
    format!("{unseen}\nThey could not create their pages in {shown}: {why}. {remedy}, and restart them.\n")
}

fn describe_idle(programs: &[ProgramWithoutPage]) -> String {
    let of = |is_known: bool| named(programs.iter().filter(|program| program.rack.is_some() == is_known));
    let mut text = String::new();
    if !of(true).is_empty() {
        text += &format!("No connection has proved busy, so that all use kernel TCP: {}.\n", of(true));
    }
    if !of(false).is_empty() {
        text += &format!(
            "Running without a busy connection, in a rack that is not known because the program has overwritten its \
             environment: {}.\n",
            of(false)
        );
    }
    if text.is_empty() { text } else { text + "A connection proves busy by its fifth request or later.\n" }
}
