//! `crosslane router capture`: writes the frames of a port to a pcapng file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
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
/// Length of a block without contents: its type, and its length at both ends.
const BLOCK_BYTES_MIN: usize = 12;

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
    // Only now: an existing file is kept if there is nothing to capture.
    let mut output = Output::open(&options.write)?;
    eprintln!("crosslane: capturing at port {} of node {}", options.port, options.node);
    let mut pipe = File::from(pipe);
    let deadline = options.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut is_ending = false;
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = if is_ending { Some(Duration::ZERO) } else { left };
        let limit = left.map(Timespec::try_from).transpose().context("--seconds")?;
        let mut polled = [
            PollFd::new(&pipe, PollFlags::IN),
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            // Reports only that the reader has gone.
            PollFd::from_borrowed_fd(output.as_fd(), PollFlags::empty()),
        ];
        // After an interruption nothing is ready.
        let _ = poll(&mut polled, limit.as_ref());
        let is_time_over = left.is_some_and(|left| left.is_zero());
        let was_ending = is_ending;
        is_ending |= is_time_over | !polled[1].revents().is_empty();
        if !polled[2].revents().is_empty() {
            break;
        }
        if polled[0].revents().is_empty() {
            // What the node has captured until then is read first.
            if was_ending {
                break;
            }
            continue;
        }
        match pipe.read(&mut chunk).context("reading from the node")? {
            0 if options.count.is_none() => {
                let (port, node) = (&options.port, &options.node);
                bail!(
                    "node '{node}' has ended the capture: it or its port {port} is down; see 'crosslane router status'"
                );
            }
            0 => break,
            bytes => match output.write(&chunk[..bytes]) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                written => written.with_context(|| format!("cannot write {}", options.write.display()))?,
            },
        }
    }
    Ok(())
}

/// Where the capture is written: only whole blocks, so that a file that ends at any time can be read.
struct Output {
    file: File,
    /// The beginning of a block.
    pending: Vec<u8>,
}

impl Output {
    fn open(path: &Path) -> Result<Output> {
        let file = match path == Path::new("-") {
            true => io::stdout().as_fd().try_clone_to_owned().map(File::from),
            false => File::create(path),
        };
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Output { file, pending: Vec::new() })
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Writes all blocks that these bytes complete.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.pending.extend_from_slice(bytes);
        let whole = whole_blocks_bytes(&self.pending);
        self.file.write_all(&self.pending[..whole])?;
        self.pending.drain(..whole);
        Ok(())
    }
}

/// Returns the length of the whole blocks that `bytes` begins with. Each block has its type and its length first, in
/// the byte order in which nodes write.
fn whole_blocks_bytes(bytes: &[u8]) -> usize {
    let mut whole = 0;
    while let Some(length) = bytes[whole..].get(4..8).and_then(|length| length.first_chunk()) {
        let length = u32::from_be_bytes(*length) as usize;
        if length < BLOCK_BYTES_MIN || length > bytes.len() - whole {
            break;
        }
        whole += length;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_are_written() {
        let block = |bytes: u32| [&6u32.to_be_bytes()[..], &bytes.to_be_bytes(), &vec![7; bytes as usize - 8]].concat();
        let blocks = [block(12), block(100), block(16)].concat();
        let ends = [12, 112, 128];
        for length in 0..=blocks.len() {
            let expected = ends.into_iter().filter(|end| *end <= length).max().unwrap_or(0);
            assert_eq!(whole_blocks_bytes(&blocks[..length]), expected, "{length}");
        }
        assert_eq!(whole_blocks_bytes(&[0; 100]), 0, "a length of 0 ends nothing");
    }
}
