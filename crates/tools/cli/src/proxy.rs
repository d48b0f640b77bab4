//! `crosslane proxy`: runs the data plane of a node; its monitor starts it.

use anyhow::{Context, Result};
use control::Channel;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::wrong_use::WrongUse;

/// Options of `crosslane proxy`.
#[derive(clap::Args)]
pub struct Options {
    /// Descriptor of the socket to the monitor
    #[arg(long, value_name = "FD", default_value_t = control::proxy::DESCRIPTOR)]
    pub channel: i32,
}

/// Forwards connections until the monitor ends.
pub fn main(options: &Options) -> Result<()> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).context("pidfd_open of this process")?;
    let socket = pidfd_getfd(own, options.channel, PidfdGetfdFlags::empty())
        .map_err(|_| WrongUse::of(format!("descriptor {}: not open; crosslane up starts proxies", options.channel)))?;
    Ok(proxy::driver::run(Channel::new(socket))?)
}
