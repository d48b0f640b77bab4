//! The JSON output of `crosslane stat`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use serde::Serialize;
use stats_page::FallbackReason;
use stats_page::reader::{self, ClosedConnection, Connection, Process, Snapshot};

use super::all::{Member, Rack};
use super::closed;
use super::proxies::{Proxies, ProxyReport};
use super::without_page::{ProgramWithoutPage, WithoutPage};
use crate::lanes;
use crate::processes::Program;
use crate::processes::program::user_name;
use crate::rack_choice::RackChoice;

/// The version of the JSON output, which docs/stat.schema.json describes.
pub const SCHEMA: &str = "crosslane-stat/1";

/// The output of `crosslane stat --json`.
#[derive(Serialize)]
pub struct Report<'a> {
    schema: &'static str,
    /// Whether lanes are switched off in at least one directory of the rack.
    lanes_off: bool,
    processes: Vec<ProcessReport<'a>>,
    /// For a rack file, the proxy of each node on each of its links.
    proxies: &'a [ProxyReport],
    unreadable: Vec<UnreadableReport<'a>>,
    /// Programs that could not create a page.
    unpublished: Vec<ProgramWithoutPage>,
    /// Programs of which no connection has proved busy.
    idle: Vec<ProgramWithoutPage>,
    /// With --all, the rack directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    racks: Option<Vec<RackReport<'a>>>,
}

/// A rack directory and the programs that meet in it.
#[derive(Serialize)]
struct RackReport<'a> {
    directory: &'a Path,
    uid: u32,
    user: String,
    lanes_off: bool,
    programs: Vec<ProgramReport<'a>>,
}

/// A program as `/proc` shows it.
#[derive(Serialize)]
struct ProgramReport<'a> {
    pid: i32,
    program: &'a str,
    uid: u32,
    user: String,
    cgroup: Option<&'a str>,
    has_page: bool,
}

/// Who runs a process.
#[derive(Clone, Serialize)]
struct OwnerReport<'a> {
    rack: &'a Path,
    /// The process number where this command runs; `pid` is that in the process's own namespace.
    host_pid: Option<i32>,
    uid: Option<u32>,
    user: Option<String>,
    cgroup: Option<&'a str>,
}

#[derive(Serialize)]
struct ProcessReport<'a> {
    pid: u32,
    #[serde(flatten)]
    owner: Option<OwnerReport<'a>>,
    program: &'a str,
    node: Option<String>,
    started_at_ns: u64,
    connections: Vec<ConnectionReport>,
    closed: Vec<ClosedReport>,
    connections_unlisted: u64,
    lane_memory_bytes: u64,
    lane_memory_bytes_max: u64,
    totals: TotalsReport,
    fallbacks: &'a BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
struct ConnectionReport {
    fd: i32,
    role: &'static str,
    path: &'static str,
    inherited: bool,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// Why it uses kernel TCP.
    reason: Option<&'static str>,
    bytes_sent: u64,
    bytes_received: u64,
    messages_sent: u64,
    messages_received: u64,
    sleeps: u64,
    wakes: u64,
    tcp_bytes_sent: u64,
    tcp_bytes_received: u64,
    sends_on_tcp: bool,
    receives_on_tcp: bool,
    opened_at_ns: u64,
}

/// A connection that was closed within the last minute.
#[derive(Serialize)]
struct ClosedReport {
    closed_at_ns: u64,
    connection: ConnectionReport,
}

#[derive(Serialize)]
struct TotalsReport {
    lane_bytes_sent: u64,
    lane_bytes_received: u64,
    kernel_bytes_sent: u64,
    kernel_bytes_received: u64,
    window_bytes_sent: u64,
    window_bytes_received: u64,
    lane_connections_total: u64,
    kernel_connections_total: u64,
    window_connections_total: u64,
    lane_connections_open: u64,
    kernel_connections_open: u64,
    window_connections_open: u64,
}

#[derive(Serialize)]
struct UnreadableReport<'a> {
    name: &'a str,
    error: String,
}

impl<'a> Report<'a> {
    pub fn new(snapshot: &'a Snapshot, proxies: &'a Proxies, without_page: WithoutPage, rack: &RackChoice) -> Self {
        let silent = proxies.silent.iter().map(|(name, error)| UnreadableReport { name, error: error.clone() });
        Self {
            schema: SCHEMA,
            lanes_off: rack.directories().iter().any(|directory| lanes::are_off(directory)),
            processes: snapshot.processes.iter().map(|process| ProcessReport::new(process, rack)).collect(),
            proxies: &proxies.links,
            unreadable: snapshot.unreadable.iter().map(UnreadableReport::new).chain(silent).collect(),
            unpublished: without_page.unpublished,
            idle: without_page.idle,
            racks: None,
        }
    }

