//! Talking to the nodes of a cluster.

use anyhow::{Result, anyhow, bail};
use control::{Channel, ChannelError};
use router_node::cluster::NodePaths;
use router_node::management::{Request, Response, Status, VersionedRequest};

use crate::rack_control::{ANSWER_LIMIT, is_nobody, receive};

/// Asks a node; `None` when it is not up.
pub fn ask(node: &NodePaths, what: Request) -> Result<Option<(Response, Channel)>> {
    let (socket, log) = (node.socket(), node.log());
    let channel = match Channel::connect(&socket) {
        Ok(channel) => channel,
        Err(ChannelError::System { error, .. }) if is_nobody(&error) => return Ok(None),
        Err(error) => bail!("node at {}: {error}; see {}", socket.display(), log.display()),
    };
    let silent = || anyhow!("node at {} does not answer; see {}", socket.display(), log.display());
    channel.send(&VersionedRequest::new(what), &[]).map_err(|_| silent())?;
    match receive(&channel, ANSWER_LIMIT)? {
        Some(Response::Refused { reason }) => bail!("node at {}: {reason}", socket.display()),
        Some(answer) => Ok(Some((answer, channel))),
        None => Err(silent()),
    }
}

/// The state of a node; `None` when it is not up.
pub fn status(node: &NodePaths) -> Result<Option<Status>> {
    match ask(node, Request::Status)? {
        Some((Response::Status(status), _)) => Ok(Some(*status)),
        Some((other, _)) => bail!("a node answers {other:?} when asked for its state; use one release for all"),
        None => Ok(None),
    }
}
