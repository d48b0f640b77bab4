//! `crosslane rack example`: a rack file to begin with.

use anyhow::{Result, bail};
use rack::{Backend, Rack, Timing, Trust};

use crate::output;
use crate::wrong_use::WrongUse;

/// What the example is of.
#[derive(clap::Args)]
pub struct Options {
    /// How many nodes
    #[arg(long, value_name = "COUNT", default_value = "2", value_parser = clap::value_parser!(u8).range(2..=NODES_MAX))]
    nodes: u8,
    /// How nodes reach the device that joins them: shm, pci or dax
    #[arg(long, value_name = "BACKEND", default_value_t = Backend::Shm)]
    backend: Backend,
    /// Slow the links down to a model: gen3x16, gen4x16, gen5x16, gen6x16 or ntb [default: as fast as the memory]
    #[arg(long, value_name = "TIMING")]
    link: Option<Timing>,
    /// Who writes windows: proxy, or direct for the programs themselves
    #[arg(long, value_name = "TRUST", default_value_t = Trust::Proxy)]
    trust: Trust,
}

const NODES_MAX: i64 = rack::NODES_MAX as i64;

/// Prints it.
pub fn main(options: &Options) -> Result<()> {
    if let Some(link) = options.link
        && options.backend != Backend::Shm
    {
        let backend = options.backend;
        let what = format!("--link {link}: nodes of backend {backend} share no clock to model a link by");
        bail!(WrongUse::of(format!("{what}; leave --link out, or use --backend shm")));
    }
    let rack = Rack::example(usize::from(options.nodes), options.backend, options.link, options.trust);
    output::print(&rack.to_string())
}
