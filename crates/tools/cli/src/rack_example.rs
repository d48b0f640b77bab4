//! `crosslane rack example`: prints a rack file to start from.

use anyhow::{Result, bail};
use rack::{Backend, Rack, Timing, Trust};

use crate::output;
use crate::wrong_use::WrongUse;

/// Options of `crosslane rack example`.
#[derive(clap::Args)]
pub struct Options {
    /// Number of nodes
    #[arg(long, value_name = "COUNT", default_value = "2", value_parser = clap::value_parser!(u8).range(2..=NODES_MAX))]
    nodes: u8,
    /// How nodes reach the shared device: shm, pci or dax
    #[arg(long, value_name = "BACKEND", default_value_t = Backend::Shm)]
    backend: Backend,
    /// Model the timing of links: gen3x16, gen4x16, gen5x16, gen6x16 or ntb [default: as fast as the memory]
    #[arg(long, value_name = "TIMING")]
    link: Option<Timing>,
    /// What writes the windows: proxy, or direct for the programs themselves
    #[arg(long, value_name = "TRUST", default_value_t = Trust::Proxy)]
    trust: Trust,
}

const NODES_MAX: i64 = rack::NODES_MAX as i64;

/// Prints the rack file.
pub fn main(options: &Options) -> Result<()> {
    if let Some(link) = options.link
        && options.backend != Backend::Shm
    {
        let backend = options.backend;
        let what = format!("--link {link}: nodes of backend {backend} share no clock, which a modelled link needs");
        bail!(WrongUse::of(format!("{what}; leave --link out, or use --backend shm")));
    }
    let rack = Rack::example(usize::from(options.nodes), options.backend, options.link, options.trust);
    output::print(&rack.to_string())
}
