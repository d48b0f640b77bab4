//! `crosslane router node`: one node, which `crosslane router up` starts.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use router_node::{Node, NodeError, NodeSettings};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::loaded::LoadedCluster;
use crate::device_server::pipe_of;
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

/// Works until a signal or a command says to end; SIGHUP has it read the cluster file again. What it says goes to
/// standard error.
pub fn main(options: &Options) -> Result<()> {
    let taken = |signals: &[i32]| pipe_of(signals).context("signals cannot be taken; start the node again");
    let (signals, hangups) = (taken(&[SIGINT, SIGTERM])?, taken(&[SIGHUP])?);
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    let cluster = LoadedCluster::read(&options.cluster)?;
    let index = cluster.chosen(Some(&options.node))?[0];
    cluster.prepare()?;
    let LoadedCluster { file, places, path } = cluster;
    let settings = NodeSettings { cluster: file.cluster.clone(), node: index, paths: places, file: path };
    let sorted = |error: NodeError| match error.key(index) {
        Some(key) => WrongUse::of(file.error_at(&key, &error)).into(),
        None => anyhow::Error::from(error),
    };
    Node::new(settings).map_err(sorted)?.run(signals.as_fd(), hangups.as_fd()).map_err(sorted)
}
