//! Transport policies: how each finds lost packets, and where it keeps its state.

/// How a NIC finds what is lost, and where it keeps what it must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportPolicy {
    /// Selective repeat without state on chip: hardware takes what comes in order, software of the host the rest; no
    /// cache of work requests ("SRNIC", NSDI 2023).
    Srnic,
    /// The same with contexts in the host's memory, a few of them on chip: fetched before a queue pair's turn, and
    /// while what came for it waits. This project's own.
    SrnicPaged,
    /// Selective repeat with bitmaps on chip ("IRN", SIGCOMM 2018).
    Irn,
    /// Standard RoCEv2: whatever comes out of order is dropped and sent again.
    GoBackN,
    /// Go-back-N by a NIC whose contexts lie in the host's memory, a few of them in a cache on chip.
    ConnectionCache,
}

impl TransportPolicy {
    /// Whether what comes out of order is kept, and only what is lost sent again.
    pub const fn is_selective(self) -> bool {
        matches!(self, Self::Srnic | Self::SrnicPaged | Self::Irn)
    }

    /// Whether what comes out of order is left to the host's software.
    pub const fn has_slow_path(self) -> bool {
        matches!(self, Self::Srnic | Self::SrnicPaged)
    }
}
