//! Racks that the benchmark brings up, and takes down on every exit.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rack::{Backend, Class, LinkTiming, Partitions, Proxy, Rack, Timing, Trust};
use serde::Deserialize;

use crate::launch::{Endpoints, Launcher, NODE_A};
use crate::process::{self, ChildGuard, CleanupCommand, CommandSpec};

/// Time limit of `crosslane up`.
const UP_LIMIT: Duration = Duration::from_secs(60);
/// Time limit of a monitor's response.
const STATUS_LIMIT: Duration = Duration::from_secs(10);
/// Text that `up` prints if the programs of a rack do not get what its file requests.
const NO_EFFECT: &str = "has no effect";

/// A kind of rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RackKind {
    /// Windows with the speed of memory, written by proxies.
    Proxy,
    /// Windows with the speed of memory, written by the programs themselves.
    Direct,
    /// Windows over a modelled link, written by proxies.
    TimedProxy,
    /// Windows over a modelled link, written by the programs themselves.
    TimedDirect,
    /// One partition, without slices.
    Unsliced,
    /// One partition, with slices.
    Sliced,
}

impl RackKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Proxy => "proxy",
            Self::Direct => "direct",
            Self::TimedProxy => "timed-proxy",
            Self::TimedDirect => "timed-direct",
            Self::Unsliced => "unsliced",
            Self::Sliced => "sliced",
        }
    }

    /// Returns the rack: an example with the settings of this kind.
    pub fn rack(self) -> Rack {
        let is_timed = matches!(self, Self::TimedProxy | Self::TimedDirect);
        let is_direct = matches!(self, Self::Direct | Self::TimedDirect);
        let trust = if is_direct { Trust::Direct } else { Trust::Proxy };
        let mut rack = Rack::example(2, Backend::Shm, None, trust);
        rack.name = self.name().to_owned();
        if is_timed {
            rack.link = Some(LinkTiming { timing: Timing::Gen3x16, one_way_ns: Some(super::ONE_WAY_NS) });
        }
        if matches!(self, Self::Unsliced | Self::Sliced) {
            rack.partitions = vec![Partitions { class: Class::Latency, count: 1, cores: None }];
        }
        if self == Self::Unsliced {
            rack.proxy = Proxy { slice_bytes: Some(0) };
        }
        rack
    }
}

/// A rack that is up. It is taken down on drop and on a signal.
pub struct RunningRack {
    program: PathBuf,
    file: PathBuf,
    environment: Vec<(OsString, OsString)>,
    /// Why its programs do not get what its file requests, if they do not.
    pub missing: Option<String>,
    _down: CleanupCommand,
}

impl RunningRack {
    /// Brings up a rack in the launcher's own directory.
    pub fn up(launcher: &Launcher, kind: RackKind) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let file = launcher.scratch().join(format!("{}.toml", kind.name()));
        std::fs::write(&file, kind.rack().to_string()).with_context(|| format!("writing {}", file.display()))?;
        let environment = vec![(OsString::from("CROSSLANE_RACK"), launcher.scratch().join("racks").into_os_string())];
        let words = |verb: &str| CommandSpec {
            arguments: vec![program.clone().into(), verb.into(), "--rack".into(), file.clone().into()],
            environment: environment.clone(),
        };
        let down = CleanupCommand::new(words("down"));
        // Monitors and proxies do not run on the cores of the programs, if there are enough cores.
        let mut up = process::off_cores(launcher.cores, || ChildGuard::spawn(words("up").command(), None))??;
        up.complete(UP_LIMIT)?;
        let stderr = up.stderr_summary();
        let missing = stderr.contains(NO_EFFECT).then(|| stderr.trim_start_matches(": crosslane: ").to_owned());
        Ok(Self { program, file, environment, missing, _down: down })
    }

    /// Returns the endpoints: a server in node a and a client in node b.
    pub fn endpoints(&self) -> Endpoints {
        let words = |node: &str| {
            let run = ["run", "--require-lane", "--node", node, "--rack"].map(OsString::from);
            let mut words = vec![self.program.clone().into_os_string()];
            words.extend(run);
            words.extend([self.file.clone().into_os_string(), "--".into()]);
            words
        };
        let (server, client) = (words("a"), words("b"));
        Endpoints { server, client, address: format!("{NODE_A}:0"), environment: self.environment.clone() }
    }

    /// Returns the counters of each node's proxy.
    pub fn counts(&self) -> Result<Vec<ProxyCounters>> {
        let words = ["stat", "--json", "--rack"].map(OsString::from);
        let mut command = vec![self.program.clone().into_os_string()];
        command.extend(words);
        command.push(self.file.clone().into_os_string());
        let stat = CommandSpec { arguments: command, environment: self.environment.clone() };
        let lines = ChildGuard::spawn(stat.command(), None)?.finish(STATUS_LIMIT)?;
        let stat: Stat = serde_json::from_str(&lines.join("\n")).context("reading `crosslane stat --json`")?;
        if stat.proxies.is_empty() {
            Err(anyhow!("no monitor of {} responds", self.file.display()))
        } else {
            Ok(stat.proxies)
        }
    }
}

/// The part of `crosslane stat --json` that is used here.
#[derive(Deserialize)]
struct Stat {
    #[serde(default)]
    proxies: Vec<ProxyCounters>,
}

/// Counters of a proxy.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ProxyCounters {
    /// Name of the node.
    pub node: String,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Copies of each byte sent that the node makes.
    pub copies_per_byte_sent: Option<f64>,
    /// Copies of each byte received that the node makes.
    pub copies_per_byte_received: Option<f64>,
    /// Frames sent.
    pub frames_sent: u64,
    /// Average number of frames made visible to the peer at once.
    #[serde(default)]
    pub frames_per_publish: Option<f64>,
    /// Number of doorbells of the peer that were rung.
    pub rings_peer: u64,
    /// Number of times without credit.
    pub stalls: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_rack_survives_its_file_form() {
        for kind in [
            RackKind::Proxy,
            RackKind::Direct,
            RackKind::TimedProxy,
            RackKind::TimedDirect,
            RackKind::Unsliced,
            RackKind::Sliced,
        ] {
            let text = kind.rack().to_string();
            let read = rack::RackFile::parse(std::path::Path::new("r.toml"), text.as_bytes()).unwrap();
            assert_eq!(read.rack, kind.rack(), "{text}");
        }
    }
}
