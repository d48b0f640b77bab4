//! `crosslane up`: starts the monitors of a rack file's nodes on this machine, and the device server that they need.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use control::monitor::Status;
use rack::{Backend, RackChange};
use rustix::net::SocketType;
use rustix::process::Signal;

use crate::rack_choice::LoadedRack;
use crate::rack_control::{self, Process};
use crate::run_lock::{POLL_INTERVAL, lock_run_dir};
use crate::wrong_use::WrongUse;
use crate::{down, output, signals};

/// Time limit for a started process to answer: it maps a device, and the machine may be busy.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a process that has closed its socket to end.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Minimum time limit for the proxies of these nodes and the links between them, even where `up_ns` is shorter. They
/// come up at once except on a busy machine.
const LOCAL_LIMIT: Duration = Duration::from_secs(30);
/// Number of monitor deaths within `DEATHS_WITHIN` that `up --foreground` tolerates.
const DEATHS_MAX: usize = 5;
const DEATHS_WITHIN: Duration = Duration::from_secs(60);
/// Size of the path in an AF_UNIX address, terminating zero included (`sun_path`, unix(7)).
pub const SOCKET_PATH_BYTES_MAX: usize = 108;

/// Options of `crosslane up`.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
    /// The node that this machine runs [default: all nodes of backend shm, or the one whose address is this machine's]
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Replace running monitors and proxies, as after an upgrade. Connections of programs that write windows themselves
    /// (trust = "direct") survive; other connections through windows are reset
    #[arg(long)]
    restart: bool,
    /// Stay in the foreground, restart monitors that die, and stop the nodes when this command ends: for init systems
    #[arg(long)]
    foreground: bool,
}

/// Starts the nodes that are not up yet. If one fails, stops everything that this command has started.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; run up again")?;
    let rack = LoadedRack::read(&options.rack)?;
    let slots = local_slots(&rack, options.node.as_deref())?;
    slots.iter().try_for_each(|slot| check_node(&rack, *slot))?;
    rack.prepare(&rack.run_dir.directory)?;
    let lock = lock_run_dir(&rack.run_dir.lock(), rack.shown())?;
    let is_same = check_same(&rack, &slots, options.restart)?;
    if options.restart {
        slots.iter().try_for_each(|slot| end_monitor(&rack, &rack.file.rack.nodes[*slot].name))?;
    }
    let mut started = Started::default();
    let begun = Instant::now();
    if let Err(error) = started.bring_up(&rack, &slots, options.restart) {
        started.undo(&rack);
        return Err(error);
    }
    if is_same {
        rack.write_copy()?;
    }
    // Another 'up' of nodes on this machine needs the lock before the links to its nodes can come up.
    drop(lock);
    let links = match wait_for_others(&rack, &slots, begun) {
        Ok(links) => links,
        Err(error) => {
            let _lock = lock_run_dir(&rack.run_dir.lock(), rack.shown())?;
            started.undo(&rack);
            return Err(error);
        }
    };
    for obstacle in direct_obstacles(&rack, &slots) {
        eprintln!("crosslane: {obstacle}");
    }
    output::print(&describe(&rack, &slots, &links))?;
    if options.foreground { stay(&rack, &slots, &mut started, signals.as_fd()) } else { Ok(()) }
}

/// Returns the slots of the nodes that this machine runs: the given one, all of backend shm, or the one whose address
/// this machine has.
fn local_slots(rack: &LoadedRack, given: Option<&str>) -> Result<Vec<usize>> {
    if let Some(name) = given {
        return rack.slot(name).map(|slot| vec![slot]);
    }
    let description = &rack.file.rack;
    let nodes = || description.nodes.iter().enumerate();
    let emulated: Vec<usize> =
        nodes().filter(|(_, node)| description.backend_of(node) == Backend::Shm).map(|(slot, _)| slot).collect();
    if !emulated.is_empty() {
        return Ok(emulated);
    }
    // bind(2) succeeds only for addresses of this machine.
    let own: Vec<usize> =
        nodes().filter(|(_, node)| TcpListener::bind((node.address, 0)).is_ok()).map(|(slot, _)| slot).collect();
    if own.len() == 1 {
        return Ok(own);
    }
    let what = if own.is_empty() { "no node has an address of" } else { "several nodes could run on" };
    bail!(WrongUse::of(format!("{}: {what} this machine; choose one with --node", rack.shown())))
}

