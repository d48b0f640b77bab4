//! The output of `crosslane explain`: JSON by docs/explain.schema.json, and tables.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;
use stats::{Align, Table};
use stats_page::DataPath;

use super::beforehand::{Destination, Forecast};
use super::reason::Reason;
use super::socket::{OtherSide, Role, Socket};
use crate::processes::Program;
use crate::processes::program::user_name;
use crate::stat;

/// The version of the JSON output.
pub const SCHEMA: &str = "crosslane-explain/1";

/// What is said of a library whose release cannot be read.
const REPLACED: &str = "whose file was replaced";

/// The output for running programs.
#[derive(Serialize)]
pub struct Report {
    schema: &'static str,
    processes: Vec<ProcessReport>,
    sockets: Vec<SocketReport>,
}

/// The output for a command line.
#[derive(Serialize)]
pub struct ForecastReport {
    schema: &'static str,
    program: PathBuf,
    #[serde(flatten)]
    verdict: Verdict,
    rack: PathBuf,
    /// It has no sockets yet.
    sockets: [(); 0],
    destinations: Vec<DestinationReport>,
}

#[derive(Serialize)]
struct ProcessReport {
    pid: i32,
    program: String,
    uid: u32,
    user: String,
    cgroup: Option<String>,
    library: Option<LibraryReport>,
    rack: Option<PathBuf>,
    #[serde(flatten)]
    cause: Cause,
}

#[derive(Serialize)]
struct LibraryReport {
    path: PathBuf,
    release: Option<String>,
}

#[derive(Serialize)]
struct SocketReport {
    pid: i32,
    fd: i32,
    #[serde(flatten)]
    verdict: Verdict,
    role: Option<&'static str>,
    state: &'static str,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// The other side has reported the reason.
    reported_by_other_side: bool,
    other_side: Option<OtherSideReport>,
}

#[derive(Serialize)]
struct DestinationReport {
    address: SocketAddr,
    #[serde(flatten)]
    verdict: Verdict,
    other_side: OtherSideReport,
}

#[derive(Serialize)]
struct Verdict {
    path: &'static str,
    #[serde(flatten)]
    cause: Cause,
}

#[derive(Default, Serialize)]
struct Cause {
    reason: Option<String>,
    /// Its number.
    number: Option<u16>,
    explanation: Option<String>,
    remedy: Option<&'static str>,
}

#[derive(Serialize)]
struct OtherSideReport {
    pid: Option<i32>,
    program: Option<String>,
    uid: u32,
    user: String,
    library: Option<LibraryReport>,
    same_network_namespace: bool,
    /// The reason that its own library has recorded.
    reason: Option<&'static str>,
}

impl Report {
    pub fn new(programs: &[&Program], sockets: &[Socket<'_>]) -> Self {
        Self {
            schema: SCHEMA,
            processes: programs.iter().map(|program| ProcessReport::new(program)).collect(),
            sockets: sockets.iter().map(SocketReport::new).collect(),
        }
    }
}

impl ForecastReport {
    pub fn new(forecast: &Forecast<'_>) -> Self {
        let path = if forecast.reason.is_some() { DataPath::Kernel } else { DataPath::Lane };
        Self {
            schema: SCHEMA,
            program: forecast.program.clone(),
            verdict: Verdict::new(Some(path), forecast.reason),
            rack: forecast.rack.clone(),
            sockets: [],
            destinations: forecast.destinations.iter().map(DestinationReport::new).collect(),
        }
    }
}

impl ProcessReport {
    fn new(program: &Program) -> Self {
        Self {
            pid: program.pid,
            program: program.name.clone(),
            uid: program.uid,
            user: user_name(program.uid),
            cgroup: program.cgroup.clone(),
            library: LibraryReport::of(program),
            rack: program.rack(),
            cause: Cause::new(reason_of(program)),
        }
    }
}

impl LibraryReport {
    fn of(program: &Program) -> Option<Self> {
        let library = program.library.as_ref()?;
        Some(Self { path: library.path.clone(), release: library.release.clone() })
    }
}

impl SocketReport {
    fn new(socket: &Socket<'_>) -> Self {
        Self {
            pid: socket.program.pid,
            fd: socket.fd,
            verdict: Verdict::new(socket.path, socket.reason),
            role: socket.role.map(Role::name),
            state: socket.state.name(),
            local: socket.local,
            peer: socket.peer,
            reported_by_other_side: socket.is_reported,
            other_side: socket.other_side.as_ref().map(OtherSideReport::new),
        }
    }
}

impl DestinationReport {
    fn new(destination: &Destination<'_>) -> Self {
        let Destination { address, path, reason, other_side } = destination;
        Self {
            address: *address,
            verdict: Verdict::new(Some(*path), *reason),
            other_side: OtherSideReport::new(other_side),
        }
    }
}

fn path_name(path: Option<DataPath>) -> &'static str {
    path.map_or("unknown", DataPath::name)
}

impl Verdict {
    fn new(path: Option<DataPath>, reason: Option<Reason>) -> Self {
        Self { path: path_name(path), cause: Cause::new(reason) }
    }
}

impl Cause {
    fn new(reason: Option<Reason>) -> Self {
        let Some(reason) = reason else { return Self::default() };
        let (name, explanation) = (reason.name(), reason.explanation());
        let (number, remedy) = (Some(reason.number()), Some(reason.remedy()));
        Self { reason: Some(name), number, explanation: Some(explanation), remedy }
    }
}

