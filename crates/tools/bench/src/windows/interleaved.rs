//! By proxies where cores suffice, measured with two cores: four parties in two loops.
//!
//! ```text
//!   one core: loop { client of node b; proxy of node a }     the other: loop { server of node a; proxy of node b }
//!
//!   client ──► proxy b ──► proxy a ──► server ──► proxy a ──► proxy b ──► client
//!      one       other       one        other       one        other       one
//! ```
//!
//! A round trip by proxies takes four parties, of which one at a time has something to do. With a core for each, a
//! hand-over takes a cache line from one core to another, and nobody waits for a processor. So do the six hand-overs
//! here: neighbours are never on one core, and none of the two threads ever sleeps or shares its core. What each
//! hand-over finds in addition is the other party of its loop, which has nothing to do, and is asked all the same. So a
//! machine with four cores would not take longer, but for what its caches hold of one party and not of two.
//!
//! The programs are unmodified sockets: calls of libc that the loaded library answers. The proxies take the turns of
//! their threads (`proxy::driver::Embedded`) on segments of programs and the partitions of a device in shared memory,
//! as a rack of backend `"shm"` has them. What is missing of a live rack: monitors, and with them the control lane;
//! sleeping; other threads of the proxies' processes.

pub mod program;
pub(super) mod report;

pub use report::main;

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rack::{Places, Rack};
use serde::Serialize;

use super::rack::Kind;
use crate::launch::{Launcher, READY_TIMEOUT};
use crate::probe::Findings;
use crate::process::Guard;
use stats::Latencies;

/// Bytes of a message.
pub const SIZES: [usize; 6] = [8, 48, 64, 256, 1024, 4096];
/// Hand-overs of a round trip: from program to proxy to proxy to program, and back.
pub const HAND_OVERS: u32 = 6;
/// Bytes of the memory of the device: the windows of two nodes and what is said of them.
const DEVICE_SIZE: &str = "16M";
const SERVER_END_LIMIT: Duration = Duration::from_secs(5);
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// The rack that the two loops are of.
pub fn rack() -> Rack {
    Kind::Proxy.rack()
}

/// Which of the two loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Loop {
    /// The server, in node a, and the proxy of node b.
    Serve,
    /// The client, in node b, and the proxy of node a.
    Call,
}

impl Loop {
    const fn word(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Call => "call",
        }
    }

    /// The slots of its program's node and of its proxy's.
    pub const fn slots(self) -> (usize, usize) {
        match self {
            Self::Serve => (0, 1),
            Self::Call => (1, 0),
        }
    }
}

/// Whom of its two parties a loop asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Asks {
    /// Both in turn.
    Both,
    /// Whose turn it is: the other one has nothing to do until then.
    Next,
}

impl Asks {
    const fn word(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Next => "next",
        }
    }
}

/// What is sent to and fro.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct How {
    /// Of a message.
    pub size_bytes: usize,
    /// Whom both loops ask.
    pub asks: Asks,
    /// Of the sample.
    pub length: Length,
}

/// How long a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Length {
    /// So long, after a fifth of that to warm up.
    #[serde(rename = "sample_ms")]
    Milliseconds(u64),
    /// So many round trips.
    #[serde(rename = "sample_trips")]
    Trips(u64),
}

/// What a sample found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Of round trips.
    pub latencies: Latencies,
    /// A turn of a proxy that has nothing to do.
    pub idle_turn_ns: f64,
    /// A call of a program that receives nothing.
    pub idle_receive_ns: f64,
    /// Frames that the proxies sent for each round trip, warming up among them.
    pub frames_per_trip: f64,
}

/// The places and the device of the two loops.
pub struct Interleaved {
    program: PathBuf,
    places: Places,
    _server: Guard,
}

