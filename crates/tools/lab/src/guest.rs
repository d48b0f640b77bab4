//! One machine: a QEMU process, its console and the line to its script.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use anyhow::{Context, Result};

use crate::event::{Boot, Event, Word};

/// The machine's program.
pub const QEMU: &str = "qemu-system-x86_64";
/// A line is cut here: a guest that writes without end fills no memory.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// QEMU's words for a console on its output and a second serial line on its input, both sockets.
const LINES: [&str; 8] = [
    "-chardev",
    "socket,id=console,fd=1",
    "-serial",
    "chardev:console",
    "-chardev",
    "socket,id=words,fd=0",
    "-serial",
    "chardev:words",
];

/// A running machine. Dropping it ends it.
#[derive(Debug)]
pub struct Guest {
    process: Child,
    words: UnixStream,
}

impl Guest {
    /// Starts QEMU with `arguments`; what the guest says comes as events.
    pub fn boot(boot: Boot, arguments: &[String], events: &Sender<Event>) -> Result<Self> {
        let (console, console_guest) = UnixStream::pair()?;
        let (words, words_guest) = UnixStream::pair()?;
        // Whatever ends us ends the machine too.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", QEMU]).args(LINES).args(arguments);
        command.stdin(OwnedFd::from(words_guest)).stdout(OwnedFd::from(console_guest)).stderr(Stdio::piped());
        let mut process = command.spawn().context("setpriv: cannot be started; install util-linux")?;
        let complaints = process.stderr.take().context("the errors of QEMU")?;
        let guest = Self { process, words };
        let heard = guest.words.try_clone()?;
        read_lines(complaints, events, move |line| Event::Line(boot, format!("qemu: {line}")), None);
        read_lines(heard, events, move |line| Event::Word(boot, Word::parse(&line)), None);
        read_lines(console, events, move |line| Event::Line(boot, line), Some(Event::Ended(boot)));
        Ok(guest)
    }

    /// Process number of the machine.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Lets a script go on that waits. Its machine may be gone, which is seen elsewhere.
    pub fn release(&mut self) {
        let _ = self.words.write_all(b"go\n");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reads lines in a thread, which ends with the machine.
fn read_lines(
    source: impl Read + Send + 'static,
    events: &Sender<Event>,
    event: impl Fn(String) -> Event + Send + 'static,
    last: Option<Event>,
) {
    let events = events.clone();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(source);
        let mut line = Vec::new();
        // Nobody listens any more when sending fails.
        while matches!((&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
            line.clear();
            if events.send(event(text)).is_err() {
                return;
            }
        }
        let _ = last.map(|last| events.send(last));
    });
}
