//! Programs of a rack that have no page there: only `/proc` shows that they run.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use crate::processes::program::folder_identity;
use crate::processes::{Processes, Program};
use crate::rack_dir;

/// A program without a page.
#[derive(Clone, Serialize)]
pub struct ProgramWithoutPage {
    pid: i32,
    program: String,
    /// The rack directory in which it has no page.
    rack: PathBuf,
}

/// The programs of a rack that have no page, by the cause.
#[derive(Clone, Default)]
pub struct WithoutPage {
    /// Those whose library could not create one.
    pub unpublished: Vec<ProgramWithoutPage>,
    /// Those of which no connection has proved busy.
    pub idle: Vec<ProgramWithoutPage>,
}

impl WithoutPage {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.unpublished.is_empty() && self.idle.is_empty()
    }

    /// Returns those of a directory's programs that have no page.
    pub fn of_programs<'a>(programs: impl Iterator<Item = &'a Program>, directory: &Path) -> Self {
        let mut found = Self::default();
        for program in programs.filter(|program| !program.has_page()) {
            let shown =
                ProgramWithoutPage { pid: program.pid, program: program.name.clone(), rack: directory.to_owned() };
            if program.is_unpublished() { found.unpublished.push(shown) } else { found.idle.push(shown) }
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
        let WithoutPage { unpublished, idle } = WithoutPage::of_programs(of_rack(&processes, directory), directory);
        all.unpublished.extend(unpublished);
        all.idle.extend(idle);
    }
    Ok(all)
}

/// Returns the programs that meet in a rack directory, with a page or without.
pub fn of_rack<'a>(processes: &'a Processes, directory: &Path) -> impl Iterator<Item = &'a Program> + use<'a> {
    let identity = folder_identity(directory);
    processes.all().filter(move |program| identity.is_some() && program.rack_identity() == identity)
}

fn named(programs: &[ProgramWithoutPage]) -> String {
    let named: Vec<String> = programs.iter().map(|program| format!("{} ({})", program.program, program.pid)).collect();
    named.join(", ")
}

fn describe_unpublished(programs: &[ProgramWithoutPage]) -> String {
    let Some(first) = programs.first() else { return String::new() };
    let (shown, named) = (first.rack.display(), named(programs));
    let (why, remedy) = match () {
        () if rack_dir::is_full(&first.rack) => ("its file system is full", "Free space there"),
        () if rack_dir::is_on_overlay(&first.rack) => {
            ("it is on an overlay file system, which cannot keep them", "Give a directory on another one")
        }
        () => ("its file system was full, or a limit of file sizes or a quota forbids it", "Remove the cause"),
    };
    let unseen = format!("Running over crosslane, but not shown: {named}.");
    format!("{unseen}\nThey could not create their pages in {shown}: {why}. {remedy}, and restart them.\n")
}

fn describe_idle(programs: &[ProgramWithoutPage]) -> String {
    match programs {
        [] => String::new(),
        _ => format!("No connection has proved busy, so that all use kernel TCP: {}.\n", named(programs)),
    }
}