/// Checks that the running nodes of a file use the same description: nodes started now could not work with others.
/// Returns `false` if the running nodes use other rules and time-outs, with which they can continue.
fn check_same(rack: &LoadedRack, slots: &[usize], restart: bool) -> Result<bool> {
    let Some(running) = rack.running() else { return Ok(true) };
    running.file.rack.nodes.iter().try_for_each(|node| running.check_clock(&node.name))?;
    let (before, now) = (&running.file.rack, &rack.file.rack);
    let changes: Vec<RackChange> = slots.iter().map(|slot| before.change_to(now, *slot)).collect();
    let mut restart_needed: BTreeSet<String> =
        changes.iter().flat_map(|change| change.restart_needed.clone()).collect();
    let mut applied: BTreeSet<String> = changes.into_iter().flat_map(|change| change.applied).collect();
    if !restart && before.digest() != now.digest() {
        // Running monitors do not know nodes that have joined since.
        restart_needed.append(&mut applied);
    }
    let (shown, list) = (rack.shown(), |keys: BTreeSet<String>| keys.into_iter().collect::<Vec<_>>().join(", "));
    if !restart_needed.is_empty() {
        let keys = list(restart_needed);
        let remedy = format!("'crosslane down --rack {shown}', then up");
        bail!(WrongUse::of(format!("{shown} has changed since its nodes were brought up ({keys}); {remedy}")));
    }
    let is_same = restart || applied.is_empty();
    if !is_same {
        let (keys, remedy) = (list(applied), format!("'crosslane up --restart --rack {shown}'"));
        eprintln!("crosslane: {shown}: {keys} changed; running nodes use the old values until {remedy}");
    }
    Ok(is_same)
}

/// Checks everything about a node that can be checked before anything is started.
fn check_node(rack: &LoadedRack, slot: usize) -> Result<()> {
    let (file, node) = (&rack.file, &rack.file.rack.nodes[slot]);
    let key = format!("nodes[{slot}].device");
    monitor::check_device(&file.rack, slot).map_err(|what| WrongUse::of(file.error_at(&key, what)))?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for (index, some) in file.rack.partitions.iter().enumerate() {
        if let Some(core) = some.cores.iter().flatten().find(|core| usize::from(**core) >= cores) {
            let last = cores - 1;
            let what = format!("{core} is not a core of this machine, which has 0 to {last}; choose among these");
            bail!(WrongUse::of(file.error_at(&format!("partitions[{index}].cores"), what)));
        }
    }
    check_failover(rack, slot)?;
    let socket = rack.run_dir.node(&node.name).monitor_socket();
    if socket.as_os_str().len() >= SOCKET_PATH_BYTES_MAX {
        let shown = socket.display();
        bail!("'{shown}' is too long for a socket; set XDG_RUNTIME_DIR or CROSSLANE_RACK to a shorter directory");
    }
    rack.prepare(&rack.run_dir.node(&node.name).directory)
}

/// Checks that the node's proxy can listen at the address to which the other proxies connect when a link is lost.
fn check_failover(rack: &LoadedRack, slot: usize) -> Result<()> {
    let (file, node) = (&rack.file, &rack.file.rack.nodes[slot]);
    if !file.rack.failover {
        return Ok(());
    }
    if let Err(error) = TcpListener::bind((node.address, 0)) {
        let address = node.address;
        let what = format!(
            "cannot listen at '{address}' ({error}), which failover = true needs; give the machine this address, as in \
             'ip address add {address} dev lo', or set failover = false"
        );
        bail!(WrongUse::of(file.error_at(&format!("nodes[{slot}].address"), what)));
    }
    let node_dir = rack.run_dir.node(&node.name);
    // A running proxy of this node has bound the ports.
    let runs = || [node_dir.monitor_socket(), node_dir.successor_socket()].iter().any(|path| path.exists());
    let is_taken = |port: &u16| TcpListener::bind((node.address, *port)).is_err();
    if let Some(port) = file.rack.failover_ports().into_iter().flatten().find(is_taken).filter(|_| !runs()) {
        let what = format!("{port} is in use at '{}'; choose another, or leave the key out for any", node.address);
        bail!(WrongUse::of(file.error_at("failover_port", what)));
    }
    Ok(())
}

