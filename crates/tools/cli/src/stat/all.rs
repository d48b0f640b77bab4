//! `crosslane stat --all`: every rack directory that the user may read.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use stats::{Align, Table};
use stats_page::reader::{self, Process, Snapshot, Unreadable};

use super::without_page::{self, WithoutPage};
use super::{age_since, open_of_total};
use crate::processes::program::{folder_identity, user_name};
use crate::processes::{Processes, Program};
use crate::rack_dir::shared::{self, SharedView};
use crate::{lanes, rack_dir};

/// A rack directory, or that of a user in a shared rack.
pub struct Rack<'a> {
    /// Its path as this command reaches it: below `/proc/PID/root` if it is in another mount namespace.
    pub directory: PathBuf,
    /// Its owner.
    pub uid: u32,
    /// Whether lanes are switched off in it.
    pub lanes_off: bool,
    /// The processes that publish their state in it.
    pub members: Vec<Member<'a>>,
    /// The pages that could not be read.
    pub unreadable: Vec<Unreadable>,
    /// The programs that meet in it, as far as the caller may examine them.
    pub programs: Vec<&'a Program>,
    /// Those of them that have no page.
    pub without_page: WithoutPage,
}

/// A process of a rack.
pub struct Member<'a> {
    /// What it publishes.
    pub process: Process,
    /// What `/proc` shows of it, if the caller may examine it.
    pub program: Option<&'a Program>,
}

/// A directory with pages of programs.
struct Place {
    directory: PathBuf,
    /// The shared rack that it is in, and the user of the machine whose it is.
    shared: Option<(PathBuf, u32)>,
}

/// Returns the rack directories of all programs and those in the usual places that the caller may read, by path. In
/// place of a shared one, returns those of its users.
pub fn racks(processes: &Processes) -> Vec<Rack<'_>> {
    let of_programs = processes.all().filter_map(|program| {
        let rack = program.rack()?;
        let from_here = program.seen_from_here(&rack);
        Some(if folder_identity(&rack) == folder_identity(&from_here) { rack } else { from_here })
    });
    let mut found = BTreeMap::new();
    // Paths of this mount namespace are preferred.
    for directory in usual_places().into_iter().chain(of_programs) {
        if let Some(identity) = folder_identity(&directory) {
            let known = found.entry(identity).or_insert_with(|| directory.clone());
            if known.starts_with("/proc") {
                *known = directory;
            }
        }
    }
    let places = found.into_values().flat_map(places);
    let mut racks: Vec<Rack<'_>> = places.filter_map(|place| rack(processes, place)).collect();
    racks.sort_by(|one, other| one.directory.cmp(&other.directory));
    racks
}

/// Returns the directories in which programs meet if no other is named, of all users, and those of nodes below them.
fn usual_places() -> Vec<PathBuf> {
    let in_memory = entries(Path::new("/dev/shm"));
    let in_memory = in_memory.into_iter().filter(|path| has_prefix(path, "crosslane-"));
    let of_sessions = entries(Path::new("/run/user")).into_iter().map(|session| session.join("crosslane"));
    let bases: Vec<PathBuf> = in_memory.chain(of_sessions).chain([rack_dir::base(), rack_dir::chosen(None)]).collect();
    let nodes = bases.iter().flat_map(|base| entries(&base.join("racks"))).flat_map(|rack| entries(&rack));
    let nodes: Vec<PathBuf> = nodes.collect();
    bases.into_iter().chain(nodes).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn has_prefix(path: &Path, prefix: &str) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
}

/// Returns the directories of pages that a rack directory stands for.
fn places(directory: PathBuf) -> Vec<Place> {
    match SharedView::of(&directory) {
        Ok(Some(shared)) => {
            let of_user = |uid| Place { directory: shared.user_directory(uid), shared: Some((directory.clone(), uid)) };
            shared.users().into_iter().map(of_user).collect()
        }
        _ => vec![Place { directory, shared: None }],
    }
}

