//! What an engine has done.

/// Counts since the engine began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Frames published, of every kind.
    pub frames_sent: u64,
    /// Times that frames were shown to the peer, all of a partition that were ready: each a fence at most.
    pub publishes: u64,
    /// Waits until what was stored has arrived: before this node sleeps.
    pub flushes: u64,
    /// Frames taken, of every kind.
    pub frames_received: u64,
    /// Payload bytes copied from programs' rings to windows, each byte once.
    pub bytes_sent: u64,
    /// Payload bytes that came by windows.
    pub bytes_received: u64,
    /// Of those, bytes that a program had no room for and that were copied once more.
    pub bytes_held: u64,
    /// Times that a connection had bytes to send and no credit.
    pub stalls: u64,
    /// Times that a partition had no room for a frame.
    pub partitions_full: u64,
    /// Connections that went to another class.
    pub moves: u64,
    /// Connections that were put to sleep.
    pub parks: u64,
    /// Connections that were woken.
    pub wakes: u64,
    /// Times that the peer slept and was rung.
    pub rings_peer: u64,
    /// Times that a program slept and was rung.
    pub rings_local: u64,
    /// Connections opened, by either side.
    pub connections_opened: u64,
    /// Connections reset, by either side.
    pub resets: u64,
    /// Frames of connections that are gone already.
    pub frames_late: u64,
    /// Connections that were reset because the peer broke the protocol.
    pub offences: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.frames_sent += more.frames_sent;
        self.publishes += more.publishes;
        self.flushes += more.flushes;
        self.frames_received += more.frames_received;
        self.bytes_sent += more.bytes_sent;
        self.bytes_received += more.bytes_received;
        self.bytes_held += more.bytes_held;
        self.stalls += more.stalls;
        self.partitions_full += more.partitions_full;
        self.moves += more.moves;
        self.parks += more.parks;
        self.wakes += more.wakes;
        self.rings_peer += more.rings_peer;
        self.rings_local += more.rings_local;
        self.connections_opened += more.connections_opened;
        self.resets += more.resets;
        self.frames_late += more.frames_late;
        self.offences += more.offences;
    }
}
