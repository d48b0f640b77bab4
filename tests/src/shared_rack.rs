//! A rack directory that several users share, which takes root.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mount::{MountFlags, UnmountFlags};
use tempfile::TempDir;

use crate::stat::traffic;
use crate::{Process, Stat, Traffic, WAIT_MAX, c, is_root, netns, paths};

/// The group of the rack's members. No account needs to have it.
const GROUP: u32 = 61_000;
/// Users of the programs.
pub const CLIENTS: u32 = 61_001;
/// Users of the programs.
pub const SERVERS: u32 = 61_002;
/// A member of the group whom no rule names.
pub const STRANGER: u32 = 61_003;

/// A shared rack, and copies of the command and the library that all users can read.
pub struct SharedRack {
    folder: TempDir,
    namespaces: Vec<String>,
    /// The rack is a mount of its own.
    is_mount: bool,
}

impl Drop for SharedRack {
    fn drop(&mut self) {
        self.namespaces.iter().for_each(|name| netns::delete_all(name));
        if self.is_mount {
            let _ = rustix::mount::unmount(self.path(), UnmountFlags::DETACH);
        }
    }
}

impl SharedRack {
    /// A rack without rules. `None` if this user cannot make one, or all programs run bare.
    pub fn new() -> Option<Self> {
        let rack = Self::prepared()?;
        rack.must_manage(&["create"], &["--group", &GROUP.to_string()]);
        Some(rack)
    }

    /// A rack without rules on a file system with room for some tens of files.
    pub fn on_small_file_system() -> Option<Self> {
        let mut rack = Self::prepared()?;
        fs::create_dir(rack.path()).expect("a folder");
        let options = c"size=512k,nr_inodes=64,mode=700";
        rustix::mount::mount("none", rack.path(), "tmpfs", MountFlags::empty(), options).ok()?;
        rack.is_mount = true;
        rack.must_manage(&["create"], &["--group", &GROUP.to_string()]);
        Some(rack)
    }

    fn prepared() -> Option<Self> {
        if !is_root() || std::env::var_os("CROSSLANE_TEST_BARE").is_some_and(|value| value == "1") {
            return None;
        }
        // In /tmp, regardless of TMPDIR: paths of sockets must be short.
        let all = Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().prefix("sr-").permissions(all).tempdir_in("/tmp").expect("a folder");
        for file in [paths::crosslane(), paths::library()] {
            paths::copy_program(&file, &folder.path().join(file.file_name().expect("a name")));
        }
        Some(Self { folder, namespaces: Vec::new(), is_mount: false })
    }

    /// A rack in which [`CLIENTS`] may reach [`SERVERS`].
    pub fn with_rule() -> Option<Self> {
        Self::new().inspect(|rack| rack.allow(CLIENTS, SERVERS))
    }

    /// Mounts the rack where it is, as a container has it. That vouches for it in user namespaces without root.
    pub fn mount(mut self) -> Self {
        rustix::mount::mount_bind(self.path(), self.path()).expect("root mounts");
        self.is_mount = true;
        self
    }

    /// The folder that has the rack and the copies, which all users can read.
    pub fn folder(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    /// The rack directory.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("rack")
    }

    /// The copy of the command.
    pub fn crosslane(&self) -> PathBuf {
        self.folder.path().join("crosslane")
    }

    /// `crosslane rack-dir SUBCOMMAND DIR OPTIONS`.
    pub fn manage(&self, subcommand: &[&str], options: &[&str]) -> Command {
        let mut command = Command::new(self.crosslane());
        command.arg("rack-dir").args(subcommand).arg(self.path()).args(options);
        command
    }

    #[track_caller]
    fn must_manage(&self, subcommand: &[&str], options: &[&str]) {
        Process::start(&mut self.manage(subcommand, options)).wait(WAIT_MAX).must_succeed();
    }

    /// Allows clients of one user to reach servers of another.
    #[track_caller]
    pub fn allow(&self, from: u32, to: u32) {
        self.must_manage(&["allow"], &["--from", &from.to_string(), "--to", &to.to_string()]);
    }

    /// Makes two network namespaces that a cable joins; returns their names and addresses.
    pub fn cable(&mut self) -> [(String, String); 2] {
        let [a, b] = [self.namespace(), self.namespace()];
        let [of_a, of_b] = join([&a, &b], 0);
        [(a, of_a), (b, of_b)]
    }

    /// Makes three network namespaces in a row, of which cables join neighbours. Returns their names, with the
    /// addresses of the second and the third for the one before.
    pub fn row(&mut self) -> ([String; 3], [String; 2]) {
        let row = [self.namespace(), self.namespace(), self.namespace()];
        let [_, second] = join([&row[0], &row[1]], 0);
        let [_, third] = join([&row[1], &row[2]], 1);
        (row, [second, third])
    }

    fn namespace(&mut self) -> String {
        static NAMESPACES: AtomicU32 = AtomicU32::new(0);
        let name = format!("sr{:x}-{}", std::process::id(), NAMESPACES.fetch_add(1, Ordering::Relaxed));
        netns::add(&name);
        self.namespaces.push(name.clone());
        name
    }

