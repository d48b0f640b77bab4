//! The command `crosslane`: parses the command line and calls the crates that do the work.
//!
//! Exit codes: 0 success, 1 failure, 2 wrong use. An error is one line that names the thing, the value and the remedy.

mod bench_router;
mod compare;
mod device_server;
mod doctor;
mod down;
mod elf;
mod enable;
mod explain;
mod lanes;
mod library;
mod manual;
mod monitor;
mod output;
mod overhead;
mod pcie;
mod processes;
mod program;
mod proxy;
mod rack_choice;
mod rack_control;
mod rack_dir;
mod rack_example;
mod rack_store;
mod rnic;
mod router;
mod run;
mod run_lock;
mod shared_rack;
mod signals;
mod sockets;
mod stat;
mod status;
mod top;
mod up;
mod version;
mod windows;
mod wrong_use;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use wrong_use::WrongUse;

/// Sockets of unmodified programs over shared memory instead of the network stack.
#[derive(Parser)]
#[command(name = "crosslane", version = machine::VERSION, long_version = version::LONG.as_str(), max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program whose busy connections use lanes
    Run(run::Options),
    /// Show processes, busy connections with their paths, bytes by path, and fallbacks with their reasons
    Stat(stat::Options),
    /// Show why sockets of running programs, or of a program that is not running yet, do not use lanes
    Explain(explain::Options),
    /// Show what stat shows, updated continuously
    Top(top::Options),
    /// Run a client command over kernel TCP and over lanes, in alternating rounds, and print both
    Compare(compare::Options),
    /// Switch the lanes of a rack off or on while its programs run
    Lanes(lanes::Options),
    /// Print, check and store descriptions of racks (machines joined by memory windows)
    #[command(subcommand)]
    Rack(RackCommand),
    /// Make, change and show a directory in which programs of several users meet
    #[command(subcommand)]
    RackDir(shared_rack::Command),
    /// Let a systemd service run with lanes: write a drop-in for its unit; for root
    Enable(enable::Options),
    /// Let a systemd service run without lanes: remove what 'enable' has written; for root
    Disable(enable::DisableOptions),
    /// Bring up the nodes of a rack file on this machine
    Up(up::Options),
    /// Show the state of the nodes of a rack file: monitors, proxies, links, partitions
    Status(status::Options),
    /// Bring down the nodes of a rack file on this machine
    Down(down::Options),
    /// Run the control plane of a node; 'up' starts it
    #[command(hide = true)]
    Monitor(monitor::Options),
    /// Check what this machine offers, what is missing, and how to get it
    Doctor(doctor::Options),
    /// Compare Redis over lanes with Redis over kernel TCP in one table
    Demo(crosslane_bench::demo::Options),
    /// Run benchmarks on this machine
    #[command(subcommand)]
    Bench(Bench),
    /// Serve shared memory and doorbells to virtual machines and nodes of this machine (QEMU's ivshmem device)
    DeviceServer(device_server::Options),
    /// Run the data plane of a node; its monitor starts it
    #[command(hide = true)]
    Proxy(proxy::Options),
    /// Model and measure PCIe: links, hosts and devices
    #[command(subcommand)]
    Pcie(pcie::Command),
    /// Model an RDMA NIC: its memory and its behaviour in a simulated network
    #[command(subcommand)]
    Rnic(rnic::Command),
    /// Print the completions of a shell
    Completions(manual::CompletionOptions),
    /// Write the manual pages of all commands and file formats
    #[command(hide = true)]
    Manual(manual::ManualOptions),
    /// Run and inspect router nodes that forward as one router: the nodes of a cluster file
    #[command(subcommand)]
    Router(router::Command),
}

#[derive(Subcommand)]
enum RackCommand {
    /// Print a rack file with nodes a, b, ... at 127.77.0.1, 127.77.0.2, ...
    Example(rack_example::Options),
    /// Store a rack file in etcd, replacing the rack stored there
    Push(rack_store::PushOptions),
    /// Check a rack and print it as a rack file
    Show(rack_store::ShowOptions),
}

#[derive(Subcommand)]
enum Bench {
    /// Round trips, rates, bulk transfers and connects: lanes, kernel TCP, AF_UNIX, and the floors of this machine
    Sockets(crosslane_bench::sockets::Options),
    /// Calls of a program that uses no lane, with the library and without it
    Overhead(crosslane_bench::overhead::Options),
    /// Two nodes joined by windows, compared with kernel TCP and the floors; --sim: the proxy engine in virtual time
    Windows(windows::Options),
    /// RDMA NICs in real time: SENDs and WRITEs over UDP and over lanes, compared with bare UDP
    Rnic(crosslane_bench::rnic::Options),
    /// Router: forwarding core, tables, and two nodes over each interconnect
    Router(bench_router::Options),
}