/// Kills a monitor. Its proxy survives, as after a crash, and the next monitor takes it over.
fn end_monitor(rack: &LoadedRack, node: &str) -> Result<()> {
    let node_dir = rack.run_dir.node(node);
    let Some(monitor) = Process::holding_lock(&node_dir.monitor_pid()) else { return Ok(()) };
    monitor.signal(Signal::KILL);
    if !monitor.has_ended(START_LIMIT) {
        bail!("the monitor of node '{node}' does not exit; see {}", node_dir.monitor_log().display());
    }
    Ok(())
}

/// Processes that this command has started and stops if it fails.
#[derive(Default)]
struct Started {
    server: Option<Child>,
    monitors: Vec<(String, Child)>,
}

impl Started {
    /// Starts what is not running, and waits until the proxies of the nodes run and the links between them are up.
    fn bring_up(&mut self, rack: &LoadedRack, slots: &[usize], replaces_proxies: bool) -> Result<()> {
        let nodes = &rack.file.rack.nodes;
        if slots.iter().any(|slot| rack.file.rack.backend_of(&nodes[*slot]) == Backend::Shm) {
            self.start_server(rack)?;
        }
        for slot in slots {
            let name = &nodes[*slot].name;
            if rack_control::status(&rack.run_dir.node(name))?.is_none() {
                let child = start_monitor(rack, name, replaces_proxies)?;
                self.monitors.push((name.clone(), child));
            }
        }
        for (name, child) in &mut self.monitors {
            wait_for_monitor(rack, name, child)?;
        }
        wait_for_local(rack, slots)
    }

    /// Starts monitors that have died again.
    fn bring_up_again(&mut self, rack: &LoadedRack, slots: &[usize]) -> Result<()> {
        self.monitors.retain_mut(|(_, child)| !matches!(child.try_wait(), Ok(Some(_))));
        self.bring_up(rack, slots, false)
    }

    fn start_server(&mut self, rack: &LoadedRack) -> Result<()> {
        let socket = rack.run_dir.device_socket();
        if Process::listening_at(&socket, SocketType::STREAM).is_some() {
            return Ok(());
        }
        // A new server would serve new memory, which the nodes that are up have not mapped.
        for node in &rack.file.rack.nodes {
            if rack_control::status(&rack.run_dir.node(&node.name))?.is_some() {
                let file = rack.shown();
                bail!("the device server of {file} has ended; 'crosslane down --rack {file}', then up again");
            }
        }
        let fault = |what: String| WrongUse::of(rack.file.error_at("device.window_bytes", what));
        let bytes = monitor::server_bytes(&rack.file.rack, ::device_server::available_bytes()).map_err(fault)?;
        let log = rack.run_dir.device_log();
        let mut command = background(&log)?;
        command.arg("device-server").arg("--socket").arg(&socket).arg("--size").arg(bytes.to_string());
        command.arg("--vectors").arg(monitor::vectors(&rack.file.rack).to_string());
        let child = self.server.insert(command.spawn().context("starting the device server")?);
        let answers = || Ok(Process::listening_at(&socket, SocketType::STREAM).is_some());
        wait_for_answer(child, "the device server", &log, answers)
    }

    /// Stops what was started. Errors are dropped: they would hide the error that made this necessary.
    fn undo(mut self, rack: &LoadedRack) {
        for (name, child) in &mut self.monitors {
            // A monitor that does not listen yet cannot receive a stop request.
            down::stop_child(child);
            let _ = down::stop_node(&rack.run_dir.node(name));
        }
        if let Some(child) = &mut self.server {
            down::stop_server(&rack.run_dir.device_socket());
            let _ = child.wait();
        }
    }
}

