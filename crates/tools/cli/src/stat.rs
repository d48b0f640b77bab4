//! `crosslane stat`: prints the statistics pages of the processes of a rack.

mod all;
mod closed;
mod proxies;
mod report;
pub mod without_page;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use stats::{Align, Table};
use stats_page::reader::{self, Connection, Process, Snapshot, Totals};
use stats_page::{DataPath, FallbackReason};

use crate::processes::Processes;
use crate::rack_choice::RackChoice;
use crate::rack_dir::shared::{self, SharedView};
use crate::{lanes, output, rack_dir};
use proxies::Proxies;
use report::Report;
pub use report::SCHEMA;
use without_page::WithoutPage;

/// Options of `crosslane stat`.
#[derive(clap::Args)]
pub struct Options {
    /// Print JSON (schema crosslane-stat/1)
    #[arg(long)]
    pub json: bool,
    /// The rack: a rack file, its address in etcd, or a directory [default: as for run]
    #[arg(long, value_name = "FILE|ETCD|DIR")]
    pub rack: Option<PathBuf>,
    /// Show all rack directories that this user may read, with users and control groups; for root, those of all users
    #[arg(long, conflicts_with = "rack")]
    pub all: bool,
}

/// Prints one snapshot.
pub fn main(options: &Options) -> Result<()> {
    if options.all {
        let processes = Processes::scan()?;
        let racks = all::racks(&processes);
        return match options.json {
            true => output::print_json(&Report::of_all(&racks)),
            false => output::print(&all::describe(&racks)),
        };
    }
    let rack = RackChoice::new(options.rack.as_deref())?;
    let snapshot = read(&rack.directories())?;
    let proxies = Proxies::of(&rack);
    let without_page = without_page::find(&rack.directories(), !snapshot.processes.is_empty())?;
    if options.json {
        return output::print_json(&Report::new(&snapshot, &proxies, without_page, &rack));
    }
    let is_unused = snapshot.processes.is_empty() && without_page.is_empty();
    let none = if is_unused { nothing_running(&rack) } else { String::new() };
    let mut paragraphs = vec![none, describe(&snapshot, &rack, &without_page), without_page.describe()];
    paragraphs.retain(|paragraph| !paragraph.is_empty());
    output::print(&(paragraphs.join("\n") + &proxies.describe() + &switched_off(&rack)))
}

/// Returns a line for each directory in which lanes are switched off.
fn switched_off(rack: &RackChoice) -> String {
    let off = rack.directories().into_iter().filter(|directory| lanes::are_off(directory));
    off.map(|directory| {
        let shown = directory.display();
        let remedy = format!("crosslane lanes on --rack {rack}");
        format!("\nLanes are switched off in {shown}: connections use kernel TCP. Switch them on with: {remedy}\n")
    })
    .collect()
}

/// Reads the statistics pages in all directories in which programs of a rack meet.
pub fn read(directories: &[PathBuf]) -> Result<Snapshot> {
    let mut all = Snapshot::default();
    for directory in directories {
        let shown = directory.display();
        let unreadable = || format!("rack '{shown}' cannot be read; check --rack");
        let is_shared = rack_dir::shared(directory)?.is_some();
        let one = if is_shared { read_shared(directory) } else { reader::read_rack(directory) };
        // Programs that refuse the directory leave no page in it.
        if one.as_ref().map_or(is_shared, |one| one.processes.is_empty()) {
            rack_dir::check_usable(directory)?;
        }
        add(&mut all, one.with_context(unreadable)?);
    }
    all.processes.sort_by_key(|process| process.pid);
    Ok(all)
}

fn add(all: &mut Snapshot, one: Snapshot) {
    all.processes.extend(one.processes);
    all.unreadable.extend(one.unreadable);
    all.stale_removed += one.stale_removed;
}

/// Reads the pages of the caller's programs in a shared rack; for root, those of all users.
fn read_shared(rack: &Path) -> std::io::Result<Snapshot> {
    let Ok(Some(shared)) = SharedView::of(rack) else { return Ok(Snapshot::default()) };
    let user = rustix::process::geteuid();
    let own = shared::on_machine(user.as_raw());
    let mut all = reader::read_rack(&shared.user_directory(own))?;
    let others = if user.is_root() { shared.users() } else { Vec::new() };
    for uid in others.into_iter().filter(|uid| *uid != own) {
        let directory = shared.user_directory(uid);
        if all::is_page_folder(&directory) {
            add(&mut all, reader::read_foreign_rack(&directory)?);
        }
    }
    Ok(all)
}

/// Returns the text that is shown when no process uses the rack.
pub fn nothing_running(rack: &RackChoice) -> String {
    let start = "Start a program with: crosslane run";
    let option = match rack {
        RackChoice::Directory(_) => String::new(),
        RackChoice::File(_) => format!("--rack {rack} "),
    };
    let others = "All rack directories: crosslane stat --all";
    format!("Nothing runs over crosslane in {rack}.\n{start} {option}--node a -- PROGRAM ARGS...\n{others}\n")
}

