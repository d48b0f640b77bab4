//! Starts a pair of probes over one of the transports compared, each process on its own core.

use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use machine::CorePair;
use serde::Serialize;

use crate::probe::{Findings, Probe, Probes};
use crate::process::{Guard, Scratch};

/// The address of node a: the same over kernel TCP and over lanes.
pub const NODE_A: &str = "127.77.0.1";
pub const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server may go on once its client has ended.
const SERVER_END_LIMIT: Duration = Duration::from_secs(5);

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    KernelTcp,
    KernelTcpSpinning,
    AfUnix,
    Crosslane,
    /// Crosslane by the build of the library that another is compared with.
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

/// How pairs of probes have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Pairs that were started.
    pub pairs: u32,
    /// Clients that failed, died, or did not end in time.
    pub clients_failed: u32,
    /// Servers that were never ready, or failed though their clients did not.
    pub servers_failed: u32,
    /// Servers that went on when their clients had ended, and were ended.
    pub servers_left_waiting: u32,
}

impl Tally {
    /// For a person.
    pub fn sentence(&self) -> String {
        format!(
            "Of {} pairs of programs, {} clients and {} servers failed; {} servers waited on after their clients' end.",
            self.pairs, self.clients_failed, self.servers_failed, self.servers_left_waiting
        )
    }
}

/// What counts how pairs end.
#[derive(Clone, Debug, Default)]
struct Counter(Rc<Cell<Tally>>);

impl Counter {
    fn count(&self, count: impl FnOnce(&mut Tally)) {
        let mut tally = self.0.get();
        count(&mut tally);
        self.0.set(tally);
    }
}

/// Two probes that talk.
pub struct Running {
    server: Guard,
    client: Guard,
    counter: Counter,
}

impl Running {
    /// Waits for a line of the client that begins so.
    pub fn client_line(&mut self, begin: &str, timeout: Duration) -> Result<String> {
        let line = self.client.line(timeout, |line| line.starts_with(begin));
        line.inspect_err(|_| self.counter.count(|tally| tally.clients_failed += 1))
    }

    /// Waits until both have ended. A server whose client has ended, however it did, does not wait on.
    pub fn finish(self, timeout: Duration) -> Result<Pair> {
        self.finish_within(timeout, SERVER_END_LIMIT)
    }

    fn finish_within(self, client_limit: Duration, server_limit: Duration) -> Result<Pair> {
        let Self { mut server, client, counter } = self;
        let client = client.finish(client_limit);
        let served = server.complete(server_limit);
        let is_left_waiting = served.is_err() && !server.has_ended();
        counter.count(|tally| {
            tally.clients_failed += u32::from(client.is_err());
            tally.servers_left_waiting += u32::from(is_left_waiting);
            tally.servers_failed += u32::from(client.is_ok() && served.is_err() && !is_left_waiting);
        });
        match (client, served) {
            (Ok(client), Ok(served)) => {
                Ok(Pair { server: Findings::parse(&served)?, client: Findings::parse(&client)? })
            }
            (Ok(_), Err(error)) if is_left_waiting => bail!("its client had ended, and {error:#}"),
            (Ok(_), Err(error)) => Err(error),
            (Err(error), _) if is_left_waiting => bail!("{error:#}; the server waited on{}", server.said()),
            (Err(error), _) if server.said().is_empty() => bail!("{error:#}; the server said nothing"),
            (Err(error), _) => bail!("{error:#}; the server{}", server.said()),
        }
    }
}

/// The words before a program's own that start it over a transport: none but for lanes.
type Prefix = Box<dyn Fn(Transport, Node) -> Vec<OsString>>;

/// Which builds of the library are loaded.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Libraries {
    /// Over [`Transport::Crosslane`]: without one, the one that `crosslane run` finds.
    pub library: Option<PathBuf>,
    /// Over [`Transport::Baseline`].
    pub baseline: Option<PathBuf>,
}

/// Knows how each transport's processes are started.
pub struct Launcher {
    prefix: Prefix,
    probes: Probes,
    scratch: Scratch,
    sockets_made: Cell<u32>,
    counter: Counter,
    pub cores: Option<CorePair>,
}

impl Launcher {
    /// Crosslane is this very program: `CURRENT_EXE run --require-lane -- PROGRAM ...`.
    pub fn new() -> Result<Self> {
        Self::with_libraries(Libraries::default())
    }

