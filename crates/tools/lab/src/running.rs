//! A lab while it runs.

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

use crate::event::{Boot, Event, Word};
use crate::guest::{Guest, QEMU};
use crate::kernel::{Kernel, Module};
use crate::spec::{Lab, Node};
use crate::{GuestReport, Report, Trouble, program};

/// How long an interruption may go unseen.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long the console of a machine that is gone may take to be read.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Where the folders of device servers lie, whatever TMPDIR says: names of sockets must be short.
const FOLDERS: &str = "/tmp";
const FOLDER_PREFIX: &str = "lab-";
const SOCKET: &str = "device.sock";

/// Booted guests and what they share. Dropping it ends them all.
#[derive(Debug)]
pub struct Running {
    seats: BTreeMap<Node, Seat>,
    trouble: Option<Trouble>,
    deadline: Instant,
    events: Receiver<Event>,
    events_to: Sender<Event>,
    devices_taken: u32,
    memory: OwnedFd,
    image: OwnedFd,
    served: Option<Served>,
    /// With the sockets of the line between two guests.
    line: Option<TempDir>,
    modules: Vec<Module>,
    kernel: Kernel,
    lab: Lab,
}

/// Our device server, for devices that need one. It ends before its folder goes.
#[derive(Debug)]
struct Served {
    _server: device_server::ServerThread,
    memory: OwnedFd,
    socket: PathBuf,
    _folder: TempDir,
}

/// A guest's place, whose machine may have been killed and booted again.
#[derive(Debug, Default)]
struct Seat {
    guest: Option<Guest>,
    boots: u32,
    /// Of those, how many have nothing more to say.
    ended: u32,
    waits: Option<Word>,
    code: Option<i32>,
    output: String,
}

impl Running {
    pub(crate) fn start(lab: Lab) -> Result<Self> {
        program::find(QEMU).context("guests need qemu-system-x86 of Debian")?;
        let kernel = Kernel::find()?;
        let modules = kernel.modules(&lab.modules())?;
        let image = lab.image(&modules)?;
        let (events_to, events) = channel();
        let needs_server = lab.device.is_served() && lab.device_server.is_none();
        let served = if needs_server { Some(Served::start(&lab, &events_to)?) } else { None };
        let memory = match &served {
            Some(served) => served.memory.try_clone()?,
            None => device_server::create_memory(lab.size_bytes)?,
        };
        let deadline = Instant::now() + lab.limit;
        let line = if lab.has_network { Some(folder()?) } else { None };
        let mut running = Self {
            seats: BTreeMap::new(),
            trouble: None,
            deadline,
            events,
            events_to,
            devices_taken: 0,
            memory,
            image,
            served,
            line,
            modules,
            kernel,
            lab,
        };
        for node in running.lab.nodes() {
            running.boot(node)?;
        }
        Ok(running)
    }

    /// The memory that the guests share, unless a device server has it that was there already.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The device server's socket, where a process of the host can be one more client; none where there is no server.
    pub fn device_socket(&self) -> Option<&Path> {
        self.lab.device_server.as_deref().or(self.served.as_ref().map(|served| served.socket.as_path()))
    }

