//! Programs under debuggers and tracers: the table of docs/troubleshooting.md.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use system_tests::port::start_server;
use system_tests::{Finished, Process, Rack, WAIT_MAX, c, is_root, paths};

const LIMIT: Duration = Duration::from_secs(180);
/// The exit code of a program in which valgrind has found an error.
const FOUND_ERRORS: &str = "--error-exitcode=9";

/// A client and a server.
fn exchange() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let source = include_str!("debuggers/exchange.c");
    BUILT.get_or_init(|| c::build_text("exchange", source, &["-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]))
}

/// A command whose connections must have lanes, below a tool.
fn under(rack: &Rack, tool: &[&str]) -> Command {
    let Some((name, options)) = tool.split_first() else { return rack.require_lane(exchange()) };
    let mut command = rack.require_lane(paths::tool(name));
    command.args(options).arg(exchange());
    command
}

/// Runs the two programs, each below a tool or none, to their ends.
fn run(server_tool: &[&str], client_tool: &[&str]) -> (Finished, Finished) {
    let rack = Rack::new();
    let server = start_server(|port| {
        let mut command = under(&rack, server_tool);
        command.args(["serve", &port.to_string()]);
        command
    });
    let mut command = under(&rack, client_tool);
    let client = Process::start(command.args(["call", &server.port.to_string()])).wait(LIMIT).must_succeed();
    assert!(client.stdout.contains("done"), "{client}");
    (server.process.wait(LIMIT).must_succeed(), client)
}

fn each_side_runs_under(tool: &[&str]) {
    run(&[], tool);
    run(tool, &[]);
}

#[test]
fn clients_and_servers_run_under_valgrind_without_errors() {
    for tool in ["memcheck", "helgrind", "none"] {
        each_side_runs_under(&["valgrind", "-q", FOUND_ERRORS, &format!("--tool={tool}")]);
    }
}

#[test]
fn clients_and_servers_run_under_strace() {
    each_side_runs_under(&["strace", "-f", "-o", "/dev/null"]);
}

#[test]
fn clients_and_servers_run_under_gdb() {
    each_side_runs_under(&["gdb", "-q", "-batch", "-ex", "run", "-ex", "quit $_exitcode", "--args"]);
}

#[test]
fn gdb_attaches_to_a_server_and_leaves_it() {
    if !is_root() {
        println!("skipped: only root may attach to another program");
        return;
    }
    let rack = Rack::new();
    let server = start_server(|port| {
        let mut command = under(&rack, &[]);
        command.args(["serve", &port.to_string()]);
        command
    });
    let mut gdb = Command::new(paths::tool("gdb"));
    gdb.args(["-q", "-batch", "-p", &server.process.pid().to_string(), "-ex", "thread apply all backtrace"]);
    let stacks = Process::start(&mut gdb).wait(LIMIT).must_succeed().stdout;
    assert!(stacks.contains("serve_client"), "{stacks}");
    let mut client = under(&rack, &[]);
    Process::start(client.args(["call", &server.port.to_string()])).wait(WAIT_MAX).must_succeed();
    server.process.wait(WAIT_MAX).must_succeed();
}
