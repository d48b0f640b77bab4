//! Starts a pair of probes over one of the transports, each process on its own core.

use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use machine::CorePair;
use serde::Serialize;

use crate::probe::{Probe, ProbeOutput, Probes};
use crate::process::{ChildGuard, Scratch};

/// Address of node a, which is the same over kernel TCP and over lanes.
pub const NODE_A: &str = "127.77.0.1";
pub const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time that a server may run after its client has ended.
const SERVER_END_LIMIT: Duration = Duration::from_secs(5);

/// The option without which a connection may silently use kernel TCP.
const REQUIRE_LANE: &str = "--require-lane";

/// The transports that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    KernelTcp,
    KernelTcpSpinning,
    AfUnix,
    Crosslane,
    /// Crosslane with the build of the library that serves as the baseline.
    Baseline,
}

impl Transport {
    pub fn title(self) -> &'static str {
        match self {
            Self::KernelTcp => "kernel TCP",
            Self::KernelTcpSpinning => "TCP spinning",
            Self::AfUnix => "AF_UNIX",
            Self::Crosslane => "Crosslane",
            Self::Baseline => "the baseline",
        }
    }
}

/// The output of a pair of probes.
pub struct PairOutput {
    pub server: ProbeOutput,
    pub client: ProbeOutput,
}

/// The node of one endpoint of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// No node: the program's addresses stay as they are.
    Unnamed,
    A,
    B,
}

/// The endpoints of a connection, and how each is started.
#[derive(Clone, Debug, Default)]
pub struct Endpoints {
    /// Command line before that of the server.
    pub server: Vec<OsString>,
    /// Command line before that of the client.
    pub client: Vec<OsString>,
    /// Address on which the server listens.
    pub address: String,
    /// Environment variables of both.
    pub environment: Vec<(OsString, OsString)>,
}

/// Counts of pairs of probes by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PairCounts {
    /// Pairs started.
    pub pairs: u32,
    /// Clients that failed, were killed, or did not end in time.
    pub clients_failed: u32,
    /// Servers that were never ready, or failed although their clients did not.
    pub servers_failed: u32,
    /// Servers that still ran after their clients had ended, and were killed.
    pub servers_left_waiting: u32,
}

impl PairCounts {
    /// Returns the counts as a sentence.
    pub fn sentence(&self) -> String {
        format!(
            "Of {} pairs of programs, {} clients and {} servers failed; {} servers still ran after the end of their \
             clients.",
            self.pairs, self.clients_failed, self.servers_failed, self.servers_left_waiting
        )
    }
}

/// A shared counter of pairs.
#[derive(Clone, Debug, Default)]
struct Counter(Rc<Cell<PairCounts>>);

impl Counter {
    fn count(&self, count: impl FnOnce(&mut PairCounts)) {
        let mut counts = self.0.get();
        count(&mut counts);
        self.0.set(counts);
    }
}

/// A pair of running probes.
pub struct RunningPair {
    server: ChildGuard,
    client: ChildGuard,
    counter: Counter,
}

impl RunningPair {
    /// Waits for a line of the client that begins with `begin`.
    pub fn client_line(&mut self, begin: &str, timeout: Duration) -> Result<String> {
        let line = self.client.line(timeout, |line| line.starts_with(begin));
        line.inspect_err(|_| self.counter.count(|counts| counts.clients_failed += 1))
    }

    /// Waits until both have ended. A server that still runs some time after its client has ended is killed.
    pub fn finish(self, timeout: Duration) -> Result<PairOutput> {
        self.finish_within(timeout, SERVER_END_LIMIT)
    }

