//! `crosslane router node`: one node, which `crosslane router up` starts.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use router_node::{Node, NodeError, Settings};

use super::loaded::LoadedCluster;
use crate::device_server::signals;
use crate::wrong_use::WrongUse;

/// Which node.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// The node
    #[arg(long, value_name = "NODE")]
    node: String,
}

/// Works until a signal or a command says to end. What it says goes to standard error.
pub fn main(options: &Options) -> Result<()> {
    let signals = signals().context("signals cannot be taken; start the node again")?;
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    let cluster = LoadedCluster::read(&options.cluster)?;
    let index = cluster.chosen(Some(&options.node))?[0];
    cluster.prepare()?;
    let LoadedCluster { file, places, .. } = cluster;
    let settings = Settings { cluster: file.cluster.clone(), node: index, places };
    let sorted = |error: NodeError| match error.key(index) {
        Some(key) => WrongUse::of(file.fault(&key, &error)).into(),
        None => anyhow::Error::from(error),
    };
    Node::new(settings).map_err(sorted)?.run(signals.as_fd()).map_err(sorted)
}
