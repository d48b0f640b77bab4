//! The programs of this machine as `/proc` shows them: their sockets, Crosslane's library in them, and their statistics
//! pages. Only what the caller may read is found: the programs of its user, or all of them for root.

pub mod program;
pub mod tcp;

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use procfs::ProcError;
use procfs::process::{Process, all_processes};
use stats_page::DataPath;

pub use program::{Obstacle, Program};
pub use tcp::TcpSocket;

use crate::wrong_use::WrongUse;

/// All programs that the caller may examine, and the TCP sockets of their network namespaces.
pub struct Processes {
    programs: BTreeMap<i32, Program>,
    /// By network namespace, that of this command included.
    tables: HashMap<u64, tcp::Table>,
    /// The programs that hold a socket, by its inode.
    holders: HashMap<u64, Vec<i32>>,
    /// The processes that have children, the caller's or not.
    parents: HashSet<i32>,
    /// The network namespace of this command.
    own_namespace: u64,
    /// The programs of connections with lanes, by local and peer address.
    lane_holders: OnceCell<HashMap<(SocketAddr, SocketAddr), i32>>,
}

impl Processes {
    /// Reads the state of all programs. Programs that end meanwhile, and those of other users, are left out.
    pub fn scan() -> Result<Self> {
        let (mut programs, mut tables, mut holders) =
            (BTreeMap::new(), HashMap::new(), HashMap::<u64, Vec<i32>>::new());
        let mut parents = HashSet::new();
        let own = Process::myself().context("/proc cannot be read; mount it")?;
        let own_namespace =
            program::network_namespace(&own).context("/proc/self/ns/net cannot be read; mount /proc")?;
        tables.insert(own_namespace, tcp::Table::read(&own));
        for process in all_processes().context("/proc cannot be read; mount it")?.flatten() {
            parents.extend(process.stat().map(|stat| stat.ppid));
            let Ok(program) = Program::read(&process) else { continue };
            program.sockets.values().for_each(|inode| holders.entry(*inode).or_default().push(program.pid));
            tables.entry(program.namespace).or_insert_with(|| tcp::Table::read(&process));
            programs.insert(program.pid, program);
        }
        Ok(Self { programs, tables, holders, parents, own_namespace, lane_holders: OnceCell::new() })
    }

    /// Returns all programs that the caller may examine, by process number.
    pub fn all(&self) -> impl Iterator<Item = &Program> {
        self.programs.values()
    }

    /// Returns a program.
    ///
    /// # Errors
    /// Wrong use, if there is no such process, or the caller may not examine it.
    pub fn program(&self, pid: i32) -> Result<&Program> {
        self.programs.get(&pid).ok_or_else(|| why_not_examined(pid).into())
    }

    /// Returns the TCP sockets of a network namespace.
    pub fn table(&self, namespace: u64) -> Option<&tcp::Table> {
        self.tables.get(&namespace)
    }

    /// Returns the network namespace of this command.
    pub fn own_namespace(&self) -> u64 {
        self.own_namespace
    }

    /// Returns the TCP sockets of the network namespace of this command.
    pub fn own_table(&self) -> &tcp::Table {
        &self.tables[&self.own_namespace]
    }

    /// Returns a program that holds a socket, preferably one other than `not`.
    pub fn holder(&self, inode: u64, not: i32) -> Option<&Program> {
        let holders = self.holders.get(&inode)?;
        let pid = holders.iter().find(|pid| **pid != not).or(holders.first())?;
        self.programs.get(pid)
    }

    /// Returns whether several programs hold a socket.
    pub fn is_shared(&self, inode: u64) -> bool {
        self.holders.get(&inode).is_some_and(|holders| {
            let mut pids = holders.clone();
            pids.dedup();
            pids.len() > 1
        })
    }

    /// Returns whether a program may have had child processes: it has some, has waited for some, or the kernel removes
    /// those that end.
    pub fn may_have_had_children(&self, program: &Program) -> bool {
        const SIGNAL_OF_CHILDREN: u64 = 1 << (rustix::process::Signal::CHILD.as_raw() - 1);
        let Ok(stat) = Process::new(program.pid).and_then(|process| process.stat()) else { return true };
        let has_waited = stat.cminflt > 0 || stat.sigignore & SIGNAL_OF_CHILDREN != 0;
        has_waited || self.parents.contains(&program.pid)
    }

    /// Returns the TCP socket at the other side of a connection, and its network namespace: that of the connection if
    /// the socket is in it.
    pub fn other_side(&self, local: SocketAddr, peer: SocketAddr, namespace: u64) -> Option<(u64, &TcpSocket)> {
        let in_namespace = |namespace: &u64| {
            let found = self.tables.get(namespace)?.connection(peer, local)?;
            Some((*namespace, found))
        };
        let others = self.tables.keys().filter(|other| **other != namespace);
        in_namespace(&namespace).or_else(|| others.into_iter().find_map(in_namespace))
    }

    /// Returns the program at the other side of a connection with a lane.
    pub fn other_side_of_lane(&self, local: SocketAddr, peer: SocketAddr) -> Option<&Program> {
        let holders = self.lane_holders.get_or_init(|| self.lane_holders());
        self.programs.get(holders.get(&(tcp::canonical(peer), tcp::canonical(local)))?)
    }

    fn lane_holders(&self) -> HashMap<(SocketAddr, SocketAddr), i32> {
        let mut holders = HashMap::new();
        for program in self.programs.values() {
            let connections = program.page().map(|page| page.connections.as_slice()).unwrap_or_default();
            for connection in connections.iter().filter(|connection| connection.path != DataPath::Kernel) {
                if let (Some(local), Some(peer)) = (connection.local, connection.peer) {
                    holders.insert((tcp::canonical(local), tcp::canonical(peer)), program.pid);
                }
            }
        }
        holders
    }
}

/// Returns the error for a process that was not examined.
fn why_not_examined(pid: i32) -> WrongUse {
    let process = match Process::new(pid) {
        Ok(process) => process,
        Err(ProcError::PermissionDenied(_)) => {
            return WrongUse::of(format!("process {pid} is hidden from this user; run this as root"));
        }
        Err(_) => return WrongUse::of(format!("no process {pid}; check --pid")),
    };
    let Ok(status) = process.status() else { return WrongUse::of(format!("no process {pid}; check --pid")) };
    let name = &status.name;
    if status.state.starts_with('Z') {
        return WrongUse::of(format!("process {pid} ({name}) has ended; check --pid"));
    }
    if status.euid != rustix::process::geteuid().as_raw() {
        let user = program::user_name(status.euid);
        return WrongUse::of(format!("process {pid} ({name}) belongs to user {user}; run this as {user} or as root"));
    }
    let why = "does not let its user examine it: it changed its user, or has more privileges";
    let remedy = if rustix::process::geteuid().is_root() {
        "run this with all capabilities, outside containers"
    } else {
        "run this as root"
    };
    WrongUse::of(format!("process {pid} ({name}) {why}; {remedy}"))
}
