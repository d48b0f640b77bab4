//! Instructions a packet, by stage, as callgrind counts them: they do not depend on what else the machine does.

use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::{Error, Router};

/// Routes of the tables for counting: how many there are hardly changes how many instructions a lookup takes, and
/// valgrind builds no full table in a time that anybody waits for.
const ROUTES: usize = 5_000;

/// Packets of the shorter run; the longer one has twice as many, and the difference is theirs.
const PACKETS: u64 = 20_480;

/// Stages, and the functions whose instructions are theirs, with all that they call; the last is the whole way.
pub const WORK_STAGES: [(&str, &str); 5] = [
    ("parse and check", "*Forwarder*parse*"),
    ("look up", "*stages*look_up_v*"),
    ("rewrite", "*stages*rewrite_v*"),
    ("hand over", "*Forwarder*hand_over*"),
    ("with ports", "*core*router*Traffic*turn*"),
];

/// What a stage takes.
#[derive(Clone, Debug, Serialize)]
pub struct StageInstructions {
    /// Which.
    pub stage: &'static str,
    /// 4 or 6.
    pub version: u8,
    /// Instructions for a packet of 64 B.
    pub per_packet: f64,
}

/// Forwards so many packets of 64 B and says nothing: for whoever counts.
///
/// # Errors
/// A packet was not forwarded.
pub fn work(version: u8, packets: usize) -> Result<(), Error> {
    let mut router = Router::new(1, ROUTES, ROUTES)?;
    let destinations = if version == 4 { router.destinations_v4(1, 1000) } else { router.destinations_v6(1, 1000) };
    router.traffic(&[64], destinations).forward(packets, &mut ())
}

/// Counts, with `program` and `arguments` being a command that calls [`work`] with the IP version and the number of
/// packets that are its last two arguments.
///
/// # Errors
/// There is no valgrind, or it counts nothing.
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

/// Instructions of a function in one run.
fn collected(program: &Path, arguments: &[&str], version: u8, function: &str, packets: u64) -> Result<f64, Error> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect={function}"))
        .arg(program)
        .args(arguments)
        .args([version.to_string(), packets.to_string()])
        .output()
        .map_err(|error| Error::Instructions(format!("valgrind: {error}; install it")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let count = said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    match count {
        Some(count) if output.status.success() && count > 0.0 => Ok(count),
        _ => Err(Error::Instructions(format!("callgrind counted none of {function}; is the program stripped?"))),
    }
}
