//! Requests to the nodes of a cluster.

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

/// Returns the status of a node, or `None` when it does not run.
pub fn status(node: &NodePaths) -> Result<Option<Status>> {
    match request(node, Request::Status)? {
        Some((Response::Status(status), _)) => Ok(Some(*status)),
        Some((other, _)) => bail!("a node answers {other:?} to a request for its status; use one release for all"),
        None => Ok(None),
    }
}
