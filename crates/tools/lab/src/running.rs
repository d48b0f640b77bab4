//! A running lab.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::event::{Boot, Event, Message};
use crate::kernel::{Kernel, Module};
use crate::machine::{Machine, QEMU};
use crate::node::Node;
use crate::program;
use crate::report::{GuestReport, LabFailure, Report};
use crate::spec::{GUESTS_MAX, Lab};

/// Maximum number of devices of a guest, for kinds that allow several.
const DEVICES_MAX: u8 = 4;

/// Interval at which interruption and the time limit are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time limit for reading the rest of the console output of an ended machine.
const CONSOLE_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Parent of the folders with sockets. It does not depend on TMPDIR, since socket paths must be short (unix(7)).
const FOLDERS: &str = "/tmp";
const FOLDER_PREFIX: &str = "lab-";
const SOCKET: &str = "device.sock";

/// Booted guests and their shared device. Dropping this ends all guests.
#[derive(Debug)]
pub struct RunningLab {
    guests: BTreeMap<Node, GuestState>,
    failure: Option<LabFailure>,
    deadline: Instant,
    events: Receiver<Event>,
    events_to: Sender<Event>,
    devices_connected: u32,
    memory: OwnedFd,
    image: OwnedFd,
    server: Option<DeviceServer>,
    /// The folder with the sockets of the network between two guests.
    network: Option<TempDir>,
    modules: Vec<Module>,
    kernel: Kernel,
    lab: Lab,
}

/// The device server of the lab, for devices that need one. It ends before its folder is removed.
#[derive(Debug)]
struct DeviceServer {
    _server: device_server::ServerThread,
    memory: OwnedFd,
    socket: PathBuf,
    _folder: TempDir,
}

/// The state of a guest, whose machine may be killed and booted again.
#[derive(Debug, Default)]
struct GuestState {
    machine: Option<Machine>,
    boots: u32,
    /// Number of boots whose console has been closed.
    ended: u32,
    waiting_for: Option<Message>,
    code: Option<i32>,
    output: String,
}

impl Lab {
    /// Runs the script in all guests until it ends.
    pub fn run(self) -> Result<Report> {
        self.start()?.finish()
    }

    /// Boots the guests, which start their scripts.
    pub fn start(self) -> Result<RunningLab> {
        if !(1..=GUESTS_MAX).contains(&self.guests) {
            bail!("{} guests: 1 to {GUESTS_MAX} are possible; try --guests 2", self.guests);
        }
        if self.has_network && self.guests != 2 {
            bail!("{} guests: a network connects two; omit --network, or try --guests 2", self.guests);
        }
        let devices_max = if self.device.is_served() { DEVICES_MAX } else { 1 };
        if !(1..=devices_max).contains(&self.devices) {
            let (devices, name) = (self.devices, self.device.name());
            bail!("{devices} devices of kind '{name}' in each guest: 1 to {devices_max} are possible");
        }
        RunningLab::boot_all(self)
    }
}

impl RunningLab {
    fn boot_all(lab: Lab) -> Result<Self> {
        program::find(QEMU).context("guests need qemu-system-x86 of Debian")?;
        let kernel = Kernel::find()?;
        let modules = kernel.modules(&lab.modules())?;
        let image = lab.image(&modules)?;
        let (events_to, events) = channel();
        let needs_server = lab.device.is_served() && lab.device_server.is_none();
        let server = if needs_server { Some(DeviceServer::start(&lab, &events_to)?) } else { None };
        let memory = match &server {
            Some(server) => server.memory.try_clone()?,
            None => device_server::create_memory(lab.size_bytes)?,
        };
        let deadline = Instant::now() + lab.limit;
        let network = if lab.has_network { Some(folder()?) } else { None };
        let mut running = Self {
            guests: BTreeMap::new(),
            failure: None,
            deadline,
            events,
            events_to,
            devices_connected: 0,
            memory,
            image,
            server,
            network,
            modules,
            kernel,
            lab,
        };
        for node in running.lab.nodes() {
            running.boot(node)?;
        }
        Ok(running)
    }

    /// Returns the memory that the guests share, unless an external device server provides it.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Returns the socket of the device server, to which a process of the host can connect as another client; `None`
    /// without a server.
    pub fn device_socket(&self) -> Option<&Path> {
        self.lab.device_server.as_deref().or(self.server.as_ref().map(|server| server.socket.as_path()))
    }