    /// A program of a user, who is a member of the group, without the library.
    pub fn bare_as(&self, uid: u32, namespace: Option<&str>, program: impl AsRef<OsStr>) -> Command {
        let setpriv = paths::tool("setpriv");
        let mut command = match namespace {
            Some(name) => netns::command(name, setpriv),
            None => Command::new(setpriv),
        };
        command.args([format!("--reuid={uid}"), format!("--regid={uid}"), format!("--groups={GROUP}")]);
        command.arg("--").arg(program).current_dir("/");
        command.env_remove("LD_PRELOAD").env("CROSSLANE_RACK", self.path());
        command
    }

    /// A program of a user, by its number in a user namespace with a map, whose connections must all have lanes. It is
    /// no member of the group.
    pub fn require_lane_in(&self, map: &str, uid: u32, namespace: Option<&str>, program: impl AsRef<OsStr>) -> Command {
        let source = [paths::package_file("probes/user_namespace.c")];
        let probe = self.folder().join("user_namespace");
        paths::copy_program(&c::build("user_namespace", &source, &["-Wall", "-Werror"]), &probe);
        let mut command = match namespace {
            Some(name) => netns::command(name, probe),
            None => Command::new(probe),
        };
        command.arg(map).arg(uid.to_string()).arg(self.crosslane()).args(["run", "--require-lane", "--"]).arg(program);
        command.current_dir("/").env_remove("LD_PRELOAD").env("CROSSLANE_RACK", self.path());
        command
    }

    /// `crosslane run OPTIONS -- PROGRAM` of a user.
    pub fn run_as(&self, uid: u32, namespace: Option<&str>, options: &[&str], program: impl AsRef<OsStr>) -> Command {
        let mut command = self.bare_as(uid, namespace, self.crosslane());
        command.arg("run").args(options).arg("--").arg(program);
        command
    }

    /// A program whose connections must all have lanes.
    pub fn require_lane(&self, uid: u32, namespace: Option<&str>, program: impl AsRef<OsStr>) -> Command {
        self.run_as(uid, namespace, &["--require-lane"], program)
    }

    /// `crosslane run` with a program that changes its user itself, or that runs as root.
    pub fn run_as_root(&self, namespace: Option<&str>, program: impl AsRef<OsStr>) -> Command {
        self.run_as(0, namespace, &[], program)
    }

    /// What `crosslane stat --all --json` prints to root.
    #[track_caller]
    pub fn all(&self) -> serde_json::Value {
        let mut command = Command::new(self.crosslane());
        command.args(["stat", "--all", "--json"]).env("CROSSLANE_RACK", self.path());
        let text = Process::start(&mut command).wait(WAIT_MAX).must_succeed().stdout;
        serde_json::from_str(&text).expect("JSON")
    }

    /// The traffic of the programs of a user.
    #[track_caller]
    pub fn traffic_of(&self, uid: u32) -> Traffic {
        let mut command = Command::new(self.crosslane());
        command.args(["stat", "--json", "--rack"]).arg(self.path());
        // Each user reads the own pages.
        let mut as_user = self.bare_as(uid, None, command.get_program());
        as_user.args(command.get_args());
        let text = Process::start(&mut as_user).wait(WAIT_MAX).must_succeed().stdout;
        let stat = Stat::parse(&text);
        stat.processes().map(traffic).fold(Traffic::default(), Traffic::plus)
    }

    /// The number of the process of a user whose program publishes its state.
    #[track_caller]
    pub fn pid_of(&self, uid: u32) -> u64 {
        let all = self.all();
        let of_user = |process: &&serde_json::Value| process["uid"].as_u64() == Some(uid.into());
        let mut pids = all["processes"].as_array().into_iter().flatten().filter(of_user);
        let mut pids = pids.by_ref().filter_map(|process| process["host_pid"].as_u64());
        pids.next().unwrap_or_else(|| panic!("no program of user {uid} in {all}"))
    }

    /// Names of what is in the directory of a user, without the statistics and keys.
    pub fn sockets_of(&self, uid: u32) -> Vec<String> {
        let entries = fs::read_dir(self.path().join(uid.to_string())).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name != "v1" && !name.starts_with("key-")).collect()
    }
}

/// Joins two namespaces by a cable with a number; returns the addresses of its ends. No other namespace sees them.
fn join(sides: [&str; 2], number: u8) -> [String; 2] {
    let cable = format!("cable{number}");
    netns::ip(sides[0], &["link", "add", &cable, "type", "veth", "peer", "name", &cable, "netns", sides[1]]);
    let addresses = ["1", "2"].map(|host| format!("10.128.{number}.{host}"));
    for (name, address) in sides.iter().zip(&addresses) {
        netns::ip(name, &["address", "add", &format!("{address}/24"), "dev", &cable]);
        netns::ip(name, &["link", "set", &cable, "up"]);
    }
    addresses
}
