//! Tests of `crosslane device-server`: signals, cleanup, errors.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};

use tempfile::TempDir;

mod command;

use command::{CROSSLANE, assert_fails, crosslane};

struct Server {
    process: Child,
    log: BufReader<ChildStderr>,
}

impl Server {
    /// Starts a server and waits until it has logged that it serves.
    fn start(socket: &str) -> Self {
        let mut command = Command::new(CROSSLANE);
        command.args(["device-server", "--socket", socket, "--size", "1M", "--vectors", "2"]).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap());
        let mut server = Self { process, log };
        let line = server.line();
        assert_eq!(line, format!("crosslane: device server: serving 1.0 MiB at '{socket}', 2 vectors a client"));
        server
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.log.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.process.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn folder() -> (TempDir, String) {
    let folder = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
    let socket = PathBuf::from(folder.path()).join("device.sock");
    (folder, socket.to_str().unwrap().to_owned())
}

#[test]
fn a_client_is_served_and_a_signal_ends_the_server() {
    for signal in ["-TERM", "-INT", "-HUP"] {
        let (folder, socket) = folder();
        let mut server = Server::start(&socket);
        let mut client = UnixStream::connect(&socket).unwrap();
        let mut version = [1; 8];
        client.read_exact(&mut version).unwrap();
        assert_eq!(version, [0; 8]);
        assert_eq!(server.line(), "crosslane: device server: client 0 connected");
        server.signal(signal);
        assert!(server.process.wait().unwrap().success(), "{signal}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{signal}");
    }
}

#[test]
fn the_socket_of_a_killed_server_is_reused_and_that_of_a_running_one_is_not() {
    let (_folder, socket) = folder();
    let first = Server::start(&socket);
    let second = crosslane(&["device-server", "--socket", &socket]);
    assert_fails(&second, 1, &[&socket, "in use", "give another path"]);
    first.signal("-KILL");
    drop(first);
    assert!(std::fs::exists(&socket).unwrap(), "kill -9 leaves the socket");
    drop(Server::start(&socket));
}

#[test]
fn an_invalid_request_is_one_line() {
    let (folder, socket) = folder();
    let long = format!("{socket}{}", "x".repeat(108));
    let missing = folder.path().join("missing/device.sock");
    for (arguments, code, words) in [
        (&["--socket", &socket, "--size", "3M"][..], 2, &["size 3145728", "power of two", "--size 4194304"][..]),
        (&["--socket", &socket, "--size", "64Q"], 2, &["'64Q'", "8K or 1M"]),
        (&["--socket", &socket, "--vectors", "0"], 2, &["vectors 0", "1 to 64"]),
        (&["--socket", &long], 2, &["too long", "at most 107"]),
        (&["--socket", missing.to_str().unwrap()], 1, &["missing", "No such file", "mkdir -m 700"]),
        (&["--socket", &socket, "--size", "65536G"], 1, &["size 70368744177664", "give a smaller --size"]),
        (&["--size", "1M"], 2, &["--socket"]),
    ] {
        assert_fails(&crosslane(&[&["device-server"], arguments].concat()), code, words);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
