//! `lab-stream serve|connect ADDRESS SECONDS`: transfers data in both directions of one connection at the same time,
//! and compares every byte.
//!
//! Each endpoint sends blocks of a pseudorandom sequence whose seed the peer knows, then a block that marks the end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lab::guest_tool;

const USAGE: &str = "usage: lab-stream serve|connect ADDRESS SECONDS";
const BLOCK_BYTES: usize = 4096;
const LAST: [u8; BLOCK_BYTES] = [0xff; BLOCK_BYTES];
const SEED_SERVER: u64 = 0x9e37_79b9_7f4a_7c15;
const SEED_CLIENT: u64 = 0xd1b5_4a32_d192_ed03;

fn main() -> ExitCode {
    guest_tool::main("lab-stream", |arguments| {
        let (sent, received) = run(arguments)?;
        println!("lab-stream: {sent} bytes sent, {received} bytes received intact");
        Ok(())
    })
}

fn run(arguments: &[String]) -> Result<(u64, u64)> {
    let [role, address, seconds] = arguments else { bail!(USAGE) };
    let limit = Duration::from_secs(seconds.parse().context(USAGE)?);
    let (stream, own, theirs) = match role.as_str() {
        "serve" => (TcpListener::bind(address)?.accept()?.0, SEED_SERVER, SEED_CLIENT),
        "connect" => (TcpStream::connect(address)?, SEED_CLIENT, SEED_SERVER),
        _ => bail!(USAGE),
    };
    // The client's machine may be powered off once the server has ended its stream, which would lose data in flight.
    // Therefore the server ends its stream only after it has received everything.
    let is_server = role == "serve";
    let (sending, ending) = (stream.try_clone()?, stream.try_clone()?);
    let sender = thread::spawn(move || send(sending, own, limit, !is_server));
    let received = receive(stream, theirs)?;
    let sent = sender.join().map_err(|_| anyhow!("the sender panicked"))??;
    if is_server {
        ending.shutdown(Shutdown::Write).context("ending the stream")?;
    }
    Ok((sent, received))
}

fn send(mut stream: TcpStream, seed: u64, limit: Duration, ends_stream: bool) -> Result<u64> {
    let (mut blocks, mut bytes) = (Blocks { state: seed }, 0);
    let begun = Instant::now();
    while begun.elapsed() < limit {
        stream.write_all(&blocks.next()).context("sending")?;
        bytes += BLOCK_BYTES as u64;
    }
    stream.write_all(&LAST).context("sending the last block")?;
    if ends_stream {
        stream.shutdown(Shutdown::Write).context("ending the stream")?;
    }
    Ok(bytes)
}

fn receive(mut stream: TcpStream, seed: u64) -> Result<u64> {
    let (mut blocks, mut bytes) = (Blocks { state: seed }, 0);
    let mut block = [0; BLOCK_BYTES];
    loop {
        let read = stream.read_exact(&mut block);
        let is_end = read.as_ref().is_err_and(|error| error.kind() == ErrorKind::UnexpectedEof);
        let what = if is_end { "stream ended" } else { "failed" };
        read.with_context(|| format!("receiving: {what} after {bytes} bytes, before the last block"))?;
        if block == LAST {
            break;
        }
        ensure!(block == blocks.next(), "the block after {bytes} bytes differs from the one that was sent");
        bytes += BLOCK_BYTES as u64;
    }
    ensure!(stream.read(&mut block)? == 0, "bytes after the last block");
    Ok(bytes)
}

/// A pseudorandom sequence (xorshift64). None of its blocks is [`LAST`].
struct Blocks {
    state: u64,
}

impl Blocks {
    fn next(&mut self) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        for word in block.chunks_exact_mut(size_of::<u64>()) {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            word.copy_from_slice(&self.state.to_le_bytes());
        }
        block
    }
}