/// Typing errors of a command's name up to which the name is suggested.
const TYPING_ERRORS_MAX: usize = 2;
const EXIT_FAILED: u8 = 1;
const EXIT_WRONG_USE: u8 = 2;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return wrong_use(&error),
    };
    let done = match &arguments.command {
        Command::Run(options) => run::main(options),
        Command::Stat(options) => stat::main(options),
        Command::Explain(options) => explain::main(options),
        Command::Top(options) => top::main(options),
        Command::Compare(options) => compare::main(options),
        Command::Lanes(options) => lanes::main(options),
        Command::Rack(RackCommand::Example(options)) => rack_example::main(options),
        Command::Rack(RackCommand::Push(options)) => rack_store::push(options),
        Command::Rack(RackCommand::Show(options)) => rack_store::show(options),
        Command::RackDir(command) => shared_rack::main(command),
        Command::Enable(options) => enable::enable(options),
        Command::Disable(options) => enable::disable(options),
        Command::Up(options) => up::main(options),
        Command::Status(options) => status::main(options),
        Command::Down(options) => down::main(options),
        Command::Monitor(options) => monitor::main(options),
        Command::Doctor(options) => doctor::main(options),
        Command::Demo(options) => crosslane_bench::demo::main(options),
        Command::Bench(Bench::Sockets(options)) => sockets::main(options),
        Command::Bench(Bench::Overhead(options)) => overhead::main(options),
        Command::Bench(Bench::Windows(options)) => windows::main(options),
        Command::Bench(Bench::Rnic(options)) => crosslane_bench::rnic::main(options),
        Command::Bench(Bench::Router(options)) => bench_router::main(options),
        Command::DeviceServer(options) => device_server::main(options),
        Command::Proxy(options) => proxy::main(options),
        Command::Pcie(command) => pcie::main(command),
        Command::Rnic(command) => rnic::main(command),
        Command::Router(command) => router::main(command),
        Command::Completions(options) => manual::completions(options, Arguments::command()),
        Command::Manual(options) => manual::manual(options, Arguments::command()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crosslane: {error:#}");
            ExitCode::from(if error.is::<WrongUse>() { EXIT_WRONG_USE } else { EXIT_FAILED })
        }
    }
}

/// Prints help and version in full and every other parser error as one line. Returns the exit code.
fn wrong_use(error: &clap::Error) -> ExitCode {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asked_for || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return if asked_for { ExitCode::SUCCESS } else { ExitCode::from(EXIT_WRONG_USE) };
    }
    eprintln!("crosslane: {}", unknown_command(error).unwrap_or_else(|| one_line(&error.render().to_string())));
    ExitCode::from(EXIT_WRONG_USE)
}

/// Returns the line for a command that does not exist, with the one that was probably meant: that of the fewest typing
/// errors, of which a swap of two letters is one.
fn unknown_command(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let (command, _) = command_so_far();
    let names = command.get_subcommands().filter(|known| !known.is_hide_set()).map(clap::Command::get_name);
    let distances = names.map(|name| (strsim::osa_distance(given, name), name));
    let close = distances.filter(|(distance, _)| *distance <= TYPING_ERRORS_MAX).min();
    let remedy =
        close.map_or_else(|| format!("see '{}'", help_command()), |(_, name)| format!("did you mean '{name}'?"));
    Some(format!("no command '{given}'; {remedy}"))
}

/// Returns the first paragraph of a rendered error, its tip if it has one, and otherwise the help command to run.
fn one_line(rendered: &str) -> String {
    let mut paragraphs = rendered.split("\n\n").map(|paragraph| {
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        words.join(" ")
    });
    let what = paragraphs.next().unwrap_or_default();
    let what = plain_words(what.strip_prefix("error: ").unwrap_or(&what));
    let tip = paragraphs.find_map(|paragraph| paragraph.strip_prefix("tip: ").map(|tip| format!("; {tip}")));
    let text = format!("{what}{}", tip.unwrap_or_default());
    // Errors of Crosslane's own value parsers end with a semicolon and the remedy.
    if text.contains(';') { text } else { format!("{text}; see '{}'", help_command()) }
}

/// Replaces what Rust's parsers of numbers say.
fn plain_words(what: &str) -> String {
    const WORDS: [(&str, &str); 4] = [
        ("invalid digit found in string", "not a whole number"),
        ("cannot parse integer from empty string", "not a number"),
        ("number too large to fit in target type", "too large"),
        ("invalid float literal", "not a number"),
    ];
    WORDS.iter().fold(what.to_owned(), |what, (theirs, ours)| what.replace(theirs, ours))
}

fn help_command() -> String {
    format!("{} --help", command_so_far().1)
}

/// Returns the command that the first arguments name, and these words.
fn command_so_far() -> (clap::Command, String) {
    let (mut command, mut path) = (Arguments::command(), String::from("crosslane"));
    for word in std::env::args().skip(1) {
        let Some(subcommand) = command.find_subcommand(&word).cloned() else { break };
        path = format!("{path} {word}");
        command = subcommand;
    }
    (command, path)
}