    /// The same with libraries of the caller's choice.
    pub fn with_libraries(libraries: Libraries) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        Self::with_prefix(Box::new(move |transport, node| {
            let library = match transport {
                Transport::Crosslane => &libraries.library,
                Transport::Baseline => &libraries.baseline,
                Transport::KernelTcp | Transport::KernelTcpSpinning | Transport::AfUnix => return Vec::new(),
            };
            let mut words: Vec<OsString> = vec![program.clone().into(), "run".into(), "--require-lane".into()];
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

    /// Something else in Crosslane's place.
    #[cfg(test)]
    pub fn with_stand_in(word: &str) -> Result<Self> {
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

    /// How the pairs have ended that were started until now.
    pub fn tally(&self) -> Tally {
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

    /// `program` as it is started over `transport`.
    pub fn command(&self, transport: Transport, node: Node, program: &Path) -> Command {
        after(&(self.prefix)(transport, node), program)
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
        let words = (self.prefix)(transport, Node::Unnamed);
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
        self.counter.count(|tally| tally.pairs += 1);
        let is_ready = |mut server: Guard| {
            let ready = server.line(READY_TIMEOUT, |line| line.starts_with("ready "))?;
            Ok((server, ready))
        };
        let server = Guard::spawn(serve, self.server_core()).and_then(is_ready);
        let (server, ready) = server.inspect_err(|_| self.counter.count(|tally| tally.servers_failed += 1))?;
        let call = command(&ends.client, &[&["call", ready.trim_start_matches("ready ")], client].concat());
        let client = Guard::spawn(call, self.client_core());
        let client = client.inspect_err(|_| self.counter.count(|tally| tally.clients_failed += 1))?;
        Ok(Running { server, client, counter: self.counter.clone() })
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
    fn each_build_of_the_library_is_loaded_over_its_own_transport() {
        let (library, baseline) = (Some("/new.so".into()), Some("/old.so".into()));
        let launcher = Launcher::with_libraries(Libraries { library, baseline }).unwrap();
        let line = |transport| {
            crate::process::command_line(&launcher.command(transport, Node::Unnamed, Path::new("/bin/true")))
        };
        assert!(line(Transport::Crosslane).ends_with(" run --require-lane --library /new.so -- /bin/true"));
        assert!(line(Transport::Baseline).ends_with(" run --require-lane --library /old.so -- /bin/true"));
    }

    #[test]
    fn a_crosslane_that_cannot_start_is_an_error_naming_its_command() {
        let launcher = Launcher::with_stand_in("/nonexistent/crosslane").unwrap();
        let args = ["blocking", "8"];
        let error = launcher.pair(Transport::Crosslane, Probe::RoundTrip, &args, &args, READY_TIMEOUT).err().unwrap();
        assert!(format!("{error:#}").contains("cannot start `/nonexistent/crosslane "), "{error:#}");
    }

    /// A client that is a shell's script in place of the probe.
    fn pair_with_client(launcher: &Launcher, script: &str) -> anyhow::Error {
        let ends = launcher.ends(Transport::KernelTcp);
        let ends = Ends { client: ["/bin/sh", "-c", script].map(OsString::from).into(), ..ends };
        let pair = launcher.start(&ends, Probe::RoundTrip, &["blocking", "8"], &[]).unwrap();
        pair.finish_within(READY_TIMEOUT, Duration::from_millis(20)).err().unwrap()
    }

    #[test]
    fn a_server_does_not_wait_on_for_a_client_that_has_ended_and_both_are_counted() {
        let launcher = Launcher::new().unwrap();
        for (script, how) in [("exit 3", "exit status: 3"), ("kill -9 $$", "signal: 9"), ("exit 0", "had ended")] {
            let error = format!("{:#}", pair_with_client(&launcher, script));
            assert!(error.contains(how) && error.contains("rtt"), "{error}");
            assert!(error.contains("waited on") || error.contains("did not end"), "{error}");
        }
        let tally = Tally { pairs: 3, clients_failed: 2, servers_failed: 0, servers_left_waiting: 3 };
        assert_eq!(launcher.tally(), tally);
        assert!(tally.sentence().contains("2 clients"), "{}", tally.sentence());
    }

    #[test]
    fn a_server_that_was_never_ready_is_counted() {
        let launcher = Launcher::with_stand_in("false").unwrap();
        let args = ["blocking", "8"];
        assert!(launcher.pair(Transport::Crosslane, Probe::RoundTrip, &args, &args, READY_TIMEOUT).is_err());
        assert_eq!(launcher.tally(), Tally { pairs: 1, servers_failed: 1, ..Tally::default() });
    }
}
