//! `crosslane router node`: runs one node; `crosslane router up` starts it.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use router_node::{Node, NodeError, NodeSettings};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::loaded::LoadedCluster;
use crate::signals;
use crate::wrong_use::WrongUse;

/// Options of `crosslane router node`.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// The node
    #[arg(long, value_name = "NODE")]
    node: String,
}

/// Runs until a signal or a stop request arrives; on SIGHUP, reads the cluster file again. Logs to standard error.
pub fn main(options: &Options) -> Result<()> {
    let pipe = |signals: &[i32]| signals::pipe_of(signals).context("installing signal handlers; start the node again");
    let (signals, hangups) = (pipe(&[SIGINT, SIGTERM])?, pipe(&[SIGHUP])?);
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    let cluster = LoadedCluster::read(&options.cluster)?;
    let index = cluster.select(Some(&options.node))?[0];
    cluster.prepare()?;
    let LoadedCluster { file, paths, path } = cluster;
    let settings = NodeSettings { cluster: file.cluster.clone(), node: index, paths, file: path };
    let classified = |error: NodeError| match error.key(index) {
        Some(key) => WrongUse::of(file.error_at(&key, &error)).into(),
        None => anyhow::Error::from(error),
    };
    Node::new(settings).map_err(classified)?.run(signals.as_fd(), hangups.as_fd()).map_err(classified)
}
