//! Racks whose nodes run on this machine, with monitors and proxies that `crosslane up` starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::script::COMMON;
use crate::{Finished, Process, WAIT_MAX, paths, port, wait_for};

/// Names of the nodes, which have the addresses 127.77.0.1 and so on.
pub const NAMES: [&str; 3] = ["a", "b", "c"];
/// The rack file in the folder of the nodes.
const RACK_FILE: &str = "r.toml";

/// The nodes of a rack that run on this machine, identified by their index in [`NAMES`]. They have a folder with a rack
/// directory of their own. Dropping this takes the nodes down.
pub struct LocalNodes {
    folder: TempDir,
    rack: String,
}

impl Drop for LocalNodes {
    fn drop(&mut self) {
        if self.rack_directory_exists() {
            self.finish("down", &[]);
        }
    }
}

impl LocalNodes {
    /// Nodes that a rack file of this text describes. They are not started.
    pub fn of_file(text: &str) -> Self {
        let nodes = Self::of_rack(RACK_FILE);
        nodes.write(text);
        nodes
    }

    /// Nodes of the rack at an address, such as one in etcd. They are not started.
    pub fn of_rack(address: &str) -> Self {
        // In /tmp, regardless of TMPDIR: paths of sockets must be short.
        let folder = tempfile::Builder::new().prefix("nodes-").tempdir_in("/tmp").expect("a folder");
        Self { folder, rack: address.to_owned() }
    }

    /// The rack file, if there is one.
    pub fn rack_file(&self) -> PathBuf {
        self.folder().join(RACK_FILE)
    }

    /// Writes the rack file.
    pub fn write(&self, text: &str) {
        fs::write(self.rack_file(), text).expect("a file");
    }

    /// The folder in which all commands run.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The value of `--rack`.
    pub fn rack(&self) -> &str {
        &self.rack
    }

    /// Whether a command has created the rack directory.
    pub fn rack_directory_exists(&self) -> bool {
        self.folder().join("base").exists()
    }

    /// `crosslane ARGUMENTS`, without other variables of Crosslane than the rack directory's.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(paths::crosslane());
        command.args(arguments).current_dir(self.folder()).env("CROSSLANE_RACK", self.folder().join("base"));
        for variable in ["NODE", "ONLY", "EXCEPT", "REQUIRE_LANE", "OFF"] {
            command.env_remove(format!("CROSSLANE_{variable}"));
        }
        command
    }

    /// Runs `crosslane SUBCOMMAND --rack RACK ARGUMENTS` to its end.
    pub fn finish(&self, subcommand: &str, arguments: &[&str]) -> Finished {
        Process::start(self.command(&[subcommand, "--rack", &self.rack]).args(arguments)).wait(WAIT_MAX)
    }

    /// Puts a rack file of this text at the rack's address in etcd.
    pub fn push(&self, text: &str) -> Finished {
        self.write(text);
        Process::start(&mut self.command(&["rack", "push", "--rack", RACK_FILE, "--to", &self.rack])).wait(WAIT_MAX)
    }

    /// The status of the rack.
    pub fn status(&self) -> Value {
        // The command fails if no node is up, and prints the status nevertheless.
        serde_json::from_str(&self.finish("status", &["--json"]).stdout).expect("JSON")
    }

    /// Waits until the status meets a condition, and returns it.
    #[track_caller]
    pub fn wait_for_status(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || self.status(), holds)
    }

    /// A command that runs a program on a node and requires lanes; the program must be appended.
    pub fn run(&self, node: usize) -> Command {
        self.run_on(NAMES[node])
    }

    /// As [`LocalNodes::run`], on a node of any name.
    pub fn run_on(&self, name: &str) -> Command {
        let mut command = self.command(&["run", "--rack", &self.rack, "--node", name, "--require-lane"]);
        if let Some(library) = paths::library_of_environment() {
            command.arg("--library").arg(library);
        }
        command.arg("--");
        command
    }

    /// Starts a Python program, which begins with [`COMMON`], on node `node`, for an address of node `server`.
    pub fn python(&self, node: usize, server: usize, script: &str, port: u16) -> Process {
        let (script, address) = (format!("{COMMON}\n{script}"), format!("127.77.0.{}", server + 1));
        let mut command = self.run(node);
        Process::start(command.arg(paths::python()).args(["-c", &script, &address, &port.to_string()]))
    }

    /// Starts a server on a node and waits until it listens.
    pub fn serve(&self, node: usize, script: &str) -> (Process, u16) {
        let port = port::free_port();
        let server = self.python(node, node, script, port);
        server.wait_until("listening", WAIT_MAX, |server| server.stdout().contains("listening"));
        (server, port)
    }
}

/// The rack file that `crosslane rack example ARGUMENTS` prints.
#[track_caller]
pub fn example(arguments: &[&str]) -> String {
    let mut command = Command::new(paths::crosslane());
    Process::start(command.args(["rack", "example"]).args(arguments)).wait(WAIT_MAX).must_succeed().stdout
}

/// Lengthens the silence limit of an example: on a busy machine a monitor may wait long for a processor.
pub fn with_long_silence(text: &str) -> String {
    text.replace("silence_ns = 3000000000", "silence_ns = 30000000000")
}
