//! Connections with a span that wait for their link to come up again.

use super::tcp_endpoint::TcpEndpoint;
use crate::engine::SuspendedConnection;
use crate::local::LocalEndpoint;
use control::proxy::{RetainedConnection, RetainedDescriptors};

/// A connection with a span that waits for a link.
#[derive(Debug)]
pub(super) struct AwaitingLink {
    pub(super) peer: u8,
    /// The plan of the engine that had it.
    pub(super) plan: usize,
    pub(super) suspended: SuspendedConnection<TcpEndpoint>,
}

impl AwaitingLink {
    /// Returns what another monitor needs to retain the connection.
    pub(super) fn into_retained(self) -> Option<(RetainedConnection, RetainedDescriptors)> {
        self.suspended.local.into_retained()
    }
}

/// The waiting connections of one thread.
#[derive(Debug, Default)]
pub(super) struct AwaitingLinks(Vec<AwaitingLink>);

impl AwaitingLinks {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn extend(&mut self, connections: impl IntoIterator<Item = AwaitingLink>) {
        self.0.extend(connections);
    }

    /// Removes and returns the connections that a predicate selects.
    pub(super) fn take(&mut self, is_selected: impl Fn(&AwaitingLink) -> bool) -> Vec<AwaitingLink> {
        let (taken, others) = std::mem::take(&mut self.0).into_iter().partition(is_selected);
        self.0 = others;
        taken
    }

    pub(super) fn reset(&mut self, is_selected: impl Fn(&AwaitingLink) -> bool) {
        self.take(is_selected).into_iter().for_each(|connection| connection.suspended.local.reset());
    }

    /// Returns the peer of each connection.
    pub(super) fn peers(&self) -> impl Iterator<Item = u8> {
        self.0.iter().map(|connection| connection.peer)
    }
}
