//! `crosslane up`: the monitors of a rack file's nodes on this machine, and what they need.

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
use crate::{device_server, down, output};

/// How long a process may take until it answers: it maps a device, and the machine may be busy.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the proxies and links of these nodes may take, however short the wait for other nodes is: they are there in
/// a moment, but on a machine that is busy.
const OWN_LIMIT: Duration = Duration::from_secs(30);
/// Deaths of monitors after which `up --foreground` gives up, and within which time.
const DEATHS_MAX: usize = 5;
const DEATHS_WITHIN: Duration = Duration::from_secs(60);
/// Bytes of a path in an AF_UNIX address, its end included.
pub const SOCKET_PATH_BYTES_MAX: usize = 108;

/// What to bring up, and how.
#[derive(clap::Args)]
pub struct Options {
    /// The rack file, or its address in etcd: etcd://HOST:PORT/PREFIX
    #[arg(long, value_name = "FILE|ETCD")]
    rack: PathBuf,
    /// The node that this machine is [default: all nodes of backend shm, or the one whose address is this machine's]
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Replace monitors and proxies that run, as after an upgrade. What programs that are trusted with windows have
    /// there goes on; other connections are reset
    #[arg(long)]
    restart: bool,
    /// Stay, start monitors that die again, and end the nodes with this command: for init systems
    #[arg(long)]
    foreground: bool,
}