/// Returns the snapshot as tables.
fn describe(snapshot: &Snapshot, rack: &RackChoice, without_page: &WithoutPage) -> String {
    let of_processes = processes(snapshot, rack);
    let tables = [of_processes, connections(snapshot), closed::table(snapshot, without_page), fallbacks(snapshot)];
    let tables = tables.into_iter().filter(|table| !table.is_empty()).map(|table| table.render());
    let mut text = tables.collect::<Vec<_>>().join("\n");
    for note in notes(snapshot) {
        text.push_str(&format!("\n{note}\n"));
    }
    text
}

fn processes(snapshot: &Snapshot, rack: &RackChoice) -> Table {
    let right = Align::Right;
    let mut table = Table::new(&[
        ("PROGRAM", Align::Left),
        ("PID", right),
        ("NODE", Align::Left),
        ("LANES", right),
        ("SENT", right),
        ("RECEIVED", right),
        ("MEMORY", right),
        ("OF", right),
        ("WINDOWS", right),
        ("BYTES", right),
        ("KERNEL", right),
        ("KERNEL SENT", right),
        ("KERNEL RECEIVED", right),
        ("UP", right),
    ]);
    for process in &snapshot.processes {
        table.row(vec![
            process.program.clone(),
            process.pid.to_string(),
            node(process, rack),
            open_of_total(&process.lane),
            units::bytes(process.lane.bytes_sent),
            units::bytes(process.lane.bytes_received),
            units::bytes(process.lane_memory_bytes),
            units::bytes(process.lane_memory_bytes_max),
            open_of_total(&process.window),
            units::bytes(process.window.bytes_sent.saturating_add(process.window.bytes_received)),
            open_of_total(&process.kernel),
            units::bytes(process.kernel.bytes_sent),
            units::bytes(process.kernel.bytes_received),
            age_since(process.started_at_ns),
        ]);
    }
    table
}

/// Returns the number of open connections and, if some have closed, of all connections, which the byte counts cover.
/// Inherited connections are counted only as open.
pub fn open_of_total(totals: &Totals) -> String {
    let (open, total) = (totals.connections_open, totals.connections_total);
    if open >= total { open.to_string() } else { format!("{open} of {total}") }
}

/// Returns the name of the node of a process.
pub fn node(process: &Process, rack: &RackChoice) -> String {
    process.node.map_or_else(|| "-".to_owned(), |address| rack.node_name(address))
}

/// Returns whether to show a connection. One that a forked child inherited and never used is shown for its parent only.
pub fn is_shown(connection: &Connection) -> bool {
    !connection.inherited || connection.bytes_sent > 0 || connection.bytes_received > 0
}

/// Returns the path of a connection: a lane may rest in one direction or in both, which then use kernel TCP.
pub fn path(connection: &Connection) -> &'static str {
    match (connection.path, connection.sends_on_tcp, connection.receives_on_tcp) {
        (DataPath::Lane, true, true) => "lane (on TCP)",
        (DataPath::Lane, true, false) => "lane (sends on TCP)",
        (DataPath::Lane, false, true) => "lane (receives on TCP)",
        (path, ..) => path.name(),
    }
}

fn connections(snapshot: &Snapshot) -> Table {
    let mut table = Table::new(&[
        ("PID", Align::Right),
        ("FD", Align::Right),
        ("PATH", Align::Left),
        ("ROLE", Align::Left),
        ("LOCAL", Align::Left),
        ("PEER", Align::Left),
        ("SENT", Align::Right),
        ("RECEIVED", Align::Right),
        ("BY TCP", Align::Right),
        ("SLEEPS", Align::Right),
        ("UP", Align::Right),
    ]);
    for process in &snapshot.processes {
        for connection in process.connections.iter().filter(|connection| is_shown(connection)) {
            table.row(vec![
                process.pid.to_string(),
                connection.fd.to_string(),
                path(connection).to_owned(),
                connection.role.name().to_owned(),
                address(connection.local),
                address(connection.peer),
                units::bytes(connection.bytes_sent),
                units::bytes(connection.bytes_received),
                units::bytes(connection.tcp_bytes_sent.saturating_add(connection.tcp_bytes_received)),
                connection.sleeps.to_string(),
                age_since(connection.opened_at_ns),
            ]);
        }
    }
    table
}