    fn finish_within(self, client_limit: Duration, server_limit: Duration) -> Result<PairOutput> {
        let Self { mut server, client, counter } = self;
        let client = client.finish(client_limit);
        let served = server.complete(server_limit);
        let is_left_waiting = served.is_err() && !server.has_ended();
        counter.count(|counts| {
            counts.clients_failed += u32::from(client.is_err());
            counts.servers_left_waiting += u32::from(is_left_waiting);
            counts.servers_failed += u32::from(client.is_ok() && served.is_err() && !is_left_waiting);
        });
        match (client, served) {
            (Ok(client), Ok(served)) => {
                Ok(PairOutput { server: ProbeOutput::parse(&served)?, client: ProbeOutput::parse(&client)? })
            }
            (Ok(_), Err(error)) if is_left_waiting => bail!("the client had ended, and {error:#}"),
            (Ok(_), Err(error)) => Err(error),
            (Err(error), _) if is_left_waiting => bail!("{error:#}; the server still ran{}", server.stderr_summary()),
            (Err(error), _) if server.stderr_summary().is_empty() => bail!("{error:#}; the server printed no error"),
            (Err(error), _) => bail!("{error:#}; the server{}", server.stderr_summary()),
        }
    }
}

/// Returns the command line that precedes a program to start it over a transport; empty except for lanes.
type Prefix = Box<dyn Fn(Transport, Node) -> Vec<OsString>>;

/// The builds of the library to load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Libraries {
    /// For [`Transport::Crosslane`]; by default the one that `crosslane run` finds.
    pub library: Option<PathBuf>,
    /// For [`Transport::Baseline`].
    pub baseline: Option<PathBuf>,
}

/// Starts the processes of each transport.
pub struct Launcher {
    prefix: Prefix,
    probes: Probes,
    scratch: Scratch,
    sockets_made: Cell<u32>,
    counter: Counter,
    pub cores: Option<CorePair>,
}

impl Launcher {
    /// Returns a launcher that uses this program for Crosslane: `CURRENT_EXE run --require-lane -- PROGRAM ...`.
    pub fn new() -> Result<Self> {
        Self::with_libraries(Libraries::default())
    }

