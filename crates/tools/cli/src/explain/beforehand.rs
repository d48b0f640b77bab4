//! What a command line would use: the program is examined, and each listener of this machine is a possible destination.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use socket::process::settings::Settings;
use stats_page::{DataPath, FallbackReason};

use super::reason::{DENIED_BY_RULES, Reason};
use super::socket::{OtherSide, may_reach};
use crate::processes::program::{exclusion, folder_identity};
use crate::processes::tcp::TcpSocket;
use crate::processes::{Obstacle, Processes, Program};
use crate::rack_choice::RackChoice;
use crate::rack_dir::shared::SharedView;
use crate::wrong_use::WrongUse;
use crate::{lanes, library, program, rack_dir};

/// What a command line would use.
pub struct Forecast<'a> {
    /// The file of the program.
    pub program: PathBuf,
    /// The rack directory that it would use.
    pub rack: PathBuf,
    /// Why it would have no lanes at all.
    pub reason: Option<Reason>,
    /// The listeners that it could connect to.
    pub destinations: Vec<Destination<'a>>,
}

/// A listener, and what a connection to it would use.
pub struct Destination<'a> {
    /// Its address.
    pub address: SocketAddr,
    /// What a connection would use.
    pub path: DataPath,
    /// Why not a lane.
    pub reason: Option<Reason>,
    /// The program that listens.
    pub other_side: OtherSide<'a>,
}

/// Returns what a command line, given as the program's name and its arguments, would use in a rack.
///
/// # Errors
/// Wrong use, if there is no such program or no such rack.
pub fn forecast<'a>(processes: &'a Processes, command: &[OsString], rack: Option<&Path>) -> Result<Forecast<'a>> {
    let search = std::env::var_os("PATH");
    let name = command.first().ok_or_else(|| WrongUse::of("no program given; name one after --"))?;
    let program = program::resolve(name, search.as_deref())?;
    library::find(None)?;
    let rack = match RackChoice::new(rack)? {
        RackChoice::Directory(directory) => directory,
        RackChoice::File(rack) => {
            let what = "describes several nodes; give the directory of one, which crosslane status shows";
            return Err(WrongUse::of(format!("{} {what}", rack.shown())).into());
        }
    };
    let settings = Settings::from_env();
    if let Some(mistake) = settings.mistakes.first() {
        return Err(WrongUse::of(mistake.to_string()).into());
    }
    let reason = whole_program(&program, search.as_deref(), &rack, &settings);
    let mut destinations: Vec<Destination<'_>> = processes
        .own_table()
        .listeners()
        .map(|socket| destination(processes, socket, &rack, &settings, reason))
        .collect();
    destinations.sort_by_key(|destination| (destination.address.port(), destination.address));
    destinations.dedup_by_key(|destination| destination.address);
    Ok(Forecast { program, rack, reason, destinations })
}

/// Returns why the program would have no lanes at all.
fn whole_program(path: &Path, search: Option<&std::ffi::OsStr>, rack: &Path, settings: &Settings) -> Option<Reason> {
    if settings.off {
        return Some(Reason::Program(Obstacle::OffByVariable));
    }
    if let Some(found) = program::obstacle(path, search) {
        return Some(Reason::Program(match found {
            program::Obstacle::Static(_) => Obstacle::Static,
            program::Obstacle::OtherLoader(..) => Obstacle::OtherCLibrary,
            program::Obstacle::Go(_) => Obstacle::Go,
            program::Obstacle::OtherMachine(_) => Obstacle::OtherArchitecture,
            program::Obstacle::Privileged(..) => Obstacle::Privileged,
            program::Obstacle::Unknown(_) => Obstacle::NotLoaded,
        }));
    }
    if settings.honours_filters {
        return Some(Reason::Recorded(FallbackReason::PacketFilters));
    }
    if lanes::are_off(rack) {
        return Some(Reason::Recorded(FallbackReason::SwitchedOff));
    }
    let is_usable = !rack.exists() || rack_dir::check_usable(rack).is_ok();
    (!is_usable).then_some(Reason::Recorded(FallbackReason::RackUnavailable))
}

fn destination<'a>(
    processes: &'a Processes,
    socket: &'a TcpSocket,
    rack: &Path,
    settings: &Settings,
    reason: Option<Reason>,
) -> Destination<'a> {
    let program = processes.holder(socket.inode, 0);
    let other_side = OtherSide { program, uid: socket.uid, is_in_same_namespace: true, reason: None };
    let by_rule = || exclusion(settings, Some(socket.local.port())).map(Reason::Recorded);
    let reason = reason.or_else(by_rule).or_else(|| obstacle_at(socket, program, rack));
    let path = if reason.is_some() { DataPath::Kernel } else { DataPath::Lane };
    Destination { address: socket.local, path, reason, other_side }
}

/// Returns why a connection to a listener would have no lane, from what the program that listens shows.
fn obstacle_at(socket: &TcpSocket, server: Option<&Program>, rack: &Path) -> Option<Reason> {
    let user = rustix::process::geteuid().as_raw();
    match SharedView::of(rack).ok().flatten() {
        Some(shared) if may_reach(&shared, user, socket.uid, Some(socket.local.port())) => {}
        Some(_) => return Some(Reason::Recorded(DENIED_BY_RULES)),
        None if socket.uid != user => return Some(Reason::Recorded(FallbackReason::OtherUser)),
        None => {}
    }
    // A program that cannot be examined does not run as the user alone, or is the kernel.
    let Some(server) = server else { return Some(Reason::Recorded(FallbackReason::NoAnswer)) };
    if let Some(obstacle) = server.obstacle() {
        return Some(Reason::Peer(obstacle));
    }
    if server.rack_identity().is_some_and(|other| folder_identity(rack) != Some(other)) {
        return Some(Reason::OtherRack);
    }
    exclusion(&server.settings(), Some(socket.local.port())).map(Reason::Recorded)
}