    /// Boots a guest that is not running.
    pub fn boot(&mut self, node: Node) -> Result<()> {
        let socket = self.device_socket().unwrap_or(Path::new("")).to_owned();
        let guest = self.guests.entry(node).or_default();
        assert!(guest.machine.is_none(), "guest {node} is running");
        let boot = Boot { node, number: guest.boots };
        let image = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.image.as_raw_fd()));
        let mut arguments = self.lab.arguments(node, &self.kernel, &image, &self.modules);
        let Lab { device, size_bytes, vectors, devices, .. } = &self.lab;
        arguments.extend(device.arguments(&self.memory, *size_bytes, &socket, *vectors, *devices));
        arguments.extend(self.network.iter().flat_map(|folder| Lab::network_arguments(node, folder.path())));
        guest.machine = Some(Machine::boot(boot, &arguments, &self.events_to)?);
        (guest.waiting_for, guest.code) = (None, None);
        guest.boots += 1;
        if self.server.is_some() {
            // Guests boot one after the other, so that a guest's ID at the server is its position among the guests.
            let expected = self.devices_connected + u32::from(self.lab.devices);
            self.pump(|lab| lab.devices_connected >= expected)?;
        }
        Ok(())
    }

    /// Kills the machine of a guest (SIGKILL). Its script gets no exit code.
    pub fn kill(&mut self, node: Node) {
        let guest = self.guests.entry(node).or_default();
        (guest.machine, guest.waiting_for) = (None, None);
        self.release_barriers();
    }

    /// Returns the process ID of a guest's machine while it runs.
    pub fn pid(&self, node: Node) -> Option<u32> {
        self.guests.get(&node)?.machine.as_ref().map(Machine::pid)
    }

    /// Returns the console output of a guest so far.
    pub fn output(&self, node: Node) -> &str {
        self.guests.get(&node).map_or("", |guest| &guest.output)
    }

    /// Waits until a guest's script waits for the host at `name`.
    pub fn wait_for_guest(&mut self, node: Node, name: &str) -> Result<()> {
        let wanted = Message::Host(name.to_owned());
        self.pump(|lab| lab.guests.get(&node).is_some_and(|guest| guest.waiting_for.as_ref() == Some(&wanted)))
            .with_context(|| format!("waiting for guest {node} to reach '{name}'"))
    }

    /// Lets a guest's script that waits for the host continue.
    pub fn release(&mut self, node: Node) {
        let guest = self.guests.entry(node).or_default();
        assert!(matches!(guest.waiting_for, Some(Message::Host(_))), "guest {node} does not wait for the host");
        guest.release();
    }

    /// Waits until all scripts have ended or one has failed, then ends the machines.
    pub fn finish(mut self) -> Result<Report> {
        // The report contains the error.
        let _ = self.pump(|lab| lab.running().is_empty());
        Ok(self.end())
    }

    /// Ends the machines now.
    pub fn end(mut self) -> Report {
        for guest in self.guests.values_mut() {
            guest.machine = None;
        }
        // The rest of the console output has not been read yet.
        let deadline = Instant::now() + CONSOLE_DRAIN_TIMEOUT;
        while self.guests.values().any(|guest| guest.ended < guest.boots) {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(event) => self.handle(event),
                Err(_) => break,
            }
        }
        let reports = std::mem::take(&mut self.guests).into_iter();
        let reports = reports.map(|(node, guest)| GuestReport { node, code: guest.code, output: guest.output });
        Report { guests: reports.collect(), failure: self.failure.take() }
    }

    fn running(&self) -> Vec<Node> {
        let running = self.guests.iter().filter(|(_, guest)| guest.machine.is_some());
        running.map(|(node, _)| *node).collect()
    }

    /// Handles events until a condition holds. Fails if the lab ends before.
    fn pump(&mut self, holds: impl Fn(&Self) -> bool) -> Result<()> {
        while !holds(self) {
            self.check_limits();
            let failed = self.guests.iter().find(|(_, guest)| guest.code.is_some_and(|code| code != 0));
            match (&self.failure, failed) {
                (Some(failure), _) => bail!("{failure}\n{}", self.consoles()),
                (None, Some((node, guest))) => {
                    bail!("guest {node}: exit code {}\n{}", guest.code.unwrap_or_default(), self.consoles())
                }
                (None, None) => {}
            }
            if let Ok(event) = self.events.recv_timeout(POLL_INTERVAL) {
                self.handle(event);
            }
        }
        Ok(())
    }

    fn check_limits(&mut self) {
        if self.lab.interrupt.load(Ordering::Relaxed) {
            self.failure.get_or_insert(LabFailure::Interrupted);
        }
        if Instant::now() > self.deadline {
            let running = self.running();
            self.failure.get_or_insert(LabFailure::TimeOver { limit_s: self.lab.limit.as_secs(), running });
        }
    }

    /// Returns the last lines of the guests' consoles, for an error.
    fn consoles(&self) -> String {
        let reports = self.guests.iter().map(|(node, guest)| GuestReport {
            node: *node,
            code: guest.code,
            output: guest.output.clone(),
        });
        Report { guests: reports.collect(), failure: None }.to_string()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::DeviceConnected => self.devices_connected += 1,
            Event::Line(boot, line) => {
                if self.lab.echo {
                    // The reader of the output may have exited; the lab continues.
                    let _ = writeln!(std::io::stdout(), "{}| {line}", boot.node);
                }
                let output = &mut self.guests.entry(boot.node).or_default().output;
                output.push_str(&line);
                output.push('\n');
            }
            Event::Message(boot, message) if self.is_current(boot) => self.handle_message(boot.node, message),
            Event::Ended(boot) => self.handle_exit(boot),
            Event::Message(..) => {}
        }
    }

    fn handle_exit(&mut self, boot: Boot) {
        let is_current = self.is_current(boot);
        let guest = self.guests.entry(boot.node).or_default();
        guest.ended += 1;
        if is_current {
            guest.machine = None;
            self.failure.get_or_insert(LabFailure::Died { node: boot.node });
        }
    }

    /// Returns whether a boot's machine is the current one.
    fn is_current(&self, boot: Boot) -> bool {
        self.guests.get(&boot.node).is_some_and(|guest| guest.machine.is_some() && guest.boots == boot.number + 1)
    }

    fn handle_message(&mut self, node: Node, message: Message) {
        let guest = self.guests.entry(node).or_default();
        match message {
            Message::Exit(code) => (guest.code, guest.machine) = (Some(code), None),
            Message::Invalid(line) => guest.output.push_str(&format!("lab: invalid message: {line}\n")),
            message => guest.waiting_for = Some(message),
        }
        self.release_barriers();
    }

    /// Opens a barrier if every running guest waits at it.
    fn release_barriers(&mut self) {
        let mut running = self.guests.values_mut().filter(|guest| guest.machine.is_some());
        let Some(GuestState { waiting_for: Some(Message::Barrier(first)), .. }) = running.next() else { return };
        let first = Message::Barrier(first.clone());
        if running.all(|guest| guest.waiting_for.as_ref() == Some(&first)) {
            self.guests.values_mut().for_each(GuestState::release);
        }
    }
}

