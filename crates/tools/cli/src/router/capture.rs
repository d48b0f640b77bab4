//! `crosslane router capture`: writes the frames of a port to a pcapng file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use router_node::management::{CaptureQuery, Request, Response};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::loaded::LoadedCluster;
use super::request::request_descriptor;
use crate::signals;

/// Bytes read from the node at a time.
const CHUNK_BYTES: usize = 1 << 16;

/// Options of `crosslane router capture`.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// The node
    #[arg(long, value_name = "NODE")]
    node: String,
    /// The port, by its device
    #[arg(long, value_name = "DEVICE")]
    port: String,
    /// The pcapng file to write; - for standard output, as in '... --write - | wireshark -k -i -'
    #[arg(long, value_name = "FILE")]
    write: PathBuf,
    /// End after this number of frames
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Time limit in seconds [default: until Ctrl-C]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// Keep at most this number of bytes of each frame
    #[arg(long, value_name = "BYTES", default_value_t = 262_144)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=262_144))]
    snap: u32,
}

/// Captures until a signal, the time limit or the number of frames is reached.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; run capture again")?;
    let cluster = LoadedCluster::read(&options.cluster)?;
    let index = cluster.select(Some(&options.node))?[0];
    let mut output = open(&options.write)?;
    let query = CaptureQuery {
        port: options.port.clone(),
        frame_bytes_max: options.snap,
        frames_max: options.count.unwrap_or(u64::MAX),
    };
    let answer = request_descriptor(&cluster.paths.node(cluster.name(index)), Request::Capture(query))?;
    let Some((Response::Capturing, Some(pipe), _channel)) = answer else {
        let (node, file) = (&options.node, cluster.file.shown());
        bail!("node '{node}' of {file} is not up, or of another release; see 'crosslane router status'");
    };
    eprintln!("crosslane: capturing at port {} of node {}", options.port, options.node);
    let mut pipe = File::from(pipe);
    let deadline = options.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut is_ending = false;
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = if is_ending { Some(Duration::ZERO) } else { left };
        let limit = left.map(Timespec::try_from).transpose().context("--seconds")?;
        let mut polled = [PollFd::new(&pipe, PollFlags::IN), PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        // After an interruption nothing is ready.
        let _ = poll(&mut polled, limit.as_ref());
        let is_time_over = left.is_some_and(|left| left.is_zero());
        let was_ending = is_ending;
        is_ending |= is_time_over | !polled[1].revents().is_empty();
        if polled[0].revents().is_empty() {
            // What the node has captured until then is read first.
            if was_ending {
                break;
            }
            continue;
        }
        match pipe.read(&mut chunk).context("reading from the node")? {
            0 => break,
            bytes => write(output.as_mut(), &chunk[..bytes], &options.write)?,
        }
    }
    Ok(())
}

fn open(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    Ok(Box::new(File::create(path).with_context(|| format!("cannot write {}", path.display()))?))
}

fn write(output: &mut dyn Write, bytes: &[u8], path: &Path) -> Result<()> {
    output.write_all(bytes).and_then(|()| output.flush()).with_context(|| format!("cannot write {}", path.display()))
}
