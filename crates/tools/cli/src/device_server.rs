//! `crosslane device-server`: the memory and the doorbells of an ivshmem device, for virtual machines and for nodes of
//! this machine.

use std::io::PipeReader;
use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use device_server::{Error, Server};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::pcie::sizes::Size;
use crate::wrong_use::WrongUse;

/// What to serve, and where.
#[derive(clap::Args)]
pub struct Options {
    /// Where clients connect: a unix socket, in a directory that only you can write
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// The memory's size, a power of two
    #[arg(long, value_name = "BYTES", default_value = "64M")]
    pub size: Size,
    /// Doorbells of each client, as many as QEMU's device is told with vectors=
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub vectors: u32,
}

/// Serves until a signal says to end.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals().context("signals cannot be taken; start the server again")?;
    let asked = device_server::Options::new(&options.socket, options.size.0, options.vectors).map_err(sorted)?;
    let server = Server::bind(&asked).map_err(sorted)?;
    let size = units::bytes(asked.size_bytes());
    say(&format!("serving {size} at '{}', {} vectors a client", server.socket().display(), asked.vectors()));
    server.run(signals.as_fd(), &mut |event| say(&event.to_string())).map_err(sorted)
}

/// What can never be had is the command line's fault.
fn sorted(error: Error) -> anyhow::Error {
    if error.is_wrong_use() { WrongUse::of(error).into() } else { error.into() }
}

/// The log may have lost its reader; the clients have not lost their server.
fn say(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "crosslane: device server: {text}");
}

/// Readable when the server is to end.
pub fn signals() -> std::io::Result<PipeReader> {
    pipe_of(&[SIGHUP, SIGINT, SIGTERM])
}

/// Readable after one of these signals.
pub fn pipe_of(signals: &[i32]) -> std::io::Result<PipeReader> {
    let (reader, writer) = std::io::pipe()?;
    for signal in signals.iter().copied() {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    Ok(reader)
}
