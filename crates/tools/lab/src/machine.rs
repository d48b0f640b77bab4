//! A machine: a QEMU process, its console and its message channel.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use anyhow::{Context, Result};

use crate::event::{Boot, Event, Message};

/// The program of the emulator.
pub const QEMU: &str = "qemu-system-x86_64";
/// Maximum length of a line; longer lines are split, so that a guest that writes without end does not fill memory.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// QEMU's arguments for a console on its standard output and a second serial port on its standard input, both of which
/// are sockets.
const SERIAL_ARGUMENTS: [&str; 8] = [
    "-chardev",
    "socket,id=console,fd=1",
    "-serial",
    "chardev:console",
    "-chardev",
    "socket,id=messages,fd=0",
    "-serial",
    "chardev:messages",
];

/// A running machine. Dropping it kills it.
#[derive(Debug)]
pub struct Machine {
    process: Child,
    messages: UnixStream,
}

impl Machine {
    /// Starts QEMU with `arguments`. Sends the guest's output and messages as events.
    pub fn boot(boot: Boot, arguments: &[String], events: &Sender<Event>) -> Result<Self> {
        let (console, console_guest) = UnixStream::pair()?;
        let (messages, messages_guest) = UnixStream::pair()?;
        // The machine is killed when this process exits for any reason.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", QEMU]).args(SERIAL_ARGUMENTS).args(arguments);
        command.stdin(OwnedFd::from(messages_guest)).stdout(OwnedFd::from(console_guest)).stderr(Stdio::piped());
        let mut process = command.spawn().context("setpriv: cannot be started; install util-linux")?;
        let stderr = process.stderr.take().context("QEMU's standard error")?;
        let machine = Self { process, messages };
        let received = machine.messages.try_clone()?;
        read_lines(stderr, events, move |line| Event::Line(boot, format!("qemu: {line}")), None);
        read_lines(received, events, move |line| Event::Message(boot, Message::parse(&line)), None);
        read_lines(console, events, move |line| Event::Line(boot, line), Some(Event::Ended(boot)));
        Ok(machine)
    }

    /// Returns the process ID of the machine.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Lets a waiting script continue. If the machine has ended, the end of its console output reports that.
    pub fn release(&mut self) {
        let _ = self.messages.write_all(b"go\n");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a thread that sends each line of `source` as an event, and `last` at its end. It ends with the machine.
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
        // Sending fails when the lab has ended.
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