    /// Returns the same with the given libraries.
    pub fn with_libraries(libraries: Libraries) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        Self::with_prefix(Box::new(move |transport, node| {
            let library = match transport {
                Transport::Crosslane => &libraries.library,
                Transport::Baseline => &libraries.baseline,
                Transport::KernelTcp | Transport::KernelTcpSpinning | Transport::AfUnix => return Vec::new(),
            };
            let mut words: Vec<OsString> = vec![program.clone().into(), "run".into(), REQUIRE_LANE.into()];
            if let Some(library) = library {
                words.extend(["--library".into(), library.clone().into()]);
            }
            match node {
                Node::Unnamed => {}
                Node::A => words.extend(["--node".into(), "a".into()]),
                Node::B => words.extend(["--node".into(), "b".into()]),
            }
            words.push("--".into());
            words
        }))
    }

    /// Returns a launcher that uses another program in place of Crosslane.
    #[cfg(test)]
    pub fn with_wrapper(word: &str) -> Result<Self> {
        let word = OsString::from(word);
        Self::with_prefix(Box::new(move |transport, _| match transport {
            Transport::Crosslane | Transport::Baseline => vec![word.clone()],
            Transport::KernelTcp | Transport::KernelTcpSpinning | Transport::AfUnix => Vec::new(),
        }))
    }

    fn with_prefix(prefix: Prefix) -> Result<Self> {
        crate::process::stop_children_on_signal();
        let scratch = Scratch::new()?;
        let probes = Probes::build(scratch.path())?;
        let (sockets_made, counter) = (Cell::new(0), Counter::default());
        Ok(Self { prefix, probes, scratch, sockets_made, counter, cores: CorePair::of_this_machine()? })
    }

    /// Returns the counts of the pairs so far.
    pub fn pair_counts(&self) -> PairCounts {
        self.counter.0.get()
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

    /// Returns the command that starts `program` over `transport`.
    pub fn command(&self, transport: Transport, node: Node, program: &Path) -> Command {
        prefixed(&(self.prefix)(transport, node), program)
    }

    fn probe(&self, transport: Transport, node: Node, probe: Probe, args: &[&str]) -> Command {
        let mut words = (self.prefix)(transport, node);
        // Connections of a few bytes use kernel TCP. If lanes were required, each would try to get one.
        words.retain(|word| probe != Probe::Connects || word != REQUIRE_LANE);
        let mut command = prefixed(&words, &self.probes.path(probe));
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
    ) -> Result<PairOutput> {
        self.start(&self.endpoints(transport), probe, server, client)?.finish(timeout)
    }

    /// Returns the words before the command line of a program that starts it over a transport, with lanes where it can
    /// have them.
    pub fn launcher_words(&self, transport: Transport) -> Vec<OsString> {
        (self.prefix)(transport, Node::Unnamed).into_iter().filter(|word| word != REQUIRE_LANE).collect()
    }

    /// Runs `probe serve ADDRESS` and `probe call ADDRESS CLIENT_ARGS` until the client has ended, and ends the server.
    pub fn pair_until_client_ends(
        &self,
        endpoints: &Endpoints,
        probe: Probe,
        client: &[&str],
        timeout: Duration,
    ) -> Result<ProbeOutput> {
        let RunningPair { server, client, .. } = self.start(endpoints, probe, &[], client)?;
        let output = client.finish(timeout);
        drop(server);
        ProbeOutput::parse(&output?)
    }

    /// Runs a probe without the library until it has ended.
    pub fn run_bare(&self, probe: Probe, args: &[OsString], timeout: Duration) -> Result<ProbeOutput> {
        let mut command = self.command(Transport::KernelTcp, Node::Unnamed, &self.probes.path(probe));
        command.args(args);
        ProbeOutput::parse(&ChildGuard::spawn(command, self.client_core())?.finish(timeout)?)
    }

    /// Returns the endpoints over a transport of this machine.
    pub fn endpoints(&self, transport: Transport) -> Endpoints {
        let words = (self.prefix)(transport, Node::Unnamed);
        let address = self.fresh_address(transport);
        Endpoints { server: words.clone(), client: words, address, environment: Vec::new() }
    }

    /// Starts `probe serve ADDRESS SERVER_ARGS`, and once that listens, `probe call ADDRESS CLIENT_ARGS`.
    pub fn start(&self, endpoints: &Endpoints, probe: Probe, server: &[&str], client: &[&str]) -> Result<RunningPair> {
        let program = self.probes.path(probe);
        let command = |prefix: &[OsString], args: &[&str]| {
            let mut command = prefixed(prefix, &program);
            command.args(args).envs(endpoints.environment.iter().map(|(name, value)| (name, value)));
            command
        };
        let serve = command(&endpoints.server, &[&["serve", &endpoints.address], server].concat());
        self.counter.count(|counts| counts.pairs += 1);
        let is_ready = |mut server: ChildGuard| {
            let ready = server.line(READY_TIMEOUT, |line| line.starts_with("ready "))?;
            Ok((server, ready))
        };
        let server = ChildGuard::spawn(serve, self.server_core()).and_then(is_ready);
        let (server, ready) = server.inspect_err(|_| self.counter.count(|counts| counts.servers_failed += 1))?;
        let call = command(&endpoints.client, &[&["call", ready.trim_start_matches("ready ")], client].concat());
        let client = ChildGuard::spawn(call, self.client_core());
        let client = client.inspect_err(|_| self.counter.count(|counts| counts.clients_failed += 1))?;
        Ok(RunningPair { server, client, counter: self.counter.clone() })
    }

    /// Runs the Redis client against a running server.
    pub fn resp(&self, transport: Transport, args: &[&str], timeout: Duration) -> Result<ProbeOutput> {
        let command = self.probe(transport, Node::B, Probe::Resp, args);
        ProbeOutput::parse(&ChildGuard::spawn(command, self.client_core())?.finish(timeout)?)
    }

    /// Runs the floor probe, which pins its threads itself.
    pub fn floor(&self, args: &[&str]) -> Result<ProbeOutput> {
        let command = self.probe(Transport::KernelTcp, Node::Unnamed, Probe::Floor, args);
        ProbeOutput::parse(&ChildGuard::spawn(command, None)?.finish(READY_TIMEOUT)?)
    }

    fn fresh_address(&self, transport: Transport) -> String {
        if transport == Transport::AfUnix { self.fresh_path() } else { format!("{NODE_A}:0") }
    }

    /// Returns a path for a socket that does not exist yet.
    pub fn fresh_path(&self) -> String {
        self.sockets_made.set(self.sockets_made.get() + 1);
        self.scratch().join(format!("{}.sock", self.sockets_made.get())).display().to_string()
    }
}