fn fallbacks(snapshot: &Snapshot) -> Table {
    let mut table = Table::new(&[
        ("PROGRAM", Align::Left),
        ("PID", Align::Right),
        ("FALLBACKS", Align::Right),
        ("REASON", Align::Left),
        ("EXPLANATION", Align::Left),
    ]);
    for process in &snapshot.processes {
        for reason in FallbackReason::ALL {
            if let Some(count) = process.fallbacks.get(reason.name()) {
                table.row(vec![
                    process.program.clone(),
                    process.pid.to_string(),
                    count.to_string(),
                    reason.name().to_owned(),
                    reason.explanation().to_owned(),
                ]);
            }
        }
    }
    table
}

fn notes(snapshot: &Snapshot) -> Vec<String> {
    let unlisted = snapshot.processes.iter().filter(|process| process.connections_unlisted > 0).map(|process| {
        format!(
            "{} ({}): {} connections are not listed; their bytes are in the totals.",
            process.program, process.pid, process.connections_unlisted
        )
    });
    let unreadable = snapshot.unreadable.iter().map(|page| format!("Page {} omitted: {}.", page.name, page.error));
    unlisted.chain(closed::notes(snapshot)).chain(unreadable).collect()
}

/// Returns an address as text, or "-" for none.
pub fn address(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "-".to_owned(), |address| address.to_string())
}

/// Returns the time since `at_ns`, in nanoseconds since the epoch, as text.
pub fn age_since(at_ns: u64) -> String {
    units::age(now_ns().saturating_sub(at_ns) / 1_000_000_000)
}

