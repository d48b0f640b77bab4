//! Starts a pair of probes over one of the transports compared, each process on its own core.

use std::cell::Cell;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;

use crate::probe::{Findings, Probe, Probes};
use crate::process::{Guard, Scratch};

/// The address of node a: the same over kernel TCP and over lanes.
pub const NODE_A: &str = "127.77.0.1";
pub const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    KernelTcp,
    KernelTcpSpinning,
    AfUnix,
    Crosslane,
}

impl Transport {
    pub fn title(self) -> &'static str {
        match self {
            Self::KernelTcp => "kernel TCP",
            Self::KernelTcpSpinning => "TCP spinning",
            Self::AfUnix => "AF_UNIX",
            Self::Crosslane => "Crosslane",
        }
    }
}

/// The two cores a measurement uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cores {
    /// The one that answers.
    pub server: usize,
    /// The one that asks.
    pub client: usize,
}

impl Cores {
    /// Two of the allowed cores, of different physical cores if there are such. `None` with fewer than two.
    fn choose(allowed: &[usize], shares_a_core: impl Fn(usize, usize) -> bool) -> Option<Self> {
        let (server, others) = allowed.split_first()?;
        let apart = others.iter().find(|other| !shares_a_core(*server, **other));
        Some(Self { server: *server, client: *apart.or(others.first())? })
    }

    /// Those of this machine; `None` with fewer than two.
    ///
    /// # Errors
    /// If the kernel does not tell the affinity.
    pub fn of_this_machine() -> Result<Option<Self>> {
        Self::among(|_| true)
    }

    /// Those of this machine that `keep` keeps; `None` with fewer than two.
    ///
    /// # Errors
    /// If the kernel does not tell the affinity.
    pub fn among(keep: impl Fn(usize) -> bool) -> Result<Option<Self>> {
        let set = sched_getaffinity(None).context("reading the CPU affinity")?;
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core) && keep(*core)).collect();
        Ok(Self::choose(&allowed, |one, other| {
            let path = format!("/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list");
            std::fs::read_to_string(path).is_ok_and(|list| in_cpu_list(list.trim(), other))
        }))
    }
}

/// Whether a list like `0,4-7` names `core`.
pub fn in_cpu_list(list: &str, core: usize) -> bool {
    list.split(',').any(|part| match part.split_once('-') {
        Some((first, last)) => {
            first.parse().is_ok_and(|first: usize| first <= core) && last.parse().is_ok_and(|last: usize| core <= last)
        }
        None => part.parse() == Ok(core),
    })
}

/// What a pair of probes found.
pub struct Pair {
    pub server: Findings,
    pub client: Findings,
}

/// One end of a connection, by the name of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// No node of its own: the program's addresses stay as they are.
    Unnamed,
    A,
    B,
}

/// Where the two ends of a connection run, and how each is started.
#[derive(Clone, Debug, Default)]
pub struct Ends {
    /// Words before the server's own.
    pub server: Vec<OsString>,
    /// Words before the client's own.
    pub client: Vec<OsString>,
    /// Where the server listens.
    pub address: String,
    /// Set for both.
    pub environment: Vec<(OsString, OsString)>,
}

/// Two probes that talk.
pub struct Running {
    server: Guard,
    client: Guard,
}

impl Running {
    /// Waits for a line of the client that begins so.
    pub fn client_line(&mut self, begin: &str, timeout: Duration) -> Result<String> {
        self.client.line(timeout, |line| line.starts_with(begin))
    }

    /// Waits until both have ended.
    pub fn finish(self, timeout: Duration) -> Result<Pair> {
        let Self { server, client } = self;
        let client = match client.finish(timeout) {
            Ok(lines) => Findings::parse(&lines)?,
            Err(error) => bail!(
                "{error:#}; the server{}",
                if server.said().is_empty() { " said nothing".to_owned() } else { server.said() }
            ),
        };
        let server = Findings::parse(&server.finish(READY_TIMEOUT)?)?;
        Ok(Pair { server, client })
    }
}

/// The words before a program's own that start it over lanes.
type Prefix = Box<dyn Fn(Node) -> Vec<OsString>>;

/// Knows how each transport's processes are started.
pub struct Launcher {
    crosslane: Prefix,
    probes: Probes,
    scratch: Scratch,
    sockets_made: Cell<u32>,
    pub cores: Option<Cores>,
}