impl Interleaved {
    /// Starts the device server, in the launcher's own directory.
    pub fn up(launcher: &Launcher) -> Result<Self> {
        ensure!(launcher.cores.is_some(), "four parties in two loops take two cores");
        let program = std::env::current_exe().context("finding this program")?;
        let places = Places { directory: launcher.scratch().join("interleaved") };
        for node in rack().nodes {
            let node = places.node(&node.name);
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&node.directory);
            // That there is one is all that a program asks where the listener it wants is mirrored already.
            made.and_then(|()| std::fs::write(node.monitor_socket(), b""))
                .with_context(|| format!("making {}", node.directory.display()))?;
        }
        let socket = places.device_socket();
        let mut command = Command::new(&program);
        command.args(["device-server", "--size", DEVICE_SIZE, "--socket"]).arg(&socket);
        let server = Guard::spawn(command, None)?;
        wait_for(&socket, &server)?;
        Ok(Self { program, places, _server: server })
    }

    /// Round trips.
    pub fn sample(&self, launcher: &Launcher, how: How) -> Result<Found> {
        let How { size_bytes, length, .. } = how;
        let limit = match length {
            Length::Milliseconds(milliseconds) => Duration::from_millis(2 * milliseconds) + READY_TIMEOUT,
            Length::Trips(_) => 3 * READY_TIMEOUT,
        };
        let mut server = Guard::spawn(self.command(Loop::Serve, how, &[]), launcher.server_core())?;
        let ready = server.line(READY_TIMEOUT, |line| line.starts_with("ready "))?;
        let (word, amount) = match length {
            Length::Milliseconds(milliseconds) => ("--milliseconds", milliseconds.to_string()),
            Length::Trips(trips) => ("--trips", trips.to_string()),
        };
        let more = ["--address", ready.trim_start_matches("ready "), word, &amount];
        let client = Guard::spawn(self.command(Loop::Call, how, &more), launcher.client_core())?.finish(limit);
        let served = server.complete(SERVER_END_LIMIT);
        let (client, served) = match (client, served) {
            (Ok(client), Ok(served)) => (Findings::parse(&client)?, Findings::parse(&served)?),
            (Ok(_), Err(error)) => return Err(error),
            (Err(error), _) => bail!("{error:#}; the other loop{}", server.said()),
        };
        let trips = client.value("trips")?;
        let frames = client.value("frames_sent")? + served.value("frames_sent")?;
        let bytes = client.value("bytes_sent")?.min(served.value("bytes_sent")?);
        ensure!(bytes >= trips * size_bytes as f64, "proxies carried {bytes} bytes in {trips} trips of {size_bytes}");
        Ok(Found {
            latencies: client.latencies()?,
            idle_turn_ns: client.value("idle_turn_ns")?,
            idle_receive_ns: client.value("idle_receive_ns")?,
            frames_per_trip: frames / trips,
        })
    }

    fn command(&self, which: Loop, how: How, more: &[&str]) -> Command {
        let node = &rack().nodes[which.slots().0].name;
        let mut command = Command::new(&self.program);
        command.args(["run", "--require-lane", "--node", node, "--rack"]).arg(self.places.node(node).directory);
        command.arg("--").arg(&self.program).args(["bench", "interleaved", which.word(), "--places"]);
        command.arg(&self.places.directory).args(["--message-bytes", &how.size_bytes.to_string()]);
        command.args(["--asks", how.asks.word()]).args(more);
        command
    }
}

/// Waits until the device server listens.
fn wait_for(socket: &Path, server: &Guard) -> Result<()> {
    let deadline = Instant::now() + READY_TIMEOUT;
    while UnixStream::connect(socket).is_err() {
        ensure!(
            Instant::now() < deadline,
            "the device server does not listen at {}{}",
            socket.display(),
            server.said()
        );
        std::thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}

/// The words by which a child is told where things lie.
pub fn places(directory: &Path) -> Places {
    Places { directory: directory.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_never_in_one_loop() {
        let way = [(Loop::Call, true), (Loop::Serve, false), (Loop::Call, false), (Loop::Serve, true)];
        let slot = |(which, is_program): (Loop, bool)| if is_program { which.slots().0 } else { which.slots().1 };
        assert_eq!(way.map(slot), [1, 1, 0, 0], "client, its proxy, the server's proxy, the server");
        assert!(way.windows(2).all(|pair| pair[0].0 != pair[1].0));
    }
}
