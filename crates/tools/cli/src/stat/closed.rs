//! Connections that were closed within the last minute: those of the pages, and those of programs without a page that
//! the kernel still knows.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::Serialize;
use stats::{Align, Table};
use stats_page::reader::{ClosedConnection, Connection, Process, Snapshot};
use stats_page::{CLOSED_RECORDS, DataPath, Role};

use super::without_page::WithoutPage;
use super::{address, age_since, now_ns};
use crate::processes::tcp::{State, TIME_WAIT};
use crate::processes::{Processes, Program, TcpSocket};

/// How long a closed connection is shown: as long as the kernel lists it.
const SHOWN: Duration = TIME_WAIT;

/// A connection that kernel TCP has carried to a listener of a program, as the kernel's list shows it after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ClosedByKernel {
    /// The program's own address.
    pub local: SocketAddr,
    /// The client's address.
    pub peer: SocketAddr,
    /// When it was closed, in nanoseconds since 1970.
    pub closed_at_ns: u64,
}

/// Returns the connections that a process has closed within the last minute, the last one first.
pub fn of_page(process: &Process) -> impl Iterator<Item = &ClosedConnection> {
    let first_ns = now_ns().saturating_sub(SHOWN.as_nanos() as u64);
    // One that has carried nothing here is that of another process, which has it from a fork.
    process.closed.iter().filter(move |closed| {
        closed.closed_at_ns >= first_ns && bytes(&closed.connection).iter().any(|bytes| *bytes > 0)
    })
}

fn bytes(connection: &Connection) -> [u64; 3] {
    let by_tcp = connection.tcp_bytes_sent.saturating_add(connection.tcp_bytes_received);
    [connection.bytes_sent, connection.bytes_received, by_tcp]
}

/// Returns the closed connections to the listeners of a program without a page. Kernel TCP has carried them, because a
/// program has a page as soon as one of its connections has proved busy.
///
/// The kernel lists a connection for a minute after its end, unless it was reset, but does not say which program had
/// it. Connections are left out that another program may have had, perhaps with a lane: all those of a program that may
/// have had child processes, those to an address at which a socket of another program listens too, and those that ended
/// before the program began.
pub fn of_listeners(processes: &Processes, program: &Program) -> Vec<ClosedByKernel> {
    let Some(table) = processes.table(program.namespace) else { return Vec::new() };
    let is_own = |inode: u64| program.sockets.values().any(|own| *own == inode) && !processes.is_shared(inode);
    let (own, others): (Vec<&TcpSocket>, Vec<_>) = table.listeners().partition(|socket| is_own(socket.inode));
    if own.is_empty() || processes.may_have_had_children(program) {
        return Vec::new();
    }
    let is_served = |address: SocketAddr| {
        let is_at = |listener: &&TcpSocket| listens_at(listener.local, address);
        own.iter().any(is_at) && !others.iter().any(is_at)
    };
    let (running_time, now_ns) = (program.running_time(), now_ns());
    let closed = |socket: &TcpSocket| {
        let State::TimeWait(age) = socket.state else { return None };
        // The client is the end that waits, if it has closed the connection first.
        let (local, peer) = match (is_served(socket.local), is_served(socket.peer)) {
            (true, _) => (socket.local, socket.peer),
            (false, true) => (socket.peer, socket.local),
            (false, false) => return None,
        };
        let closed_at_ns = now_ns.saturating_sub(age.as_nanos() as u64);
        (age < running_time).then_some(ClosedByKernel { local, peer, closed_at_ns })
    };
    table.sockets().filter_map(closed).collect()
}

/// Returns whether a socket that listens at `listener` may accept connections to `address`.
fn listens_at(listener: SocketAddr, address: SocketAddr) -> bool {
    let is_any = listener.ip().is_unspecified() && (listener.is_ipv6() || address.is_ipv4());
    listener.port() == address.port() && (listener.ip() == address.ip() || is_any)
}

/// Closed connections that are shown together: those of a program between the same two, by the same path.
struct Group {
    program: String,
    pid: String,
    path: &'static str,
    role: Role,
    /// The server's address, and that of the client without its port, as far as they are known.
    ends: (Option<SocketAddr>, Option<IpAddr>),
    count: usize,
    /// The client's address, if the group has one connection.
    client: Option<SocketAddr>,
    /// Sent, received, and by TCP before and between the uses of a lane; `None` if unknown.
    bytes: Option<[u64; 3]>,
    closed_at_ns: u64,
}