/// Returns the command of a program with the words of `prefix` before it.
fn prefixed(prefix: &[OsString], program: &Path) -> Command {
    let Some((first, rest)) = prefix.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_crosslane_transport_uses_crosslane_run() {
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
    fn each_transport_loads_its_build_of_the_library() {
        let (library, baseline) = (Some("/new.so".into()), Some("/old.so".into()));
        let launcher = Launcher::with_libraries(Libraries { library, baseline }).unwrap();
        let line = |transport| {
            crate::process::command_line(&launcher.command(transport, Node::Unnamed, Path::new("/bin/true")))
        };
        assert!(line(Transport::Crosslane).ends_with(" run --require-lane --library /new.so -- /bin/true"));
        assert!(line(Transport::Baseline).ends_with(" run --require-lane --library /old.so -- /bin/true"));
    }

    #[test]
    fn an_error_names_the_command_that_cannot_start() {
        let launcher = Launcher::with_wrapper("/nonexistent/crosslane").unwrap();
        let args = ["blocking", "8"];
        let error = launcher.pair(Transport::Crosslane, Probe::RoundTrip, &args, &args, READY_TIMEOUT).err().unwrap();
        assert!(format!("{error:#}").contains("cannot start `/nonexistent/crosslane "), "{error:#}");
    }

    /// Runs a pair whose client is a shell script in place of the probe.
    fn pair_with_client(launcher: &Launcher, script: &str) -> anyhow::Error {
        let endpoints = launcher.endpoints(Transport::KernelTcp);
        let endpoints = Endpoints { client: ["/bin/sh", "-c", script].map(OsString::from).into(), ..endpoints };
        let pair = launcher.start(&endpoints, Probe::RoundTrip, &["blocking", "8"], &[]).unwrap();
        pair.finish_within(READY_TIMEOUT, Duration::from_millis(20)).err().unwrap()
    }

    #[test]
    fn a_server_that_outlives_its_client_is_killed_and_both_are_counted() {
        let launcher = Launcher::new().unwrap();
        for (script, how) in [("exit 3", "exit status: 3"), ("kill -9 $$", "signal: 9"), ("exit 0", "had ended")] {
            let error = format!("{:#}", pair_with_client(&launcher, script));
            assert!(error.contains(how) && error.contains("rtt"), "{error}");
            assert!(error.contains("still ran") || error.contains("did not end"), "{error}");
        }
        let counts = PairCounts { pairs: 3, clients_failed: 2, servers_failed: 0, servers_left_waiting: 3 };
        assert_eq!(launcher.pair_counts(), counts);
        assert!(counts.sentence().contains("2 clients"), "{}", counts.sentence());
    }

    #[test]
    fn a_server_that_was_never_ready_is_counted() {
        let launcher = Launcher::with_wrapper("false").unwrap();
        let args = ["blocking", "8"];
        assert!(launcher.pair(Transport::Crosslane, Probe::RoundTrip, &args, &args, READY_TIMEOUT).is_err());
        assert_eq!(launcher.pair_counts(), PairCounts { pairs: 1, servers_failed: 1, ..PairCounts::default() });
    }
}