impl OtherSideReport {
    fn new(other: &OtherSide<'_>) -> Self {
        Self {
            pid: other.program.map(|program| program.pid),
            program: other.program.map(|program| program.name.clone()),
            uid: other.uid,
            user: user_name(other.uid),
            library: other.program.and_then(LibraryReport::of),
            same_network_namespace: other.is_in_same_namespace,
            reason: other.reason.map(stats_page::FallbackReason::name),
        }
    }
}

/// Returns why a program has no lanes at all, or none that can be shown.
fn reason_of(program: &Program) -> Option<Reason> {
    let unpublished = || program.is_unpublished().then_some(Reason::Unpublished);
    program.obstacle().map(Reason::Program).or_else(unpublished)
}

/// Returns the sockets of running programs as text.
pub fn describe(programs: &[&Program], sockets: &[Socket<'_>]) -> String {
    let mut text = String::new();
    for program in programs {
        text += &headline(program);
        let mut table = Table::new(&[
            ("FD", Align::Right),
            ("PATH", Align::Left),
            ("ROLE", Align::Left),
            ("STATE", Align::Left),
            ("LOCAL", Align::Left),
            ("PEER", Align::Left),
            ("OTHER SIDE", Align::Left),
            ("REASON", Align::Left),
        ]);
        for socket in sockets.iter().filter(|socket| socket.program.pid == program.pid) {
            table.row(vec![
                socket.fd.to_string(),
                path_name(socket.path).to_owned(),
                socket.role.map_or("-", Role::name).to_owned(),
                socket.state.name().to_owned(),
                stat::address(socket.local),
                stat::address(socket.peer),
                socket.other_side.as_ref().map_or_else(|| "-".to_owned(), |other| other_side(other, program)),
                socket.reason.map_or_else(|| "-".to_owned(), |reason| shown(reason, socket.is_reported)),
            ]);
        }
        text += &if table.is_empty() { "It has no TCP sockets.\n".to_owned() } else { table.render() };
        text.push('\n');
    }
    text + &explanations(sockets.iter().filter_map(|socket| socket.reason))
}

/// Returns the word for a reason, and whose it is.
fn shown(reason: Reason, is_reported: bool) -> String {
    if is_reported { format!("{} (other side)", reason.name()) } else { reason.name() }
}

fn headline(program: &Program) -> String {
    let Program { name, pid, .. } = program;
    let user = user_name(program.uid);
    let state = match (reason_of(program), &program.library, program.rack()) {
        (Some(Reason::Unpublished), _, Some(rack)) => {
            format!("no page in rack {}: its lanes are not shown", rack.display())
        }
        (Some(reason), ..) => reason.explanation(),
        (None, Some(library), Some(rack)) => {
            let release = library.release.as_deref().unwrap_or(REPLACED);
            format!("library {release}, rack {}", rack.display())
        }
        (None, Some(library), None) if program.has_overwritten_environment() => {
            let release = library.release.as_deref().unwrap_or(REPLACED);
            let why = "the program has overwritten its variables, so that its rack is not known before its first lane";
            format!("library {release}; {why}")
        }
        _ => "the library is loaded".to_owned(),
    };
    format!("{name} (process {pid}, user {user}): {state}\n")
}

fn other_side(other: &OtherSide<'_>, program: &Program) -> String {
    let recorded = other.reason.map_or_else(String::new, |reason| format!(", says {}", reason.name()));
    let release = |program: &Program| program.library.as_ref().map(|library| library.release.clone());
    let differing = other.program.and_then(release).filter(|theirs| release(program).is_some_and(|own| own != *theirs));
    let differing = differing.map(|release| format!(", library {}", release.as_deref().unwrap_or(REPLACED)));
    named(other) + &recorded + &differing.unwrap_or_default()
}

/// Returns the name of the program at the other side, or its user.
fn named(other: &OtherSide<'_>) -> String {
    let user = user_name(other.uid);
    match other.program {
        Some(program) => format!("{} ({}, {user})", program.name, program.pid),
        None => format!("user {user}"),
    }
}

/// Returns an explanation and a remedy for each reason that occurs.
fn explanations(reasons: impl Iterator<Item = Reason>) -> String {
    let mut seen = BTreeSet::new();
    let mut text = String::new();
    for reason in reasons {
        if seen.insert(reason.name()) {
            let (name, number) = (reason.name(), reason.number());
            text += &format!("{name} ({number}): {}.\n    What to do: {}.\n", reason.explanation(), reason.remedy());
        }
    }
    text
}

/// Returns a forecast as text.
pub fn describe_forecast(forecast: &Forecast<'_>) -> String {
    let shown = forecast.program.display();
    let mut text = match forecast.reason {
        Some(_) => format!("{shown} would use kernel TCP for all connections.\n"),
        None => format!("{shown} can use lanes, in rack {}.\n", forecast.rack.display()),
    };
    let mut table = Table::new(&[
        ("LISTENER", Align::Left),
        ("PATH", Align::Left),
        ("PROGRAM", Align::Left),
        ("REASON", Align::Left),
    ]);
    for Destination { address, path, reason, other_side: server } in &forecast.destinations {
        table.row(vec![
            address.to_string(),
            path.name().to_owned(),
            named(server),
            reason.map_or_else(|| "-".to_owned(), Reason::name),
        ]);
    }
    text += &match table.is_empty() {
        true => "No program listens on this machine: what it connects to decides.\n".to_owned(),
        false => format!("What it would use for the listeners of this machine:\n\n{}", table.render()),
    };
    let reasons = forecast.reason.into_iter().chain(forecast.destinations.iter().filter_map(|to| to.reason));
    let explanations = explanations(reasons);
    if explanations.is_empty() { text } else { format!("{text}\n{explanations}") }
}
