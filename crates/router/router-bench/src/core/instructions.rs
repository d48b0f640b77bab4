//! Instructions for each packet by stage, counted by callgrind; they do not depend on other load on the machine.

use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::{Error, Router};

/// Routes in the tables while instructions are counted. The number of routes hardly changes the instructions of a
/// lookup, and a full table takes too long to build under valgrind.
const ROUTES: usize = 5_000;

/// Packets of the shorter run. The longer run has twice as many, and the difference between both counts is theirs.
const PACKETS: u64 = 20_480;

/// Stages and the functions whose instructions, callees included, are counted for each; the last entry covers all
/// stages and the ports.
pub const WORK_STAGES: [(&str, &str); 5] = [
    ("parse and check", "*Forwarder*parse*"),
    ("look up", "*stages*look_up_v*"),
    ("rewrite", "*stages*rewrite_v*"),
    ("hand over", "*Forwarder*hand_over*"),
    ("with ports", "*core*router*Traffic*poll_once*"),
];

/// The instructions of one stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageInstructions {
    /// The name of the stage.
    pub stage: &'static str,
    /// 4 or 6.
    pub version: u8,
    /// The instructions for a packet of 64 B.
    pub per_packet: f64,
}

/// Forwards `packets` packets of 64 B without output, for an instruction counter.
///
/// # Errors
/// Fails if a packet was not forwarded.
pub fn work(version: u8, packets: usize) -> Result<(), Error> {
    let mut router = Router::new(1, ROUTES, ROUTES)?;
    let destinations = if version == 4 { router.destinations_v4(1, 1000) } else { router.destinations_v6(1, 1000) };
    router.traffic(&[64], destinations).forward(packets, &mut ())
}

/// Counts the instructions of each stage. `program` with `arguments` is a command that calls [`work`] with the IP
/// version and the number of packets, which are appended as its last two arguments.
///
/// # Errors
/// Fails if valgrind is not installed or counts nothing.
pub fn instructions(program: &Path, arguments: &[&str]) -> Result<Vec<StageInstructions>, Error> {
    let mut counts = Vec::new();
    for version in [4, 6] {
        for (stage, function) in WORK_STAGES {
            let run = |packets| collected(program, arguments, version, function, packets);
            let per_packet = (run(2 * PACKETS)? - run(PACKETS)?) / PACKETS as f64;
            counts.push(StageInstructions { stage, version, per_packet });
        }
    }
    Ok(counts)
}

/// Returns the instructions of a function in one run.
fn collected(program: &Path, arguments: &[&str], version: u8, function: &str, packets: u64) -> Result<f64, Error> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect={function}"))
        .arg(program)
        .args(arguments)
        .args([version.to_string(), packets.to_string()])
        .output()
        .map_err(|error| Error::Instructions(format!("valgrind: {error}; install it")))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let count = stderr.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    match count {
        Some(count) if output.status.success() && count > 0.0 => Ok(count),
        _ => Err(Error::Instructions(format!(
            "callgrind counted no instructions of {function}; is the program stripped?"
        ))),
    }
}