/// Returns the time in nanoseconds since 1970.
fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use stats_page::Role;

    use super::*;

    fn directory(rack: &tempfile::TempDir) -> [PathBuf; 1] {
        [rack.path().to_owned()]
    }

    fn rack_with_traffic() -> (tempfile::TempDir, &'static stats_page::StatsPage, Vec<stats_page::ConnectionSlot>) {
        let rack = tempfile::tempdir().unwrap();
        let config = stats_page::PageConfig {
            rack: rack.path(),
            node: stats_page::node_address("a").map(Into::into),
            program: b"redis-server",
        };
        let page = stats_page::StatsPage::create(&config);
        let peer: SocketAddr = "127.77.0.2:41234".parse().unwrap();
        let local: SocketAddr = "127.77.0.1:6379".parse().unwrap();
        let open = |path, fd| {
            let reason = (path == DataPath::Kernel).then_some(FallbackReason::NoAnswer);
            let (role, local, peer) = (Role::Accept, Some(local), Some(peer));
            page.open_connection(&stats_page::NewConnection { path, role, fd, local, peer, reason })
        };
        let slots = vec![open(DataPath::Lane, 8), open(DataPath::Kernel, 9)];
        slots[0].add_sent(2048);
        slots[0].add_received(10);
        slots[1].add_received(3);
        page.count_fallback(FallbackReason::NoAnswer);
        page.note_lane_memory(65_536, 3 << 30);
        (rack, page, slots)
    }

    #[test]
    fn json_has_the_published_shape() {
        let (rack, page, _slots) = rack_with_traffic();
        assert!(page.is_published());
        let (snapshot, chosen) = (read(&directory(&rack)).unwrap(), RackChoice::Directory(rack.path().to_owned()));
        let json =
            serde_json::to_value(Report::new(&snapshot, &Proxies::default(), WithoutPage::default(), &chosen)).unwrap();
        assert_eq!(json["schema"], "crosslane-stat/1");
        let process = &json["processes"][0];
        assert_eq!((&process["program"], &process["node"]), (&"redis-server".into(), &"a".into()));
        assert_eq!(process["pid"], std::process::id());
        let connection = &process["connections"][0];
        for (key, value) in [
            ("fd", serde_json::json!(8)),
            ("role", "accept".into()),
            ("path", "lane".into()),
            ("local", "127.77.0.1:6379".into()),
            ("peer", "127.77.0.2:41234".into()),
            ("bytes_sent", 2048.into()),
            ("bytes_received", 10.into()),
            ("sleeps", 0.into()),
        ] {
            assert_eq!(connection[key], value, "{key}");
        }
        for (key, value) in [
            ("lane_bytes_sent", 2048),
            ("lane_bytes_received", 10),
            ("kernel_bytes_sent", 0),
            ("kernel_bytes_received", 3),
            ("lane_connections_total", 1),
            ("kernel_connections_total", 1),
        ] {
            assert_eq!(process["totals"][key], value, "{key}");
        }
        assert_eq!(process["lane_memory_bytes"], 65_536);
        assert_eq!(process["lane_memory_bytes_max"], 3_u64 << 30);
        assert_eq!(process["fallbacks"], serde_json::json!({"no_answer": 1}));
    }

    #[test]
    fn json_of_closed_connections_keeps_to_the_schema() {
        let (rack, page, slots) = rack_with_traffic();
        assert!(page.is_published());
        drop(slots);
        let (snapshot, chosen) = (read(&directory(&rack)).unwrap(), RackChoice::Directory(rack.path().to_owned()));
        let (local, peer) = (SocketAddr::from(([127, 0, 0, 1], 80)), SocketAddr::from(([127, 0, 0, 1], 40_000)));
        let closed = vec![closed::ClosedByKernel { local, peer, closed_at_ns: 1 }];
        let idle = without_page::ProgramWithoutPage { pid: 1, program: "idle".to_owned(), rack: None, closed };
        let without_page = WithoutPage { unpublished: Vec::new(), idle: vec![idle] };
        let json = serde_json::to_value(Report::new(&snapshot, &Proxies::default(), without_page, &chosen)).unwrap();
        let schema: serde_json::Value =
            serde_json::from_str(include_str!("../../../../docs/stat.schema.json")).unwrap();
        if let Err(error) = jsonschema::validator_for(&schema).unwrap().validate(&json) {
            panic!("{error} at {} in {json}", error.instance_path);
        }
        let process = &json["processes"][0];
        let paths: Vec<_> = process["closed"].as_array().unwrap().iter().map(|it| &it["connection"]["path"]).collect();
        assert_eq!(paths, ["kernel", "lane"], "the last one first");
        assert_eq!(process["connections"], serde_json::json!([]));
        assert_eq!(json["idle"][0]["closed"][0]["peer"], "127.0.0.1:40000");
    }

    #[test]
    fn a_snapshot_is_printed_as_tables() {
        let (rack, page, slots) = rack_with_traffic();
        let described = || {
            let chosen = RackChoice::Directory(rack.path().to_owned());
            describe(&read(&directory(&rack)).unwrap(), &chosen, &WithoutPage::default())
        };
        let text = described();
        for word in [
            "redis-server",
            "2.0 KiB",
            "64.0 KiB",
            "3.0 GiB",
            "127.77.0.2:41234",
            "lane",
            "kernel",
            "no_answer",
            "FALLBACKS",
        ] {
            assert!(text.contains(word), "{word} in\n{text}");
        }
        assert!(!text.contains("CLOSED"), "{text}");
        drop(slots);
        let text = described();
        let row = |path: &str| {
            let row = text.lines().find(|line| line.contains("127.77.0.1:6379") && line.contains(path));
            row.unwrap_or_else(|| panic!("{path} in\n{text}")).split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let pid = std::process::id();
        let lane = format!("redis-server {pid} 1 lane accept 127.77.0.1:6379 127.77.0.2:41234 2.0 KiB 10 B 0 B 0s");
        assert_eq!(row(" lane "), lane);
        assert!(row(" kernel ").starts_with(&format!("redis-server {pid} 1 kernel accept")), "{text}");
        // Connections between the same two are together.
        for port in [1, 2] {
            let peer = Some(SocketAddr::from(([127, 77, 0, 2], port)));
            let local = "127.77.0.1:6379".parse().ok();
            let (path, role) = (DataPath::Lane, Role::Accept);
            let one = stats_page::NewConnection { path, role, fd: 8, local, peer, reason: None };
            page.open_connection(&one).add_sent(1024);
        }
        let text = described();
        let lane = text.lines().find(|line| line.contains(" lane ")).unwrap_or_default();
        let lane = lane.split_whitespace().collect::<Vec<_>>().join(" ");
        let expected = format!("redis-server {pid} 3 lane accept 127.77.0.1:6379 127.77.0.2 4.0 KiB 10 B 0 B 0s");
        assert_eq!(lane, expected, "{text}");
    }

    fn private_folder() -> tempfile::TempDir {
        let owner_only = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        tempfile::Builder::new().permissions(owner_only).tempdir().unwrap()
    }

    #[test]
    fn an_empty_rack_shows_how_to_start_a_program() {
        let rack = private_folder();
        assert!(read(&directory(&rack)).unwrap().processes.is_empty());
        let text = nothing_running(&RackChoice::Directory(rack.path().to_owned()));
        assert!(text.starts_with("Nothing runs over crosslane"), "{text}");
        assert!(text.contains("crosslane run"), "{text}");
    }

    #[test]
    fn a_rack_that_programs_refuse_is_not_reported_as_empty() {
        use std::os::unix::fs::PermissionsExt;
        let rack = private_folder();
        std::fs::set_permissions(rack.path(), PermissionsExt::from_mode(0o750)).unwrap();
        let error = read(&[rack.path().to_owned()]).unwrap_err().to_string();
        assert!(error.contains("is open to other users; give another with --rack"), "{error}");
    }

    #[test]
    fn closed_connections_are_counted_alongside_open_ones() {
        let totals =
            |connections_open, connections_total| Totals { connections_open, connections_total, ..Totals::default() };
        assert_eq!(open_of_total(&totals(0, 3)), "0 of 3");
        assert_eq!(open_of_total(&totals(2, 2)), "2");
        assert_eq!(open_of_total(&totals(1, 0)), "1", "inherited");
    }
}
