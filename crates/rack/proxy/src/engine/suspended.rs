//! Connections with a span, beyond the loss of their link or the death of a proxy.
//!
//! Their programs lose only the rings, and the bytes that were in the proxies just then. The proxy that still has the
//! two descriptors of such a connection, or the next one, to which the monitor has given them, keeps it as a
//! [`SuspendedConnection`] and resumes it over the next link: each end sends `ResumeWithSpan` for every connection that
//! it still has, with the index of the span and the kernel's counts of its socket.
//!
//! | the peer | answer |
//! |---|---|
//! | has it, and has given to its program all that this node has taken, and the reverse | both resume, and ring |
//! | has it, and bytes are missing: they were in a proxy | both reset it |
//! | does not know it | `Reset` |
//!
//! No byte is taken from the programs or given to them before that. An end of a stream is found and forwarded again,
//! which has no effect where it was before.

use super::state::{CONNECTION_RESET, Engine};
use crate::connection::{Connection, Due, Phase};
use crate::frame::{Carried, ConnectionNumber, FrameHeader, FrameKind};
use crate::local::LocalEndpoint;
use crate::table::ConnectionKey;
use fabric::{Inbound, Outbound};
use lane::Chunk;

/// A connection with a span, without a link.
#[derive(Debug)]
pub struct SuspendedConnection<L> {
    /// The number by which both proxies know it.
    pub number: ConnectionNumber,
    /// The proxy's endpoint.
    pub local: L,
    /// When its link was lost: the last link over which the peer mentioned the connection.
    pub lost_ns: u64,
}

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// The link is lost: returns the connections that [`Engine::resume_suspended`] can resume over another link. Resets
    /// all others.
    pub fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<L>> {
        let mut suspended = Vec::new();
        for key in self.table.keys() {
            let Some(connection) = self.table.get(key) else { continue };
            let is_open = connection.has_span && connection.phase == Phase::Open;
            if !is_open || !connection.local.as_mut().is_some_and(L::may_outlive_link) {
                continue;
            }
            let (number, lost_ns) =
                (connection.number, if connection.is_resuming { connection.lost_ns } else { now_ns });
            let local = self.table.remove(key).and_then(|connection| connection.local);
            suspended.extend(local.map(|local| SuspendedConnection { number, local, lost_ns }));
        }
        self.take_down();
        suspended
    }

    /// Resumes a suspended connection. `make` receives the key for [`Engine::endpoint_ready`]. Returns `None` if there
    /// are too many connections, or if another one has its number.
    pub fn resume_suspended(
        &mut self,
        number: ConnectionNumber,
        lost_ns: u64,
        make: impl FnOnce(ConnectionKey) -> L,
    ) -> Option<ConnectionKey> {
        if self.table.is_full() || self.table.find(number).is_some() {
            return None;
        }
        if number.opener() == self.settings.side {
            // A number that is free again at this node may still be in use at the peer, which ends the connection too:
            // it would take the `Open` of another connection for a late frame.
            self.numbers_given = self.numbers_given.max(number.count() / self.settings.number_step + 1);
        }
        let mut connection = Connection::new(number, Phase::Open, self.now_ns);
        (connection.has_span, connection.is_resuming, connection.lost_ns) = (true, true, lost_ns);
        connection.due.add(Due::RESUME);
        let key = self.table.insert(number, connection);
        let local = make(key);
        self.table.get(key).expect("inserted above").local = Some(local);
        self.queue_control(key);
        Some(key)
    }

    /// Returns the number of connections that the peer has not confirmed since the link was lost.
    pub fn unresumed(&mut self) -> usize {
        let keys = self.table.keys();
        keys.into_iter().filter(|key| self.table.get(*key).is_some_and(|connection| connection.is_resuming)).count()
    }

    /// Resets the suspended connections whose link was lost before `lost_ns` and that the peer has not confirmed since.
    pub fn reset_lost_before(&mut self, lost_ns: u64) -> usize {
        self.reset_where(|connection| connection.is_suspended() && connection.lost_ns < lost_ns)
    }

    /// Handles the first frame for a suspended connection.
    pub(super) fn handle_suspended_frame(
        &mut self,
        key: ConnectionKey,
        partition: usize,
        header: &FrameHeader,
        chunk: Chunk,
    ) -> Result<(), &'static str> {
        match header.kind {
            FrameKind::ResumeWithSpan => {}
            FrameKind::Reset => {
                self.handle_reset(key);
                return Ok(());
            }
            _ => return Err("a frame before the resumption"),
        }
        let theirs = Carried::decode(&self.payload(partition, chunk));
        let Some(connection) = self.table.get(key) else { return Ok(()) };
        let Some(local) = connection.local.as_mut().filter(|local| local.span_index() == header.aux) else {
            return Err("a resumption with another span");
        };
        if theirs == Carried::UNKNOWN || local.carried() != Some(theirs.of_other_end()) {
            // Bytes were lost in a proxy, or the kernel has ended the connection.
            self.reset(key, CONNECTION_RESET);
            return Ok(());
        }
        local.wake();
        connection.is_resuming = false;
        connection.due.add(Due::CREDIT);
        self.queue_control(key);
        self.forward_bell(key);
        self.poll_again(key);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
