//! `crosslane router demo`: three router nodes in network namespaces, hosts around them, and across them programs that
//! nobody changed.

mod host;
mod lab;
mod steps;

use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::{device_server, output};
use lab::Lab;
use stats::{Align, Table};

/// Programs that the demo runs, and the Debian packages that have them.
const PROGRAMS: [(&str, &str); 5] = [
    ("ip", "iproute2"),
    ("ping", "iputils-ping"),
    ("traceroute", "traceroute"),
    ("curl", "curl"),
    ("iperf3", "iperf3"),
];

/// What can join nodes.
const INTERCONNECTS: [&str; 4] = ["lane", "window", "rnic-lane", "rnic-udp"];

/// What to show, and how.
#[derive(clap::Args)]
pub struct Options {
    /// How ports are reached: auto, af-xdp or af-packet
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = ["auto", "af-xdp", "af-packet"])]
    ports: String,
    /// What joins the nodes: lane, window, rnic-lane or rnic-udp
    #[arg(long, value_name = "KIND", default_value = "lane", value_parser = INTERCONNECTS)]
    interconnect: String,
    /// Let iperf3 carry little
    #[arg(long)]
    quick: bool,
    /// Leave everything up, until a signal comes
    #[arg(long)]
    stay: bool,
    /// Print JSON (schema crosslane-router-demo/1)
    #[arg(long)]
    json: bool,
}

/// The whole of `crosslane router demo --json`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    /// Of the figures.
    provenance: &'static str,
    interconnect: String,
    ports: String,
    steps: Vec<Step>,
}

/// What was tried, and what came of it.
#[derive(Serialize)]
struct Step {
    what: String,
    /// The command that was run, where it was one.
    command: Option<String>,
    is_fine: bool,
    result: String,
}

/// Shows it, and leaves nothing behind.
pub fn main(options: &Options) -> Result<()> {
    let signals = device_server::signals().context("signals cannot be taken; run the demo again")?;
    check_machine()?;
    lab::sweep();
    let lab = Lab::make(&options.ports, &options.interconnect, signals.as_fd())?;
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
        bail!("not all of it worked; run 'crosslane router demo --stay', and look with 'crosslane router status'");
    }
    Ok(())
}

fn check_machine() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the demo makes network namespaces, which takes root; run it with sudo");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_here = |name: &str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let missing: Vec<&(&str, &str)> = PROGRAMS.iter().filter(|(name, _)| !is_here(name)).collect();
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