impl Group {
    fn of_record(process: &Process, closed: &ClosedConnection) -> Self {
        let connection = &closed.connection;
        let (server, client) = match connection.role {
            Role::Accept => (connection.local, connection.peer),
            Role::Connect => (connection.peer, connection.local),
        };
        let bytes = bytes(connection);
        let path = match connection.path {
            DataPath::Lane if bytes[..2] == [0, 0] => "lane (on TCP)",
            path => path.name(),
        };
        Self {
            program: process.program.clone(),
            pid: process.pid.to_string(),
            path,
            role: connection.role,
            ends: (server, client.map(|client| client.ip())),
            count: 1,
            client,
            bytes: Some(bytes),
            closed_at_ns: closed.closed_at_ns,
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let key = |group: &Self| (group.path, group.role, group.ends);
        self.pid == other.pid && key(self) == key(other)
    }

    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.client = None;
        self.closed_at_ns = self.closed_at_ns.max(other.closed_at_ns);
        for (sum, more) in self.bytes.iter_mut().flatten().zip(other.bytes.iter().flatten()) {
            *sum = sum.saturating_add(*more);
        }
    }

    fn row(self) -> Vec<String> {
        let unknown = || "-".to_owned();
        let client = match (self.client, self.ends.1) {
            (None, Some(ip)) => ip.to_string(),
            (client, _) => address(client),
        };
        let server = address(self.ends.0);
        let (local, peer) = if self.role == Role::Accept { (server, client) } else { (client, server) };
        let [sent, received, by_tcp] =
            self.bytes.map_or_else(|| [(); 3].map(|()| unknown()), |bytes| bytes.map(units::bytes));
        let age = age_since(self.closed_at_ns);
        let (count, path, role) = (self.count.to_string(), self.path.to_owned(), self.role.name().to_owned());
        vec![self.program, self.pid, count, path, role, local, peer, sent, received, by_tcp, age]
    }
}

/// Returns the table of connections that were closed within the last minute.
pub fn table(snapshot: &Snapshot, without_page: &WithoutPage) -> Table {
    let right = Align::Right;
    let mut table = Table::new(&[
        ("PROGRAM", Align::Left),
        ("PID", right),
        ("CLOSED", right),
        ("PATH", Align::Left),
        ("ROLE", Align::Left),
        ("LOCAL", Align::Left),
        ("PEER", Align::Left),
        ("SENT", right),
        ("RECEIVED", right),
        ("BY TCP", right),
        ("AGO", right),
    ]);
    let recorded = snapshot
        .processes
        .iter()
        .flat_map(|process| of_page(process).map(move |closed| Group::of_record(process, closed)));
    let by_kernel = without_page.idle.iter().flat_map(|program| {
        program.closed.iter().map(|closed| Group {
            program: program.program.clone(),
            pid: program.pid.to_string(),
            path: DataPath::Kernel.name(),
            role: Role::Accept,
            ends: (Some(closed.local), Some(closed.peer.ip())),
            count: 1,
            client: Some(closed.peer),
            bytes: None,
            closed_at_ns: closed.closed_at_ns,
        })
    });
    let mut groups: Vec<Group> = Vec::new();
    for one in recorded.chain(by_kernel) {
        match groups.iter_mut().find(|group| group.is_same(&one)) {
            Some(group) => group.add(&one),
            None => groups.push(one),
        }
    }
    groups.into_iter().for_each(|group| table.row(group.row()));
    table
}

/// Returns a line for each program of which not all closed connections are known.
pub fn notes(snapshot: &Snapshot) -> impl Iterator<Item = String> {
    let has_more = |process: &&Process| of_page(process).count() == CLOSED_RECORDS;
    snapshot.processes.iter().filter(has_more).map(|process| {
        let Process { program, pid, .. } = process;
        format!("{program} ({pid}): of the closed connections, only the last {CLOSED_RECORDS} are shown.")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_serves_its_address_or_all_of_its_family() {
        let at = |listener: &str, address: &str| listens_at(listener.parse().unwrap(), address.parse().unwrap());
        assert!(at("127.0.0.1:80", "127.0.0.1:80") && at("0.0.0.0:80", "127.0.0.1:80"));
        assert!(at("[::]:80", "127.0.0.1:80") && at("[::]:80", "[::1]:80"));
        assert!(!at("0.0.0.0:80", "[::1]:80") && !at("127.0.0.1:80", "127.0.0.2:80") && !at("[::]:80", "[::1]:81"));
    }
}
