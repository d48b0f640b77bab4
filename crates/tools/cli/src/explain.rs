//! `crosslane explain`: the path of each TCP socket of running programs, and why it is not a lane; or what a command
//! line would use.

mod beforehand;
mod reason;
mod report;
mod socket;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;

use crate::output;
use crate::processes::program::user_name;
use crate::processes::{Processes, Program};
use crate::wrong_use::WrongUse;
pub use report::SCHEMA;
use report::{ForecastReport, Report};
use socket::Socket;

/// Options of `crosslane explain`.
#[derive(clap::Args)]
#[command(
    after_help = "Without options: all programs that this user may examine. docs/troubleshooting.md describes all \
                        reasons."
)]
pub struct Options {
    /// Only the sockets of this process
    #[arg(long, value_name = "PID", conflicts_with = "port", value_parser = parse_pid)]
    pid: Option<i32>,
    /// Only sockets with this port, at their own or the other side
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Print JSON (schema crosslane-explain/1)
    #[arg(long)]
    json: bool,
    /// The rack directory that PROGRAM would use [default: as for run]
    #[arg(long, value_name = "DIR", requires = "command")]
    rack: Option<PathBuf>,
    /// A program and its arguments, which is not run: what would its connections use?
    #[arg(last = true, value_name = "PROGRAM ARGS", conflicts_with_all = ["pid", "port"])]
    command: Vec<OsString>,
}

fn parse_pid(text: &str) -> Result<i32, &'static str> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or("a process ID is a positive number; 'ps' and 'crosslane stat --all' show those of programs")
}

/// Prints the explanation.
pub fn main(options: &Options) -> Result<()> {
    let processes = Processes::scan()?;
    if !options.command.is_empty() {
        let forecast = beforehand::forecast(&processes, &options.command, options.rack.as_deref())?;
        return match options.json {
            true => output::print_json(&ForecastReport::new(&forecast)),
            false => output::print(&report::describe_forecast(&forecast)),
        };
    }
    let (programs, sockets) = match (options.pid, options.port) {
        (Some(pid), _) => {
            let program = processes.program(pid)?;
            (vec![program], socket::of_program(&processes, program))
        }
        (None, Some(port)) => with_port(&processes, port)?,
        (None, None) => of_all(&processes, |_| true),
    };
    match options.json {
        true => output::print_json(&Report::new(&programs, &sockets)),
        false if programs.is_empty() => output::print("No program of this user has a TCP socket.\n"),
        false => output::print(&report::describe(&programs, &sockets)),
    }
}

/// Returns the sockets of all programs that `is_wanted` selects, and their programs.
fn of_all(processes: &Processes, is_wanted: impl Fn(&Socket<'_>) -> bool) -> (Vec<&Program>, Vec<Socket<'_>>) {
    let sockets = processes.all().flat_map(|program| socket::of_program(processes, program));
    let sockets: Vec<Socket<'_>> = sockets.filter(is_wanted).collect();
    let mut programs: Vec<&Program> = sockets.iter().map(|socket| socket.program).collect();
    programs.dedup_by_key(|program| program.pid);
    (programs, sockets)
}

fn with_port(processes: &Processes, port: u16) -> Result<(Vec<&Program>, Vec<Socket<'_>>)> {
    let has_port =
        |socket: &Socket<'_>| [socket.local, socket.peer].into_iter().flatten().any(|address| address.port() == port);
    let found = of_all(processes, has_port);
    if !found.1.is_empty() {
        return Ok(found);
    }
    let hidden = processes.own_table().with_port(port).find(|socket| socket.inode != 0);
    Err(WrongUse::of(match hidden {
        Some(socket) => {
            let user = user_name(socket.uid);
            format!("port {port} belongs to a program of user {user}; run this as {user} or as root")
        }
        None => format!("no TCP socket has port {port}; check --port"),
    })
    .into())
}
