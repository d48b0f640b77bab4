//! The rack of a test: its rack directory and the commands that start programs there.

use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{Finished, Process, Stat, Traffic, WAIT_MAX, is_root, paths};

/// Interval of reads of the stats pages, each of which starts a process.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The user `nobody`, which owns no files here.
pub const NOBODY: u32 = 65534;

/// A rack directory that is removed after the test.
pub struct Rack {
    folder: TempDir,
    bare: bool,
    /// Copies of the command and the library that the user nobody can read, for programs that refuse to run as root.
    nobodys: Option<TempDir>,
}

/// In /tmp, regardless of TMPDIR: paths of sockets must be short. Only its owner can access a rack.
fn rack_folder() -> TempDir {
    let owner_only = Permissions::from_mode(0o700);
    tempfile::Builder::new().prefix("rack-").permissions(owner_only).tempdir_in("/tmp").expect("a folder for a rack")
}

fn give_away(folder: &Path) {
    std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY)).expect("root changes the owner of a folder");
}

/// A command that root runs as the user nobody.
pub fn command_as_nobody(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(paths::tool("setpriv"));
    command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()]);
    command.arg("--").arg(program).current_dir("/");
    command
}

impl Default for Rack {
    fn default() -> Self {
        Self::new()
    }
}

impl Rack {
    /// A new, empty rack.
    pub fn new() -> Self {
        let bare = std::env::var_os("CROSSLANE_TEST_BARE").is_some_and(|value| value == "1");
        Self { folder: rack_folder(), bare, nobodys: None }
    }

    /// A new rack, or `None` if all programs run bare.
    pub fn with_lanes() -> Option<Self> {
        Some(Self::new()).filter(|rack| !rack.bare)
    }

    /// A rack whose programs do not run as root even if the test does.
    pub fn unprivileged() -> Self {
        let mut rack = Self::new();
        if is_root() {
            let tools = rack_folder();
            std::fs::set_permissions(tools.path(), Permissions::from_mode(0o755)).expect("a folder for all users");
            for file in [paths::crosslane(), paths::library()] {
                paths::copy_program(&file, &tools.path().join(file.file_name().expect("a name")));
            }
            give_away(rack.path());
            rack.nobodys = Some(tools);
        }
        rack
    }

    /// A folder that the rack's programs can write.
    pub fn scratch(&self) -> TempDir {
        let folder = rack_folder();
        if self.nobodys.is_some() {
            give_away(folder.path());
        }
        folder
    }

    /// The rack directory.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Whether its programs run without lanes in any case.
    pub fn is_bare(&self) -> bool {
        self.bare
    }

    /// A command without Crosslane's variables in its environment.
    pub fn bare_command(&self, program: impl AsRef<OsStr>) -> Command {
        let program = program.as_ref();
        let mut command = if self.nobodys.is_some() { command_as_nobody(program) } else { Command::new(program) };
        command.env_remove("LD_PRELOAD");
        let ours = |name: &OsString| name.as_encoded_bytes().starts_with(b"CROSSLANE_");
        for name in std::env::vars_os().map(|(name, _)| name).filter(ours) {
            command.env_remove(name);
        }
        command
    }

    /// `crosslane SUBCOMMAND` with this rack.
    pub fn crosslane(&self, subcommand: &str) -> Command {
        let copies = self.nobodys.as_ref().map(|tools| tools.path().join("crosslane"));
        let mut command = self.bare_command(copies.unwrap_or_else(paths::crosslane));
        command.arg(subcommand).arg("--rack").arg(self.path());
        command
    }

    /// `crosslane run OPTIONS -- PROGRAM`.
    pub fn run(&self, options: &[&str], program: impl AsRef<OsStr>) -> Command {
        if self.bare {
            return self.bare_command(program);
        }
        let mut command = self.crosslane("run");
        if let Some(library) = paths::library_of_environment().filter(|_| self.nobodys.is_none()) {
            command.arg("--library").arg(library);
        }
        command.args(options).arg("--").arg(program);
        command
    }

    /// A program whose connections must all have lanes.
    pub fn require_lane(&self, program: impl AsRef<OsStr>) -> Command {
        self.run(&["--require-lane"], program)
    }

    /// The current contents of the stats pages.
    #[track_caller]
    pub fn stat(&self) -> Stat {
        let finished = Process::start(self.crosslane("stat").arg("--json")).wait(WAIT_MAX).must_succeed();
        Stat::parse(&finished.stdout)
    }

    /// Runs a client to its end. Also returns the last traffic that its stats page showed.
    pub fn run_watched(&self, command: &mut Command, limit: Duration) -> (Finished, Traffic) {
        let process = Process::start(command);
        let pid = process.pid();
        self.watch(process, limit, |stat| stat.traffic_of_pid(pid).unwrap_or_default())
    }

    /// Waits for a process and returns the maximum traffic that `of` found in the stats pages meanwhile.
    pub fn watch(&self, process: Process, limit: Duration, of: impl Fn(&Stat) -> Traffic) -> (Finished, Traffic) {
        let mut seen = Traffic::default();
        let mut read_at: Option<Instant> = None;
        let finished = process.wait_while(limit, || {
            if self.bare || read_at.is_some_and(|at| at.elapsed() < POLL_INTERVAL) {
                return;
            }
            seen = seen.max(of(&self.stat()));
            read_at = Some(Instant::now());
        });
        (finished, seen)
    }

    /// Panics unless at least this number of bytes crossed lanes. The first requests of each connection use kernel TCP.
    #[track_caller]
    pub fn assert_over_lanes(&self, who: &str, traffic: Traffic, lane_bytes_min: u64) {
        let is_enough = self.bare || traffic.lane_bytes >= lane_bytes_min;
        assert!(is_enough, "{who}: {traffic:?}, want {lane_bytes_min} bytes over lanes");
    }

    /// As [`Rack::assert_over_lanes`], for the running programs of a name.
    #[track_caller]
    pub fn assert_program_over_lanes(&self, program: &str, lane_bytes_min: u64) {
        if !self.bare {
            self.assert_over_lanes(program, self.stat().traffic_of(program), lane_bytes_min);
        }
    }

    /// Number of running programs of a name that have sent bytes over lanes; `None` if all programs run bare.
    #[track_caller]
    pub fn programs_that_sent(&self, program: &str) -> Option<usize> {
        let sent = |process: &&serde_json::Value| process["totals"]["lane_bytes_sent"].as_u64() > Some(0);
        (!self.bare).then(|| self.stat().named(program).filter(sent).count())
    }
}