impl DeviceServer {
    fn start(lab: &Lab, events: &Sender<Event>) -> Result<Self> {
        let folder = folder()?;
        let socket = folder.path().join(SOCKET);
        let options = device_server::Options::new(&socket, lab.size_bytes, lab.vectors)?;
        let server = device_server::Server::bind(&options)?;
        let memory = server.memory().try_clone_to_owned()?;
        let events = events.clone();
        let on_event = move |event: &device_server::Event| {
            if matches!(event, device_server::Event::Connected { .. }) {
                let _ = events.send(Event::DeviceConnected);
            }
        };
        Ok(Self { _server: server.start(on_event)?, memory, socket, _folder: folder })
    }
}

/// Creates a folder for sockets, after removing those of labs that were killed.
fn folder() -> Result<TempDir> {
    remove_stale(Path::new(FOLDERS));
    let owner_only = Permissions::from_mode(0o700);
    let prefix = format!("{FOLDER_PREFIX}{}-", std::process::id());
    Ok(tempfile::Builder::new().prefix(&prefix).permissions(owner_only).tempdir_in(FOLDERS)?)
}

/// Removes the folders of labs that were killed: their process does not exist, and their sockets refuse connections.
fn remove_stale(folders: &Path) {
    let Ok(entries) = std::fs::read_dir(folders) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process =
            name.strip_prefix(FOLDER_PREFIX).and_then(|rest| rest.split_once('-')).map(|(process, _)| process);
        let Some(process) = process.and_then(|process| process.parse::<u32>().ok()) else { continue };
        let is_refused = || {
            let connected = UnixStream::connect(entry.path().join(SOCKET));
            connected.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
        };
        if !Path::new(&format!("/proc/{process}")).exists() && is_refused() {
            // Another lab may remove the folder at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

impl GuestState {
    fn release(&mut self) {
        self.waiting_for = None;
        self.machine.as_mut().map(Machine::release).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn folders_of_killed_labs_are_removed_and_no_others() {
        let folders = tempfile::tempdir_in(FOLDERS).unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let (gone, here) = (ended.id(), std::process::id());
        let folder = |name: String| {
            let path = folders.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let names = [format!("lab-{gone}-a"), format!("lab-{here}-b"), format!("lab-{gone}-c"), "lab-x-d".to_owned()];
        let [killed, starting, running, other] = names.map(folder);
        for refused in [&killed, &starting, &other] {
            drop(UnixListener::bind(refused.join(SOCKET)).unwrap());
        }
        let _listener = UnixListener::bind(running.join(SOCKET)).unwrap();
        // A process that a concurrent test forks holds the listener too, until its `exec`.
        let deadline = Instant::now() + Duration::from_secs(60);
        while killed.exists() && Instant::now() < deadline {
            remove_stale(folders.path());
        }
        assert_eq!([killed, starting, running, other].map(|path| path.exists()), [false, true, true, true]);
    }
}
