//! `crosslane router key`: creates the key with which nodes on several machines authenticate each other.

use std::path::PathBuf;

use anyhow::Result;
use router_node::control::Key;

use crate::output;

/// Options of `crosslane router key`.
#[derive(clap::Args)]
pub struct Options {
    /// The file to create; it must not exist
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Creates the key file.
pub fn main(options: &Options) -> Result<()> {
    Key::create(&options.file)?;
    let file = options.file.display();
    output::print(&format!(
        "created {file}, which only you can read: copy it to all machines unchanged, and name it as 'key' in the \
         cluster file\n"
    ))
}
