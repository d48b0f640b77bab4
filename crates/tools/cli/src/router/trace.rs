//! `crosslane router trace`: shows what each node does with packets, step by step.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control::{Channel, Received};
use ipnet::IpNet;
use router_node::management::{Request, Response, TraceQuery, TracedStep};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use super::loaded::LoadedCluster;
use super::request::request;
use crate::{output, signals};

/// Options of `crosslane router trace`.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// Trace at this node only
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// Only packets from this address or network
    #[arg(long, value_name = "ADDRESS|NETWORK", value_parser = network)]
    from: Option<IpNet>,
    /// Only packets to this address or network
    #[arg(long, value_name = "ADDRESS|NETWORK", value_parser = network)]
    to: Option<IpNet>,
    /// Only packets of this protocol: icmp, icmpv6, tcp, udp or a number
    #[arg(long, value_name = "PROTOCOL", value_parser = protocol)]
    protocol: Option<u8>,
    /// Only packets from or to this UDP or TCP port
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Number of packets to trace at each node
    #[arg(long, value_name = "N", default_value_t = 10)]
    count: u32,
    /// Time limit in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Print JSON, one line for each step (schema crosslane-router-trace/1)
    #[arg(long)]
    json: bool,
}

fn network(text: &str) -> Result<IpNet, String> {
    let address = text.parse::<IpAddr>().map(IpNet::from).ok();
    let network = address.or_else(|| text.parse::<IpNet>().ok()).map(|network| network.trunc());
    network.ok_or_else(|| "neither an address nor a network; write as in 192.0.2.1 or 2001:db8::/32".to_owned())
}

fn protocol(text: &str) -> Result<u8, String> {
    match text {
        "icmp" => Ok(1),
        "tcp" => Ok(6),
        "udp" => Ok(17),
        "icmpv6" => Ok(58),
        other => other.parse().map_err(|_| "not a protocol; use icmp, icmpv6, tcp, udp or 0 to 255".to_owned()),
    }
}

/// One step, as `--json` prints it.
#[derive(Serialize)]
struct Line<'a> {
    schema: &'static str,
    node: &'a str,
    #[serde(flatten)]
    step: &'a TracedStep,
}

/// Prints steps as they happen, until a signal, the time limit or the number of packets is reached.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; run trace again")?;
    let cluster = LoadedCluster::read(&options.cluster)?;
    let query = TraceQuery {
        source: options.from,
        destination: options.to,
        protocol: options.protocol,
        port: options.port,
        packets_max: options.count,
    };
    let mut channels: Vec<(String, Channel)> = Vec::new();
    for index in cluster.select(options.node.as_deref())? {
        let name = cluster.name(index).to_owned();
        if let Some((_, channel)) = request(&cluster.paths.node(&name), Request::Trace(query))? {
            channels.push((name, channel));
        }
    }
    if channels.is_empty() {
        let file = cluster.file.shown();
        bail!("no node of {file} is up; start them with 'crosslane router up --cluster {file}'");
    }
    let names: Vec<&str> = channels.iter().map(|(name, _)| name.as_str()).collect();
    eprintln!("crosslane: tracing packets at {}", names.join(", "));
    let deadline = Instant::now() + Duration::from_secs(options.seconds);
    while !channels.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut polled: Vec<PollFd<'_>> =
            channels.iter().map(|(_, channel)| PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN)).collect();
        polled.push(PollFd::new(&signals, PollFlags::IN));
        let limit = Timespec::try_from(left).context("--seconds")?;
        let ready = poll(&mut polled, Some(&limit)).unwrap_or(0);
        if ready == 0 || polled.last().is_some_and(|signals| !signals.revents().is_empty()) {
            return Ok(());
        }
        let mut ended = Vec::new();
        for (index, (name, channel)) in channels.iter().enumerate() {
            if !drain(name, channel, options.json)? {
                ended.push(index);
            }
        }
        ended.into_iter().rev().for_each(|index| drop(channels.remove(index)));
    }
    Ok(())
}

/// Prints the steps that have arrived from a node. Returns whether more may arrive.
fn drain(node: &str, channel: &Channel, is_json: bool) -> Result<bool> {
    loop {
        match channel.receive::<Response>()? {
            Received::Message(Response::Traced(steps), _) => {
                steps.iter().try_for_each(|step| print(node, step, is_json))?;
            }
            Received::Message(other, _) => {
                bail!("node '{node}' answers {other:?} to a request to trace; use one release for all")
            }
            Received::Nothing => return Ok(true),
            Received::Ended => return Ok(false),
        }
    }
}

fn print(node: &str, step: &TracedStep, is_json: bool) -> Result<()> {
    if is_json {
        let line = Line { schema: "crosslane-router-trace/1", node, step };
        return output::print(&(serde_json::to_string(&line)? + "\n"));
    }
    let TracedStep { time_ns, source, destination, protocol, source_port, destination_port, step } = step;
    let seconds = *time_ns as f64 / 1e9;
    let ports = if (*source_port, *destination_port) == (0, 0) {
        String::new()
    } else {
        format!(" {source_port} -> {destination_port}")
    };
    output::print(&format!("{node} {seconds:.6} {source} -> {destination} protocol {protocol}{ports}: {step}\n"))
}