    /// Returns the report on all racks.
    pub fn of_all(racks: &'a [Rack<'a>]) -> Self {
        let processes = racks.iter().flat_map(|rack| {
            let report = |member: &'a Member<'a>| ProcessReport {
                owner: Some(OwnerReport::new(rack, member)),
                node: member.process.node.map(stats_page::node_name),
                ..ProcessReport::without_node(&member.process)
            };
            rack.members.iter().map(report)
        });
        let unreadable = racks.iter().flat_map(|rack| &rack.unreadable);
        Self {
            schema: SCHEMA,
            lanes_off: racks.iter().any(|rack| rack.lanes_off),
            processes: processes.collect(),
            proxies: &[],
            unreadable: unreadable.map(UnreadableReport::new).collect(),
            unpublished: racks.iter().flat_map(|rack| rack.without_page.unpublished.clone()).collect(),
            idle: racks.iter().flat_map(|rack| rack.without_page.idle.clone()).collect(),
            racks: Some(racks.iter().map(RackReport::new).collect()),
        }
    }
}

impl<'a> RackReport<'a> {
    fn new(rack: &'a Rack<'a>) -> Self {
        Self {
            directory: &rack.directory,
            uid: rack.uid,
            user: user_name(rack.uid),
            lanes_off: rack.lanes_off,
            programs: rack.programs.iter().map(|program| ProgramReport::new(program)).collect(),
        }
    }
}

impl<'a> ProgramReport<'a> {
    fn new(program: &'a Program) -> Self {
        Self {
            pid: program.pid,
            program: &program.name,
            uid: program.uid,
            user: user_name(program.uid),
            cgroup: program.cgroup.as_deref(),
            has_page: program.has_page(),
        }
    }
}

impl<'a> OwnerReport<'a> {
    fn new(rack: &'a Rack<'a>, member: &'a Member<'a>) -> Self {
        Self {
            rack: &rack.directory,
            host_pid: member.program.map(|program| program.pid),
            uid: member.program.map(|program| program.uid),
            user: member.program.map(|program| user_name(program.uid)),
            cgroup: member.program.and_then(|program| program.cgroup.as_deref()),
        }
    }
}

impl<'a> UnreadableReport<'a> {
    fn new(page: &'a reader::Unreadable) -> Self {
        Self { name: &page.name, error: page.error.to_string() }
    }
}

impl<'a> ProcessReport<'a> {
    fn new(process: &'a Process, rack: &RackChoice) -> Self {
        let node = process.node.map(|address| rack.node_name(address));
        Self { node, ..Self::without_node(process) }
    }

    fn without_node(process: &'a Process) -> Self {
        Self {
            pid: process.pid,
            owner: None,
            program: &process.program,
            node: None,
            started_at_ns: process.started_at_ns,
            connections: process.connections.iter().map(ConnectionReport::new).collect(),
            closed: closed::of_page(process).map(ClosedReport::new).collect(),
            connections_unlisted: process.connections_unlisted,
            lane_memory_bytes: process.lane_memory_bytes,
            lane_memory_bytes_max: process.lane_memory_bytes_max,
            totals: TotalsReport {
                lane_bytes_sent: process.lane.bytes_sent,
                lane_bytes_received: process.lane.bytes_received,
                kernel_bytes_sent: process.kernel.bytes_sent,
                kernel_bytes_received: process.kernel.bytes_received,
                window_bytes_sent: process.window.bytes_sent,
                window_bytes_received: process.window.bytes_received,
                lane_connections_total: process.lane.connections_total,
                kernel_connections_total: process.kernel.connections_total,
                window_connections_total: process.window.connections_total,
                lane_connections_open: process.lane.connections_open,
                kernel_connections_open: process.kernel.connections_open,
                window_connections_open: process.window.connections_open,
            },
            fallbacks: &process.fallbacks,
        }
    }
}

impl ClosedReport {
    fn new(closed: &ClosedConnection) -> Self {
        Self { closed_at_ns: closed.closed_at_ns, connection: ConnectionReport::new(&closed.connection) }
    }
}

impl ConnectionReport {
    fn new(connection: &Connection) -> Self {
        Self {
            fd: connection.fd,
            role: connection.role.name(),
            path: connection.path.name(),
            inherited: connection.inherited,
            local: connection.local,
            peer: connection.peer,
            reason: connection.reason.map(FallbackReason::name),
            bytes_sent: connection.bytes_sent,
            bytes_received: connection.bytes_received,
            messages_sent: connection.messages_sent,
            messages_received: connection.messages_received,
            sleeps: connection.sleeps,
            wakes: connection.wakes,
            tcp_bytes_sent: connection.tcp_bytes_sent,
            tcp_bytes_received: connection.tcp_bytes_received,
            sends_on_tcp: connection.sends_on_tcp,
            receives_on_tcp: connection.receives_on_tcp,
            opened_at_ns: connection.opened_at_ns,
        }
    }
}