    /// Boots a guest that does not run.
    pub fn boot(&mut self, node: Node) -> Result<()> {
        let socket = self.device_socket().unwrap_or(Path::new("")).to_owned();
        let seat = self.seats.entry(node).or_default();
        assert!(seat.guest.is_none(), "guest {node} runs");
        let boot = Boot { node, number: seat.boots };
        let image = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.image.as_raw_fd()));
        let mut arguments = self.lab.arguments(node, &self.kernel, &image, &self.modules);
        let Lab { device, size_bytes, vectors, devices, .. } = &self.lab;
        arguments.extend(device.arguments(&self.memory, *size_bytes, &socket, *vectors, *devices));
        arguments.extend(self.line.iter().flat_map(|line| Lab::network_words(node, line.path())));
        seat.guest = Some(Guest::boot(boot, &arguments, &self.events_to)?);
        (seat.waits, seat.code) = (None, None);
        seat.boots += 1;
        if self.served.is_some() {
            // One after the other: a guest's number at the device is its place among the guests.
            let taken = self.devices_taken + u32::from(self.lab.devices);
            self.pump(|lab| lab.devices_taken >= taken)?;
        }
        Ok(())
    }

    /// Ends a guest's machine as kill -9 does. Its script has no exit code.
    pub fn kill(&mut self, node: Node) {
        let seat = self.seats.entry(node).or_default();
        (seat.guest, seat.waits) = (None, None);
        self.release_barriers();
    }

    /// Process number of a guest's machine, while it has one.
    pub fn pid(&self, node: Node) -> Option<u32> {
        self.seats.get(&node)?.guest.as_ref().map(Guest::pid)
    }

    /// What a guest has printed until now.
    pub fn output(&self, node: Node) -> &str {
        self.seats.get(&node).map_or("", |seat| &seat.output)
    }

    /// Waits until a guest's script waits for the host at `name`.
    pub fn wait_for_guest(&mut self, node: Node, name: &str) -> Result<()> {
        let wanted = Word::Host(name.to_owned());
        self.pump(|lab| lab.seats.get(&node).is_some_and(|seat| seat.waits.as_ref() == Some(&wanted)))
            .with_context(|| format!("waiting for guest {node} to come to '{name}'"))
    }

    /// Lets a guest's script go on that waits for the host.
    pub fn release(&mut self, node: Node) {
        let seat = self.seats.entry(node).or_default();
        assert!(matches!(seat.waits, Some(Word::Host(_))), "guest {node} does not wait for the host");
        seat.release();
    }

    /// Waits until a guest has printed these words.
    pub fn wait_for_output(&mut self, node: Node, words: &str) -> Result<()> {
        self.pump(|lab| lab.output(node).contains(words)).with_context(|| format!("waiting for {words:?} of {node}"))
    }

    /// Waits until all scripts have ended, or one has failed, and ends the machines.
    pub fn finish(mut self) -> Result<Report> {
        // What went wrong stands in the report.
        let _ = self.pump(|lab| lab.running().is_empty());
        Ok(self.end())
    }

    /// Ends the machines now.
    pub fn end(mut self) -> Report {
        for seat in self.seats.values_mut() {
            seat.guest = None;
        }
        // What the machines had said is still to be heard, to the end of their consoles.
        let deadline = Instant::now() + LAST_WORDS;
        while self.seats.values().any(|seat| seat.ended < seat.boots) {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(event) => self.note(event),
                Err(_) => break,
            }
        }
        let guests = std::mem::take(&mut self.seats).into_iter();
        let guests = guests.map(|(node, seat)| GuestReport { node, code: seat.code, output: seat.output });
        Report { guests: guests.collect(), trouble: self.trouble.take() }
    }

    fn running(&self) -> Vec<Node> {
        let running = self.seats.iter().filter(|(_, seat)| seat.guest.is_some());
        running.map(|(node, _)| *node).collect()
    }

    /// Hears events until a fact holds; fails when something ends the lab before.
    fn pump(&mut self, holds: impl Fn(&Self) -> bool) -> Result<()> {
        while !holds(self) {
            self.look();
            let failed = self.seats.iter().find(|(_, seat)| seat.code.is_some_and(|code| code != 0));
            match (&self.trouble, failed) {
                (Some(trouble), _) => bail!("{trouble}\n{}", self.consoles()),
                (None, Some((node, seat))) => {
                    bail!("guest {node}: exit code {}\n{}", seat.code.unwrap_or_default(), self.consoles())
                }
                (None, None) => {}
            }
            if let Ok(event) = self.events.recv_timeout(LOOK_EVERY) {
                self.note(event);
            }
        }
        Ok(())
    }

    fn look(&mut self) {
        if self.lab.interrupt.load(Ordering::Relaxed) {
            self.trouble.get_or_insert(Trouble::Interrupted);
        }
        if Instant::now() > self.deadline {
            let running = self.running();
            self.trouble.get_or_insert(Trouble::TimeOver { limit_s: self.lab.limit.as_secs(), running });
        }
    }

    /// The last of what the guests printed, for an error.
    fn consoles(&self) -> String {
        let guests = self.seats.iter();
        let guests =
            guests.map(|(node, seat)| GuestReport { node: *node, code: seat.code, output: seat.output.clone() });
        Report { guests: guests.collect(), trouble: None }.to_string()
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::DeviceTaken => self.devices_taken += 1,
            Event::Line(boot, line) => {
                if self.lab.echo {
                    // Whoever read it may be gone; the lab goes on.
                    let _ = writeln!(std::io::stdout(), "{}| {line}", boot.node);
                }
                let output = &mut self.seats.entry(boot.node).or_default().output;
                output.push_str(&line);
                output.push('\n');
            }
            Event::Word(boot, word) if self.is_current(boot) => self.note_word(boot.node, word),
            Event::Ended(boot) => self.note_end(boot),
            Event::Word(..) => {}
        }
    }

    fn note_end(&mut self, boot: Boot) {
        let is_current = self.is_current(boot);
        let seat = self.seats.entry(boot.node).or_default();
        seat.ended += 1;
        if is_current {
            seat.guest = None;
            self.trouble.get_or_insert(Trouble::Died { node: boot.node });
        }
    }

    /// Whether a boot's machine is the one that runs.
    fn is_current(&self, boot: Boot) -> bool {
        self.seats.get(&boot.node).is_some_and(|seat| seat.guest.is_some() && seat.boots == boot.number + 1)
    }

    fn note_word(&mut self, node: Node, word: Word) {
        let seat = self.seats.entry(node).or_default();
        match word {
            Word::Exit(code) => (seat.code, seat.guest) = (Some(code), None),
            Word::Nonsense(line) => seat.output.push_str(&format!("lab: not understood: {line}\n")),
            word => seat.waits = Some(word),
        }
        self.release_barriers();
    }

    /// A barrier opens when every guest that runs stands before it.
    fn release_barriers(&mut self) {
        let mut running = self.seats.values_mut().filter(|seat| seat.guest.is_some());
        let Some(Seat { waits: Some(Word::Barrier(first)), .. }) = running.next() else { return };
        let first = Word::Barrier(first.clone());
        if running.all(|seat| seat.waits.as_ref() == Some(&first)) {
            self.seats.values_mut().for_each(Seat::release);
        }
    }
}

