//! Racks that the benchmark brings up for itself, and takes down whatever happens.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rack::{Backend, Class, LinkTiming, Partitions, Proxy, Rack, Timing, Trust};
use serde::Deserialize;

use crate::launch::{Ends, Launcher, NODE_A};
use crate::process::{self, Farewell, Guard, Words};

/// How long `crosslane up` may take.
const UP_LIMIT: Duration = Duration::from_secs(60);
/// How long a monitor may take to answer.
const STATUS_LIMIT: Duration = Duration::from_secs(10);
/// What `up` says of a rack whose programs do not get what its file asks for.
const NO_EFFECT: &str = "has no effect";

/// What a rack is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Windows as fast as the memory, written by proxies.
    Proxy,
    /// The same, written by the programs themselves.
    Direct,
    /// Windows behind a modelled link, written by proxies.
    TimedProxy,
    /// The same, written by the programs themselves.
    TimedDirect,
    /// One partition, without slices.
    Unsliced,
    /// One partition, with slices.
    Sliced,
}

impl Kind {
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

    /// The rack: an example with what makes this kind.
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

/// A rack that is up. It goes down when this is dropped, or when we are told to stop.
pub struct UpRack {
    program: PathBuf,
    file: PathBuf,
    environment: Vec<(OsString, OsString)>,
    /// Why its programs do not get what its file asks for, if they do not.
    pub missing: Option<String>,
    _down: Farewell,
}

impl UpRack {
    /// Brings one up, in the launcher's own directory.
    pub fn up(launcher: &Launcher, kind: Kind) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let file = launcher.scratch().join(format!("{}.toml", kind.name()));
        std::fs::write(&file, kind.rack().to_string()).with_context(|| format!("writing {}", file.display()))?;
        let environment = vec![(OsString::from("CROSSLANE_RACK"), launcher.scratch().join("racks").into_os_string())];
        let words = |verb: &str| Words {
            words: vec![program.clone().into(), verb.into(), "--rack".into(), file.clone().into()],
            environment: environment.clone(),
        };
        let down = Farewell::new(words("down"));
        // Monitors and proxies run off the cores of the programs, where there are enough.
        let mut up = process::off_cores(launcher.cores, || Guard::spawn(words("up").command(), None))??;
        up.complete(UP_LIMIT)?;
        let said = up.said();
        let missing = said.contains(NO_EFFECT).then(|| said.trim_start_matches(": crosslane: ").to_owned());
        Ok(Self { program, file, environment, missing, _down: down })
    }

    /// A server in node a and a client in node b.
    pub fn ends(&self) -> Ends {
        let words = |node: &str| {
            let run = ["run", "--require-lane", "--node", node, "--rack"].map(OsString::from);
            let mut words = vec![self.program.clone().into_os_string()];
            words.extend(run);
            words.extend([self.file.clone().into_os_string(), "--".into()]);
            words
        };
        let (server, client) = (words("a"), words("b"));
        Ends { server, client, address: format!("{NODE_A}:0"), environment: self.environment.clone() }
    }

    /// What each node's proxy says that it has done.
    pub fn counts(&self) -> Result<Vec<Counts>> {
        let words = ["stat", "--json", "--rack"].map(OsString::from);
        let mut command = vec![self.program.clone().into_os_string()];
        command.extend(words);
        command.push(self.file.clone().into_os_string());
        let stat = Words { words: command, environment: self.environment.clone() };
        let lines = Guard::spawn(stat.command(), None)?.finish(STATUS_LIMIT)?;
        let stat: Stat = serde_json::from_str(&lines.join("\n")).context("reading `crosslane stat --json`")?;
        if stat.proxies.is_empty() {
            Err(anyhow!("no monitor of {} answers", self.file.display()))
        } else {
            Ok(stat.proxies)
        }
    }
}

/// What of `crosslane stat --json` is of interest here.
#[derive(Deserialize)]
struct Stat {
    #[serde(default)]
    proxies: Vec<Counts>,
}

/// What a proxy has done.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Counts {
    /// Its node.
    pub node: String,
    /// Bytes that it sent.
    pub bytes_sent: u64,
    /// Copies of each byte sent that the node makes.
    pub copies_per_byte_sent: Option<f64>,
    /// Copies of each byte received that the node makes.
    pub copies_per_byte_received: Option<f64>,
    /// Frames sent.
    pub frames_sent: u64,
    /// How many of them the peer was shown at once.
    #[serde(default)]
    pub frames_per_publish: Option<f64>,
    /// Times that the peer was rung.
    pub rings_peer: u64,
    /// Times without credit.
    pub stalls: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_a_rack_that_a_file_can_say() {
        for kind in [Kind::Proxy, Kind::Direct, Kind::TimedProxy, Kind::TimedDirect, Kind::Unsliced, Kind::Sliced] {
            let text = kind.rack().to_string();
            let read = rack::RackFile::parse(std::path::Path::new("r.toml"), text.as_bytes()).unwrap();
            assert_eq!(read.rack, kind.rack(), "{text}");
        }
    }
}