impl Launcher {
    /// Crosslane is this very program: `CURRENT_EXE run --require-lane -- PROGRAM ...`.
    pub fn new() -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        Self::with_prefix(Box::new(move |node| {
            let mut words: Vec<OsString> = vec![program.clone().into(), "run".into(), "--require-lane".into()];
            match node {
                Node::Unnamed => {}
                Node::A => words.extend(["--node".into(), "a".into()]),
                Node::B => words.extend(["--node".into(), "b".into()]),
            }
            words.push("--".into());
            words
        }))
    }

    /// Something else in Crosslane's place.
    #[cfg(test)]
    pub fn with_stand_in(word: &str) -> Result<Self> {
        let word = OsString::from(word);
        Self::with_prefix(Box::new(move |_| vec![word.clone()]))
    }

    fn with_prefix(crosslane: Prefix) -> Result<Self> {
        crate::process::stop_children_on_signal();
        let scratch = Scratch::new()?;
        let probes = Probes::build(scratch.path())?;
        Ok(Self { crosslane, probes, scratch, sockets_made: Cell::new(0), cores: Cores::of_this_machine()? })
    }

    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    pub fn server_core(&self) -> Option<usize> {
        self.cores.map(|cores| cores.server)
    }

    pub fn client_core(&self) -> Option<usize> {
        self.cores.map(|cores| cores.client)
    }

    /// `program` as it is started over `transport`.
    pub fn command(&self, transport: Transport, node: Node, program: &Path) -> Command {
        after(&if transport == Transport::Crosslane { (self.crosslane)(node) } else { Vec::new() }, program)
    }

    fn probe(&self, transport: Transport, node: Node, probe: Probe, args: &[&str]) -> Command {
        let mut command = self.command(transport, node, &self.probes.path(probe));
        command.args(args);
        command
    }

    /// Runs `probe serve ADDRESS SERVER_ARGS` and `probe call ADDRESS CLIENT_ARGS` until both have ended.
    pub fn pair(
        &self,
        transport: Transport,
        probe: Probe,
        server: &[&str],
        client: &[&str],
        timeout: Duration,
    ) -> Result<Pair> {
        self.start(&self.ends(transport), probe, server, client)?.finish(timeout)
    }

    /// Both ends over a transport of this machine.
    pub fn ends(&self, transport: Transport) -> Ends {
        let words = if transport == Transport::Crosslane { (self.crosslane)(Node::Unnamed) } else { Vec::new() };
        let address = self.fresh_address(transport);
        Ends { server: words.clone(), client: words, address, environment: Vec::new() }
    }

    /// Starts `probe serve ADDRESS SERVER_ARGS`, and once that listens `probe call ADDRESS CLIENT_ARGS`.
    pub fn start(&self, ends: &Ends, probe: Probe, server: &[&str], client: &[&str]) -> Result<Running> {
        let program = self.probes.path(probe);
        let command = |words: &[OsString], args: &[&str]| {
            let mut command = after(words, &program);
            command.args(args).envs(ends.environment.iter().map(|(name, value)| (name, value)));
            command
        };
        let serve = command(&ends.server, &[&["serve", &ends.address], server].concat());
        let mut server = Guard::spawn(serve, self.server_core())?;
        let ready = server.line(READY_TIMEOUT, |line| line.starts_with("ready "))?;
        let call = command(&ends.client, &[&["call", ready.trim_start_matches("ready ")], client].concat());
        Ok(Running { server, client: Guard::spawn(call, self.client_core())? })
    }

    /// Runs the Redis client against a server that is there already.
    pub fn resp(&self, transport: Transport, args: &[&str], timeout: Duration) -> Result<Findings> {
        let command = self.probe(transport, Node::B, Probe::Resp, args);
        Findings::parse(&Guard::spawn(command, self.client_core())?.finish(timeout)?)
    }

    /// Runs the floor probe, which pins itself.
    pub fn floor(&self, args: &[&str]) -> Result<Findings> {
        let command = self.probe(Transport::KernelTcp, Node::Unnamed, Probe::Floor, args);
        Findings::parse(&Guard::spawn(command, None)?.finish(READY_TIMEOUT)?)
    }

    fn fresh_address(&self, transport: Transport) -> String {
        if transport != Transport::AfUnix {
            return format!("{NODE_A}:0");
        }
        self.sockets_made.set(self.sockets_made.get() + 1);
        self.scratch().join(format!("{}.sock", self.sockets_made.get())).display().to_string()
    }
}

/// A program behind the words that start it.
fn after(words: &[OsString], program: &Path) -> Command {
    let Some((first, rest)) = words.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_are_avoided_when_there_is_a_choice() {
        let same_core = |one: usize, other: usize| one / 2 == other / 2;
        assert_eq!(Cores::choose(&[0, 1, 2, 3], same_core), Some(Cores { server: 0, client: 2 }));
        assert_eq!(Cores::choose(&[4, 5], same_core), Some(Cores { server: 4, client: 5 }));
        assert_eq!(Cores::choose(&[3], same_core), None);
        assert_eq!(Cores::choose(&[], same_core), None);
    }

    #[test]
    fn cpu_lists_are_read() {
        assert!(in_cpu_list("0,4-7", 0) && in_cpu_list("0,4-7", 5) && in_cpu_list("0,4-7", 7));
        assert!(!in_cpu_list("0,4-7", 1) && !in_cpu_list("0,4-7", 8) && !in_cpu_list("", 0) && !in_cpu_list("x-y", 0));
    }

    #[test]
    fn only_crosslane_is_started_through_crosslane() {
        let launcher = Launcher::new().unwrap();
        let own = std::env::current_exe().unwrap();
        let line =
            |transport, node| crate::process::command_line(&launcher.command(transport, node, Path::new("/bin/true")));
        let run = format!("{} run --require-lane", own.display());
        assert_eq!(line(Transport::Crosslane, Node::Unnamed), format!("{run} -- /bin/true"));
        assert_eq!(line(Transport::Crosslane, Node::A), format!("{run} --node a -- /bin/true"));
        assert_eq!(line(Transport::Crosslane, Node::B), format!("{run} --node b -- /bin/true"));
        assert_eq!(line(Transport::KernelTcp, Node::A), "/bin/true");
        assert_eq!(line(Transport::AfUnix, Node::Unnamed), "/bin/true");
    }

    #[test]
    fn a_crosslane_that_cannot_start_is_an_error_naming_its_command() {
        let launcher = Launcher::with_stand_in("/nonexistent/crosslane").unwrap();
        let args = ["blocking", "8"];
        let error = launcher.pair(Transport::Crosslane, Probe::RoundTrip, &args, &args, READY_TIMEOUT).err().unwrap();
        assert!(format!("{error:#}").contains("cannot start `/nonexistent/crosslane "), "{error:#}");
    }
}