impl Served {
    fn start(lab: &Lab, events: &Sender<Event>) -> Result<Self> {
        let folder = folder()?;
        let socket = folder.path().join(SOCKET);
        let options = device_server::Options::new(&socket, lab.size_bytes, lab.vectors)?;
        let server = device_server::Server::bind(&options)?;
        let memory = server.memory().try_clone_to_owned()?;
        let heard = events.clone();
        let on_event = move |event: &device_server::Event| {
            if matches!(event, device_server::Event::Connected { .. }) {
                let _ = heard.send(Event::DeviceTaken);
            }
        };
        Ok(Self { _server: server.start(on_event)?, memory, socket, _folder: folder })
    }
}

/// A folder for sockets, after those of labs that were killed are gone.
fn folder() -> Result<TempDir> {
    sweep(Path::new(FOLDERS));
    let owner_only = Permissions::from_mode(0o700);
    let prefix = format!("{FOLDER_PREFIX}{}-", std::process::id());
    Ok(tempfile::Builder::new().prefix(&prefix).permissions(owner_only).tempdir_in(FOLDERS)?)
}

/// Removes the folders of labs that were killed: their process is gone, and nobody listens at their sockets.
fn sweep(folders: &Path) {
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
            // Somebody else may be at it.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

impl Seat {
    fn release(&mut self) {
        self.waits = None;
        self.guest.as_mut().map(Guest::release).unwrap_or_default();
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
        let [killed, beginning, served, stranger] = names.map(folder);
        for refused in [&killed, &beginning, &stranger] {
            drop(UnixListener::bind(refused.join(SOCKET)).unwrap());
        }
        let _listener = UnixListener::bind(served.join(SOCKET)).unwrap();
        // A program that a test beside this one starts holds the listener too, until it has become that program.
        let deadline = Instant::now() + Duration::from_secs(60);
        while killed.exists() && Instant::now() < deadline {
            sweep(folders.path());
        }
        assert_eq!([killed, beginning, served, stranger].map(|path| path.exists()), [false, true, true, true]);
    }
}