/// Reads a rack directory. Returns `None` if the caller may not read it, or no program has ever met in it.
fn rack(processes: &Processes, place: Place) -> Option<Rack<'_>> {
    let Place { directory, shared } = place;
    let uid = std::fs::metadata(&directory).ok()?.uid();
    let rack = shared.as_ref().map_or(directory.as_path(), |(rack, _)| rack);
    let is_of_user =
        |program: &&Program| shared.as_ref().is_none_or(|(_, user)| shared::on_machine(program.uid) == *user);
    let programs: Vec<&Program> = without_page::of_rack(processes, rack).filter(is_of_user).collect();
    let without_page = WithoutPage::of_programs(processes, programs.iter().copied(), &directory);
    let snapshot = match is_page_folder(&directory) {
        true => reader::read_foreign_rack(&directory).ok()?,
        false if without_page.is_empty() => return None,
        false => Snapshot::default(),
    };
    let member = |process: Process| {
        let program = processes.all().find(|program| program.page().is_some_and(|page| is_same(page, &process)));
        Member { process, program }
    };
    Some(Rack {
        lanes_off: lanes::are_off(rack),
        uid,
        members: snapshot.processes.into_iter().map(member).collect(),
        unreadable: snapshot.unreadable,
        programs,
        without_page,
        directory,
    })
}

/// Returns whether the folder of pages in a directory belongs to the directory's owner, and no link leads to another:
/// where a link leads, its owner decides.
pub(super) fn is_page_folder(directory: &Path) -> bool {
    let Ok(found) = std::fs::metadata(directory) else { return false };
    let mut folders = Path::new(stats_page::STAT_FOLDER).ancestors().filter(|folder| !folder.as_os_str().is_empty());
    folders.all(|folder| is_folder_of(found.uid(), &directory.join(folder)))
}

fn is_folder_of(uid: u32, path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == uid)
}

/// Returns whether two readings are of one page: a process number occurs once in each namespace.
fn is_same(one: &Process, other: &Process) -> bool {
    (one.pid, one.started_at_ns) == (other.pid, other.started_at_ns)
}

/// Returns the racks as tables.
pub fn describe(racks: &[Rack<'_>]) -> String {
    if racks.is_empty() {
        return "No rack directory that this user may read.\n".to_owned();
    }
    let rack = |rack: &Rack<'_>| {
        let off = if rack.lanes_off { ", lanes are switched off" } else { "" };
        let mut text = format!("Rack {} of user {}{off}\n", rack.directory.display(), user_name(rack.uid));
        let table = members(rack);
        if !table.is_empty() {
            text += &format!("\n{}", table.render());
        }
        for page in &rack.unreadable {
            text += &format!("\nPage {} omitted: {}.\n", page.name, page.error);
        }
        if rack.members.is_empty() && rack.programs.is_empty() {
            text += "No program uses it.\n";
        }
        text + &rack.without_page.describe()
    };
    racks.iter().map(rack).collect::<Vec<_>>().join("\n")
}

fn members(rack: &Rack<'_>) -> Table {
    let right = Align::Right;
    let mut table = Table::new(&[
        ("PROGRAM", Align::Left),
        ("PID", right),
        ("USER", Align::Left),
        ("LANES", right),
        ("WINDOWS", right),
        ("KERNEL", right),
        ("MEMORY", right),
        ("UP", right),
        ("CGROUP", Align::Left),
    ]);
    for member in &rack.members {
        let process = &member.process;
        let mut row = vec![process.program.clone(), pid(member), member.program.map_or_else(nothing, user)];
        row.extend([&process.lane, &process.window, &process.kernel].map(open_of_total));
        row.extend([units::bytes(process.lane_memory_bytes), age_since(process.started_at_ns)]);
        row.push(member.program.map_or_else(nothing, cgroup));
        table.row(row);
    }
    for program in rack.programs.iter().filter(|program| !program.has_page()) {
        let mut row = vec![program.name.clone(), program.pid.to_string(), user(program)];
        row.extend(std::iter::repeat_with(nothing).take(5));
        row.push(cgroup(program));
        table.row(row);
    }
    table
}

/// What is shown in place of what is not known.
fn nothing() -> String {
    "-".to_owned()
}

/// The process number here, or in the process's own namespace where it is not known here.
fn pid(member: &Member<'_>) -> String {
    member.program.map_or_else(|| member.process.pid.to_string(), |program| program.pid.to_string())
}

fn user(program: &Program) -> String {
    user_name(program.uid)
}

fn cgroup(program: &Program) -> String {
    program.cgroup.clone().unwrap_or_else(nothing)
}
