//! `crosslane device-server`: serves the memory and the doorbells of an ivshmem device to virtual machines and to nodes
//! of this machine.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use device_server::{Error, Server};

use crate::pcie::sizes::Size;
use crate::signals;
use crate::wrong_use::WrongUse;

/// Options of `crosslane device-server`.
#[derive(clap::Args)]
pub struct Options {
    /// The unix socket to which clients connect, in a directory that only you can write
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Size of the memory, a power of two
    #[arg(long, value_name = "BYTES", default_value = "64M")]
    pub size: Size,
    /// Doorbells of each client; must equal vectors= of QEMU's device
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub vectors: u32,
}

/// Serves until a signal arrives.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals::to_end().context("installing signal handlers; start the server again")?;
    let config = device_server::Options::new(&options.socket, options.size.0, options.vectors).map_err(classified)?;
    let server = Server::bind(&config).map_err(classified)?;
    let size = units::bytes(config.size_bytes());
    log(&format!("serving {size} at '{}', {} vectors a client", server.socket().display(), config.vectors()));
    server.run(signals.as_fd(), &mut |event| log(&event.to_string())).map_err(classified)
}

/// Classifies an error: a request that no server could satisfy is wrong use, all others are failures.
fn classified(error: Error) -> anyhow::Error {
    if error.is_wrong_use() { WrongUse::of(error).into() } else { error.into() }
}

/// Writes a log line to standard error. A closed log is ignored, since the clients still need the server.
fn log(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "crosslane: device server: {text}");
}
