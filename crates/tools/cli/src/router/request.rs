//! Requests to the nodes of a cluster.

use std::os::fd::OwnedFd;

use anyhow::{Result, bail};
use control::Channel;
use control::command::Versioned;
use router_node::cluster::NodePaths;
use router_node::management::{Request, Response, Status, VERSION};

use crate::rack_control::Server;

/// Sends a request to a node and returns the answer, or `None` when the node does not run.
pub fn request(node: &NodePaths, request: Request) -> Result<Option<(Response, Channel)>> {
    let server = Server { kind: "node", socket: node.socket(), log: node.log() };
    match server.request(&Versioned { version: VERSION, request })? {
        Some((Response::Refused { reason }, _)) => Err(server.refusal(&reason)),
        answer => Ok(answer),
    }
}

/// Sends a request to a node and returns the answer with its descriptor, or `None` when the node does not run.
pub fn request_descriptor(node: &NodePaths, request: Request) -> Result<Option<(Response, Option<OwnedFd>, Channel)>> {
    let server = Server { kind: "node", socket: node.socket(), log: node.log() };
    match server.request_descriptors(&Versioned { version: VERSION, request })? {
        Some((Response::Refused { reason }, ..)) => Err(server.refusal(&reason)),
        Some((answer, descriptors, channel)) => Ok(Some((answer, descriptors.into_iter().next(), channel))),
        None => Ok(None),
    }
}

/// Returns the status of a node, or `None` when it does not run.
pub fn status(node: &NodePaths) -> Result<Option<Status>> {
    match request(node, Request::Status)? {
        Some((Response::Status(status), _)) => Ok(Some(*status)),
        Some((other, _)) => bail!("a node answers {other:?} to a request for its status; use one release for all"),
        None => Ok(None),
    }
}
