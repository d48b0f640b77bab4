//! Counters of an engine.

use control::counters;

counters! {
    /// Counts since the engine began.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct EngineCounters {
        /// Frames published, of every kind.
        pub frames_sent: u64,
        /// Times that frames were published, all ready frames of a partition at once: each costs at most one fence.
        pub publishes: u64,
        /// Flushes, which wait until all stores have arrived: done before this node sleeps.
        pub flushes: u64,
        /// Frames received, of every kind.
        pub frames_received: u64,
        /// Payload bytes copied from programs' rings to windows, each byte once.
        pub bytes_sent: u64,
        /// Payload bytes received from windows.
        pub bytes_received: u64,
        /// Received bytes that a program had no room for, which were copied once more.
        pub bytes_buffered: u64,
        /// Times that a connection had bytes to send and no credit.
        pub stalls: u64,
        /// Times that a partition had no room for a frame.
        pub partitions_full: u64,
        /// Connections that moved to another class.
        pub moves: u64,
        /// Times that a connection was parked.
        pub parks: u64,
        /// Events of descriptors of connections.
        pub wakes: u64,
        /// Times that the peer slept and was woken.
        pub rings_peer: u64,
        /// Times that a program slept and was woken.
        pub rings_local: u64,
        /// Connections opened, by either side.
        pub connections_opened: u64,
        /// Connections reset, by either side.
        pub resets: u64,
        /// Frames of connections that are over.
        pub frames_late: u64,
        /// Connections that were reset because the peer violated the protocol.
        pub violations: u64,
    }
}
