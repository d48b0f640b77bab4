//! `crosslane router key`: what nodes of several machines know each other by.

use std::path::PathBuf;

use anyhow::Result;
use router_node::control::Key;

use crate::output;

/// Where to.
#[derive(clap::Args)]
pub struct Options {
    /// The file, which must not be there yet
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Makes it.
pub fn main(options: &Options) -> Result<()> {
    Key::create(&options.file)?;
    let file = options.file.display();
    output::print(&format!(
        "{file} is made, for you alone to read: copy it to all machines as it is, and name it as 'key' in the cluster \
         file\n"
    ))
}