/// Brings up what is not up yet; all of it or nothing.
pub fn main(options: &Options) -> Result<()> {
    let signals = device_server::signals().context("signals cannot be taken; run up again")?;
    let rack = LoadedRack::read(&options.rack)?;
    let slots = local_slots(&rack, options.node.as_deref())?;
    slots.iter().try_for_each(|slot| check_node(&rack, *slot))?;
    rack.prepare(&rack.places.directory)?;
    let lock = lock_run_dir(&rack.places.lock(), rack.shown())?;
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
    // Nodes that another command brings up here need it before their links can be there.
    drop(lock);
    let links = match wait_for_others(&rack, &slots, begun) {
        Ok(links) => links,
        Err(error) => {
            let _lock = lock_run_dir(&rack.places.lock(), rack.shown())?;
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

/// The nodes of this machine.
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
    // Only an address of this machine can be bound to.
    let own: Vec<usize> =
        nodes().filter(|(_, node)| TcpListener::bind((node.address, 0)).is_ok()).map(|(slot, _)| slot).collect();
    if own.len() == 1 {
        return Ok(own);
    }
    let what = if own.is_empty() { "no node has an address of this machine" } else { "several nodes could be" };
    bail!(WrongUse::of(format!("{}: {what} this machine; say which one it is with --node", rack.shown())))
}

/// That nodes of a file that run go by what it says: those that are started now could not work with them. `false`: they
/// go by other rules and time-outs, and can go on with them.
fn check_same(rack: &LoadedRack, slots: &[usize], restart: bool) -> Result<bool> {
    let Some(running) = rack.running() else { return Ok(true) };
    running.file.rack.nodes.iter().try_for_each(|node| running.check_clock(&node.name))?;
    let (before, now) = (&running.file.rack, &rack.file.rack);
    let changes: Vec<RackChange> = slots.iter().map(|slot| before.change_to(now, *slot)).collect();
    let mut left: BTreeSet<String> = changes.iter().flat_map(|change| change.restart_needed.clone()).collect();
    let mut taken: BTreeSet<String> = changes.into_iter().flat_map(|change| change.applied).collect();
    if !restart && before.digest() != now.digest() {
        // Nodes that have joined, of which monitors that run know nothing.
        left.append(&mut taken);
    }
    let (shown, list) = (rack.shown(), |keys: BTreeSet<String>| keys.into_iter().collect::<Vec<_>>().join(", "));
    if !left.is_empty() {
        let keys = list(left);
        let remedy = format!("'crosslane down --rack {shown}', then up");
        bail!(WrongUse::of(format!("{shown} has changed since its nodes were brought up ({keys}); {remedy}")));
    }
    let is_same = restart || taken.is_empty();
    if !is_same {
        let (keys, remedy) = (list(taken), format!("'crosslane up --restart --rack {shown}'"));
        eprintln!("crosslane: {shown}: {keys} changed; nodes that run go by what was there before, until {remedy}");
    }
    Ok(is_same)
}

/// What can be seen to be wrong before anything is started.
fn check_node(rack: &LoadedRack, slot: usize) -> Result<()> {
    let (file, node) = (&rack.file, &rack.file.rack.nodes[slot]);
    let key = format!("nodes[{slot}].device");
    monitor::check_device(&file.rack, slot).map_err(|what| WrongUse::of(file.error_at(&key, what)))?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for (index, some) in file.rack.partitions.iter().enumerate() {
        if let Some(core) = some.cores.iter().flatten().find(|core| usize::from(**core) >= cores) {
            let what = format!("{core} is no core of this machine, which has 0 to {}; choose among them", cores - 1);
            bail!(WrongUse::of(file.error_at(&format!("partitions[{index}].cores"), what)));
        }
    }
    check_failover(rack, slot)?;
    let socket = rack.places.node(&node.name).monitor_socket();
    if socket.as_os_str().len() >= SOCKET_PATH_BYTES_MAX {
        let shown = socket.display();
        bail!("'{shown}' is too long for a socket; set XDG_RUNTIME_DIR or CROSSLANE_RACK to a shorter directory");
    }
    rack.prepare(&rack.places.node(&node.name).directory)
}

/// That the node's proxy can listen where those of others look for it once a link is lost.
fn check_failover(rack: &LoadedRack, slot: usize) -> Result<()> {
    let (file, node) = (&rack.file, &rack.file.rack.nodes[slot]);
    if !file.rack.failover {
        return Ok(());
    }
    if let Err(error) = TcpListener::bind((node.address, 0)) {
        let address = node.address;
        let what = format!(
            "'{address}' cannot be listened at ({error}), as failover = true needs it; give the machine this address, \
             as in 'ip address add {address} dev lo', or set failover = false"
        );
        bail!(WrongUse::of(file.error_at(&format!("nodes[{slot}].address"), what)));
    }
    let places = rack.places.node(&node.name);
    // A proxy of this node that runs has the ports.
    let runs = || [places.monitor_socket(), places.successor_socket()].iter().any(|path| path.exists());
    let is_taken = |port: &u16| TcpListener::bind((node.address, *port)).is_err();
    if let Some(port) = file.rack.failover_ports().into_iter().flatten().find(is_taken).filter(|_| !runs()) {
        let what = format!("{port} is in use at '{}'; choose another, or leave the key out for any", node.address);
        bail!(WrongUse::of(file.error_at("failover_port", what)));
    }
    Ok(())
}

/// Ends a monitor in a way that its proxy outlives, as it would outlive a crash: the next monitor takes over from it.
fn end_monitor(rack: &LoadedRack, node: &str) -> Result<()> {
    let places = rack.places.node(node);
    let Some(monitor) = Process::holding(&places.monitor_pid()) else { return Ok(()) };
    monitor.signal(Signal::KILL);
    if !monitor.has_ended(START_LIMIT) {
        bail!("the monitor of node '{node}' does not end; see {}", places.monitor_log().display());
    }
    Ok(())
}

/// What this command has started, to be ended if it fails.
#[derive(Default)]
struct Started {
    server: Option<Child>,
    monitors: Vec<(String, Child)>,
}

impl Started {
    /// Until the nodes' proxies run, and the links between them.
    fn bring_up(&mut self, rack: &LoadedRack, slots: &[usize], replaces_proxies: bool) -> Result<()> {
        let nodes = &rack.file.rack.nodes;
        if slots.iter().any(|slot| rack.file.rack.backend_of(&nodes[*slot]) == Backend::Shm) {
            self.start_server(rack)?;
        }
        for slot in slots {
            let name = &nodes[*slot].name;
            if rack_control::status(&rack.places.node(name))?.is_none() {
                let child = start_monitor(rack, name, replaces_proxies)?;
                self.monitors.push((name.clone(), child));
            }
        }
        for (name, child) in &mut self.monitors {
            wait_for_monitor(rack, name, child)?;
        }
        wait_for_own(rack, slots)
    }

    /// After a monitor has died.
    fn bring_up_again(&mut self, rack: &LoadedRack, slots: &[usize]) -> Result<()> {
        self.monitors.retain_mut(|(_, child)| !matches!(child.try_wait(), Ok(Some(_))));
        self.bring_up(rack, slots, false)
    }

    fn start_server(&mut self, rack: &LoadedRack) -> Result<()> {
        let socket = rack.places.device_socket();
        if Process::behind(&socket, SocketType::STREAM).is_some() {
            return Ok(());
        }
        // Another server would hand out another memory, which the nodes that are up do not see.
        for node in &rack.file.rack.nodes {
            if rack_control::status(&rack.places.node(&node.name))?.is_some() {
                let file = rack.shown();
                bail!("the device server of {file} has ended; 'crosslane down --rack {file}', then up again");
            }
        }
        let fault = |what: String| WrongUse::of(rack.file.error_at("device.window_bytes", what));
        let bytes = monitor::server_bytes(&rack.file.rack, ::device_server::available_bytes()).map_err(fault)?;
        let log = rack.places.device_log();
        let mut command = background(&log)?;
        command.arg("device-server").arg("--socket").arg(&socket).arg("--size").arg(bytes.to_string());
        command.arg("--vectors").arg(monitor::vectors(&rack.file.rack).to_string());
        let child = self.server.insert(command.spawn().context("starting the device server")?);
        let deadline = Instant::now() + START_LIMIT;
        while Process::behind(&socket, SocketType::STREAM).is_none() {
            check_alive(child, "the device server", &log)?;
            if Instant::now() >= deadline {
                bail!("the device server does not answer; see {}", log.display());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends what was started. Errors of that would only hide the one that led here.
    fn undo(mut self, rack: &LoadedRack) {
        for (name, child) in &mut self.monitors {
            // One that does not listen yet cannot be asked to end.
            down::stop_child(child);
            let _ = down::stop_node(&rack.places.node(name));
        }
        if let Some(child) = &mut self.server {
            down::stop_server(&rack.places.device_socket());
            let _ = child.wait();
        }
    }
}

/// This command, to run on when the one that starts it has ended; its log begins anew.
pub fn background(log: &Path) -> Result<Command> {
    let own = std::env::current_exe().context("finding this command's own place")?;
    let log_file = File::create(log).with_context(|| format!("log '{}'", log.display()))?;
    let mut command = Command::new(own);
    // A group of its own, so that an interrupt from the keyboard does not reach it.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file).process_group(0).current_dir("/");
    Ok(command)
}

fn start_monitor(rack: &LoadedRack, name: &str, replaces_proxy: bool) -> Result<Child> {
    let file = rack.argument()?;
    let mut command = background(&rack.places.node(name).monitor_log())?;
    command.arg("monitor").arg("--rack").arg(file).arg("--node").arg(name);
    command.args(replaces_proxy.then_some("--replace-proxy"));
    command.spawn().with_context(|| format!("starting the monitor of node '{name}'"))
}

/// That a child has not ended; what it said last if it has.
pub fn check_alive(child: &mut Child, what: &str, log: &Path) -> Result<()> {
    let Some(status) = child.try_wait().with_context(|| format!("waiting for {what}"))? else { return Ok(()) };
    let last = last_line(log);
    let error = format!("{what} ended ({status}): {last}");
    Err(if status.code() == Some(2) { WrongUse::of(last).into() } else { anyhow!(error) })
}

/// What a log ends with.
pub fn last_line(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    last.strip_prefix("crosslane: ").unwrap_or(last).to_owned()
}

fn wait_for_monitor(rack: &LoadedRack, name: &str, child: &mut Child) -> Result<()> {
    let places = rack.places.node(name);
    let deadline = Instant::now() + START_LIMIT;
    while rack_control::status(&places)?.is_none() {
        check_alive(child, &format!("the monitor of node '{name}'"), &places.monitor_log())?;
        if Instant::now() >= deadline {
            bail!("the monitor of node '{name}' does not answer; see {}", places.monitor_log().display());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Waits until the proxies of these nodes work, and the links between them.
fn wait_for_own(rack: &LoadedRack, slots: &[usize]) -> Result<()> {
    let deadline = Instant::now() + up_limit(rack).max(OWN_LIMIT);
    loop {
        let missing = missing(rack, slots)?.own;
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("rack {} did not come up: {}", rack.shown(), missing.join("; "));
        }
        std::thread::sleep(4 * POLL_INTERVAL);
    }
}

/// Waits for the links to other nodes, for `up_ns` since `begun` at most. Those that are not up then, with why.
fn wait_for_others(rack: &LoadedRack, slots: &[usize], begun: Instant) -> Result<Vec<String>> {
    loop {
        let missing = missing(rack, slots)?.others;
        if missing.is_empty() || begun.elapsed() >= up_limit(rack) {
            return Ok(missing);
        }
        std::thread::sleep(4 * POLL_INTERVAL);
    }
}

fn up_limit(rack: &LoadedRack) -> Duration {
    Duration::from_nanos(rack.file.rack.timeouts.up_ns as u64)
}

/// What does not work yet, with why.
#[derive(Default)]
struct Missing {
    /// Proxies of these nodes, and links between them.
    own: Vec<String>,
    /// Links to other nodes.
    others: Vec<String>,
}

fn missing(rack: &LoadedRack, slots: &[usize]) -> Result<Missing> {
    let mut missing = Missing::default();
    for slot in slots {
        let name = &rack.file.rack.nodes[*slot].name;
        let Some(status) = rack_control::status(&rack.places.node(name))? else {
            bail!("the monitor of node '{name}' has ended; see {}", rack.places.node(name).monitor_log().display())
        };
        missing.add(rack, slots, &status);
    }
    Ok(missing)
}

impl Missing {
    fn add(&mut self, rack: &LoadedRack, slots: &[usize], status: &Status) {
        let node = &status.node;
        if !status.proxy.is_some_and(|proxy| proxy.is_ready) {
            let log = rack.places.node(node).proxy_log();
            let (said, log) = (last_line(&log), log.display());
            self.own.push(format!("the proxy of node '{node}' does not run ({said}); see {log}"));
        }
        for link in status.links.iter().filter(|link| link.state != "up") {
            let reason = link.reason.as_deref().unwrap_or("its monitor has not come yet");
            let text = format!("link from '{node}' to '{}' is {}: {reason}", link.peer, link.state);
            let is_own = slots.iter().any(|slot| rack.file.rack.nodes[*slot].name == link.peer);
            if is_own { self.own.push(text) } else { self.others.push(text) }
        }
    }
}

/// Nodes whose programs go by the proxies although the rack file trusts them with windows.
fn direct_obstacles(rack: &LoadedRack, slots: &[usize]) -> Vec<String> {
    let names = slots.iter().map(|slot| rack.file.rack.nodes[*slot].name.as_str());
    let obstacle = |name: &str| {
        let status = rack_control::status(&rack.places.node(name)).ok().flatten()?;
        let obstacle = status.direct?.obstacle?;
        Some(format!("node '{name}': trust = \"direct\" has no effect, programs go by the proxies: {obstacle}"))
    };
    names.filter_map(obstacle).collect()
}

fn describe(rack: &LoadedRack, slots: &[usize], links: &[String]) -> String {
    let names: Vec<&str> = slots.iter().map(|slot| rack.file.rack.nodes[*slot].name.as_str()).collect();
    let mut text = format!("{} is up: nodes {}\n", rack.shown(), names.join(", "));
    links.iter().for_each(|link| text += &format!("not yet: {link}\n"));
    text
}

/// Until a signal comes or a monitor is told to end. One that dies is started again, and goes on with its proxy.
fn stay(rack: &LoadedRack, slots: &[usize], started: &mut Started, signals: std::os::fd::BorrowedFd<'_>) -> Result<()> {
    let names: Vec<&str> = slots.iter().map(|slot| rack.file.rack.nodes[*slot].name.as_str()).collect();
    let socket = |name: &str| rack.places.node(name).monitor_socket();
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let monitors: Vec<(&str, Process)> = names
            .iter()
            .filter_map(|name| Some((*name, Process::behind(&socket(name), SocketType::SEQPACKET)?)))
            .collect();
        let Some(index) = rack_control::first_of(signals, monitors.iter().map(|(_, process)| process)) else {
            return down::bring_down(rack);
        };
        let name = monitors[index].0;
        deaths.retain(|death| death.elapsed() < DEATHS_WITHIN);
        deaths.push(Instant::now());
        // Whoever brings the rack down has the lock. One that ends in order takes its socket with it.
        let lock = lock_run_dir(&rack.places.lock(), rack.shown())?;
        let again = if socket(name).exists() && deaths.len() <= DEATHS_MAX {
            eprintln!("crosslane: the monitor of node '{name}' has died; it is started again");
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