/// Returns this command set up as a background process: it outlives its starter and truncates `log`.
pub fn background(log: &Path) -> Result<Command> {
    let own = std::env::current_exe().context("finding the path of this command")?;
    let log_file = File::create(log).with_context(|| format!("log '{}'", log.display()))?;
    let mut command = Command::new(own);
    // A separate process group, so that an interrupt from the keyboard does not reach it.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file).process_group(0).current_dir("/");
    Ok(command)
}

fn start_monitor(rack: &LoadedRack, name: &str, replaces_proxy: bool) -> Result<Child> {
    let file = rack.argument()?;
    let mut command = background(&rack.run_dir.node(name).monitor_log())?;
    command.arg("monitor").arg("--rack").arg(file).arg("--node").arg(name);
    command.args(replaces_proxy.then_some("--replace-proxy"));
    command.spawn().with_context(|| format!("starting the monitor of node '{name}'"))
}

/// Waits until a started process answers, as `answers` returns.
pub fn wait_for_answer(
    child: &mut Child,
    what: &str,
    log: &Path,
    mut answers: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + START_LIMIT;
    while !answers().map_err(|error| end_or(child, what, log, error))? {
        check_alive(child, what, log)?;
        if Instant::now() >= deadline {
            bail!("{what} does not answer; see {}", log.display());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Returns why a child has ended, or else the error of a request to it. It closes its socket a moment before its end,
/// and what it has written to its log says more.
fn end_or(child: &mut Child, what: &str, log: &Path, error: anyhow::Error) -> anyhow::Error {
    let deadline = Instant::now() + END_LIMIT;
    while Instant::now() < deadline {
        if let Err(end) = check_alive(child, what, log) {
            return end;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    error
}

/// Checks that a child runs. If it has ended, returns the last line of its log as the error.
fn check_alive(child: &mut Child, what: &str, log: &Path) -> Result<()> {
    let Some(status) = child.try_wait().with_context(|| format!("waiting for {what}"))? else { return Ok(()) };
    let last = last_line(log);
    let error = format!("{what} ended ({status}): {last}");
    Err(if status.code() == Some(2) { WrongUse::of(last).into() } else { anyhow!(error) })
}

/// Returns the last line of a log that is not blank.
pub fn last_line(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("its log is empty");
    last.strip_prefix("crosslane: ").unwrap_or(last).to_owned()
}

fn wait_for_monitor(rack: &LoadedRack, name: &str, child: &mut Child) -> Result<()> {
    let node_dir = rack.run_dir.node(name);
    let answers = || Ok(rack_control::status(&node_dir)?.is_some());
    wait_for_answer(child, &format!("the monitor of node '{name}'"), &node_dir.monitor_log(), answers)
}

/// Waits until the proxies of these nodes run and the links between them are up.
fn wait_for_local(rack: &LoadedRack, slots: &[usize]) -> Result<()> {
    let deadline = Instant::now() + up_limit(rack).max(LOCAL_LIMIT);
    loop {
        let missing = missing(rack, slots)?.local;
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("rack {} did not come up: {}", rack.shown(), missing.join("; "));
        }
        std::thread::sleep(4 * POLL_INTERVAL);
    }
}

/// Waits for the links to other nodes, at most `up_ns` after `begun`. Returns the links that are not up then, with the
/// reasons.
fn wait_for_others(rack: &LoadedRack, slots: &[usize], begun: Instant) -> Result<Vec<String>> {
    loop {
        let missing = missing(rack, slots)?.remote;
        if missing.is_empty() || begun.elapsed() >= up_limit(rack) {
            return Ok(missing);
        }
        std::thread::sleep(4 * POLL_INTERVAL);
    }
}

fn up_limit(rack: &LoadedRack) -> Duration {
    Duration::from_nanos(rack.file.rack.timeouts.up_ns as u64)
}

/// What is not up yet, with the reasons.
#[derive(Default)]
struct Missing {
    /// Proxies of these nodes, and links between them.
    local: Vec<String>,
    /// Links to other nodes.
    remote: Vec<String>,
}

fn missing(rack: &LoadedRack, slots: &[usize]) -> Result<Missing> {
    let mut missing = Missing::default();
    for slot in slots {
        let name = &rack.file.rack.nodes[*slot].name;
        let Some(status) = rack_control::status(&rack.run_dir.node(name))? else {
            bail!("the monitor of node '{name}' has ended; see {}", rack.run_dir.node(name).monitor_log().display())
        };
        missing.add(rack, slots, &status);
    }
    Ok(missing)
}

impl Missing {
    fn add(&mut self, rack: &LoadedRack, slots: &[usize], status: &Status) {
        let node = &status.node;
        if !status.proxy.is_some_and(|proxy| proxy.is_ready) {
            let log = rack.run_dir.node(node).proxy_log();
            let (last, log) = (last_line(&log), log.display());
            self.local.push(format!("the proxy of node '{node}' does not run ({last}); see {log}"));
        }
        for link in status.links.iter().filter(|link| link.state != "up") {
            let reason = link.reason.as_deref().unwrap_or("its monitor has not connected yet");
            let text = format!("link from '{node}' to '{}' is {}: {reason}", link.peer, link.state);
            let is_local = slots.iter().any(|slot| rack.file.rack.nodes[*slot].name == link.peer);
            if is_local { self.local.push(text) } else { self.remote.push(text) }
        }
    }
}

/// Returns a warning for each node with trust = "direct" whose programs use the proxy all the same.
fn direct_obstacles(rack: &LoadedRack, slots: &[usize]) -> Vec<String> {
    let names = slots.iter().map(|slot| rack.file.rack.nodes[*slot].name.as_str());
    let obstacle = |name: &str| {
        let status = rack_control::status(&rack.run_dir.node(name)).ok().flatten()?;
        let obstacle = status.direct?.obstacle?;
        Some(format!("node '{name}': trust = \"direct\" has no effect, programs use the proxies: {obstacle}"))
    };
    names.filter_map(obstacle).collect()
}

fn describe(rack: &LoadedRack, slots: &[usize], links: &[String]) -> String {
    let names: Vec<&str> = slots.iter().map(|slot| rack.file.rack.nodes[*slot].name.as_str()).collect();
    let mut text = format!("{} is up: nodes {}\n", rack.shown(), names.join(", "));
    links.iter().for_each(|link| text += &format!("not yet: {link}\n"));
    text
}

/// Runs until a signal arrives or a monitor is stopped. A monitor that dies is restarted and takes over its proxy.
fn stay(rack: &LoadedRack, slots: &[usize], started: &mut Started, signals: std::os::fd::BorrowedFd<'_>) -> Result<()> {
    let names: Vec<&str> = slots.iter().map(|slot| rack.file.rack.nodes[*slot].name.as_str()).collect();
    let socket = |name: &str| rack.run_dir.node(name).monitor_socket();
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let monitors: Vec<(&str, Process)> = names
            .iter()
            .filter_map(|name| Some((*name, Process::listening_at(&socket(name), SocketType::SEQPACKET)?)))
            .collect();
        let Some(index) = rack_control::first_of(signals, monitors.iter().map(|(_, process)| process)) else {
            return down::bring_down(rack);
        };
        let name = monitors[index].0;
        deaths.retain(|death| death.elapsed() < DEATHS_WITHIN);
        deaths.push(Instant::now());
        // A concurrent 'down' holds the lock. A monitor that ends in order removes its socket.
        let lock = lock_run_dir(&rack.run_dir.lock(), rack.shown())?;
        let again = if socket(name).exists() && deaths.len() <= DEATHS_MAX {
            eprintln!("crosslane: the monitor of node '{name}' has died; restarting it");
            started.bring_up_again(rack, slots)
        } else {
            Err(anyhow!("the monitor of node '{name}' has ended by itself; the rack is down"))
        };
        drop(lock);
        if let Err(error) = again {
            down::bring_down(rack)?;
            return Err(error);
        }
    }
}
