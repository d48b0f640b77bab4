//! Counters of failover.

use crate::counters::EngineCounters;
use control::counters;
use control::proxy::PeerReport;

counters! {
    /// Counters of connections that have moved to TCP.
    #[derive(Debug, Clone, Copy, Default)]
    pub(in crate::driver) struct FailoverReport {
        /// Connections that are open now.
        pub(super) connections_open: u64,
        /// Connections that moved to TCP.
        pub(super) connections_total: u64,
        /// Connections that were reset, because there was no TCP connection or it broke.
        pub(super) resets: u64,
        /// Counters of the engines over TCP.
        pub(super) counters: EngineCounters,
    }
}

impl FailoverReport {
    /// Converts the counters to those of the monitor's protocol.
    pub(in crate::driver) fn to_peer_report(self) -> PeerReport {
        PeerReport {
            connections_total: self.counters.connections_opened,
            failover_open: self.connections_open,
            failover_total: self.connections_total,
            failover_resets: self.resets,
            failover_bytes_sent: self.counters.bytes_sent,
            failover_bytes_received: self.counters.bytes_received,
            ..PeerReport::default()
        }
    }
}
