//! `crosslane router demo`: three router nodes in network namespaces, one host behind each, and unmodified programs on
//! the hosts.

mod host;
mod lab;
mod steps;

use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::{output, signals};
use lab::Lab;
use stats::{Align, Table};

/// Programs that the demo runs, and the Debian packages that contain them.
const PROGRAMS: [(&str, &str); 5] = [
    ("ip", "iproute2"),
    ("ping", "iputils-ping"),
    ("traceroute", "traceroute"),
    ("curl", "curl"),
    ("iperf3", "iperf3"),
];

/// Interconnects that can join the nodes.
const INTERCONNECTS: [&str; 4] = ["lane", "window", "rnic-lane", "rnic-udp"];

/// Options of `crosslane router demo`.
#[derive(clap::Args)]
pub struct Options {
    /// Kind of the ports: auto, af-xdp or af-packet
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = ["auto", "af-xdp", "af-packet"])]
    ports: String,
    /// Interconnect of the nodes: lane, window, rnic-lane or rnic-udp
    #[arg(long, value_name = "KIND", default_value = "lane", value_parser = INTERCONNECTS)]
    interconnect: String,
    /// Shorter iperf3 runs
    #[arg(long)]
    quick: bool,
    /// Keep everything up until a signal arrives
    #[arg(long)]
    stay: bool,
    /// Print JSON (schema crosslane-router-demo/1)
    #[arg(long)]
    json: bool,
}

/// The output of `crosslane router demo --json`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    /// How the figures were obtained.
    provenance: &'static str,
    interconnect: String,
    ports: String,
    steps: Vec<Step>,
}

/// A step of the demo and its result.
#[derive(Serialize)]
struct Step {
    what: String,
    /// The command that the step ran, if it ran one.
    command: Option<String>,
    is_fine: bool,
    result: String,
}

/// Runs the demo, and removes everything that it has created.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; run the demo again")?;
    check_machine()?;
    lab::remove_leftovers();
    let lab = Lab::new(&options.ports, &options.interconnect, signals.as_fd())?;
    if !options.json {
        output::print(&lab.picture())?;
    }
    let mut show = |step: &Step| if options.json { Ok(()) } else { output::print(&line(step)) };
    let steps = steps::all(&lab, options.quick, &mut show)?;
    let is_fine = steps.iter().all(|step| step.is_fine);
    if options.json {
        let report = Report {
            schema: "crosslane-router-demo/1",
            provenance: "measured",
            interconnect: options.interconnect.clone(),
            ports: lab.port_kind()?,
            steps,
        };
        output::print_json(&report)?;
    } else {
        output::print(&lab.hints(options.stay))?;
    }
    if options.stay {
        lab.wait_for_signal();
    }
    lab.end()?;
    if !is_fine {
        bail!("a step failed; run 'crosslane router demo --stay', and inspect it with 'crosslane router status'");
    }
    Ok(())
}

fn check_machine() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the demo creates network namespaces, which needs root; run it with sudo");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_installed = |name: &str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let missing: Vec<&(&str, &str)> = PROGRAMS.iter().filter(|(name, _)| !is_installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    bail!("not in PATH: {}; run 'apt-get install {}'", names.join(", "), packages.join(" "))
}

fn line(step: &Step) -> String {
    let mut table = Table::new(&[("", Align::Left), ("", Align::Left), ("", Align::Left)]);
    let mark = if step.is_fine { "ok" } else { "FAILED" };
    table.row(vec![mark.to_owned(), format!("{:<34}", step.what), step.result.clone()]);
    table.render().lines().skip(1).map(|line| format!("{line}\n")).collect()
}
