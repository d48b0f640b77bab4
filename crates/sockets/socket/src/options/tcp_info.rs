//! `TCP_INFO` and other values that a lane connection reports as TCP on the loopback interface would.

/// The largest segment TCP has on the loopback interface, which is what a lane would be compared with.
pub const SEGMENT_BYTES_MAX: i32 = 65_483;

/// The largest IPv4 packet on the loopback interface.
pub const PACKET_BYTES_MAX: i32 = 65_535;

/// The states of TCP that a lane connection can show, with Linux's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TcpState {
    /// Both directions open.
    Established = 1,
    /// We have shut down, the peer has not.
    FinWait = 5,
    /// Over.
    Close = 7,
    /// The peer has shut down, we have not.
    CloseWait = 8,
}

/// What is known of a connection for `TCP_INFO`.
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo {
    /// Its state.
    pub state: TcpState,
    /// The last round trip known, or an estimate.
    pub rtt_us: u32,
    /// Bytes the peer has taken.
    pub bytes_acked: u64,
    /// Bytes we have received.
    pub bytes_received: u64,
    /// Bytes sent and not taken yet.
    pub bytes_unsent: u32,
}

/// Bytes of `struct tcp_info` in Linux 6.
pub const TCP_INFO_BYTES: usize = 248;

/// The bytes of a `struct tcp_info` for a lane connection. Older programs know a shorter structure and read its
/// beginning.
pub fn tcp_info(facts: &TcpInfo) -> [u8; TCP_INFO_BYTES] {
    let mut bytes = [0; TCP_INFO_BYTES];
    let segment = SEGMENT_BYTES_MAX as u32;
    bytes[0] = facts.state as u8;
    bytes[5] = 7; // Timestamps, selective acknowledgements and window scaling.
    bytes[6] = 7 << 4 | 7; // Both window scales.
    let words = [
        (8, 200_000),              // tcpi_rto, in microseconds like the round trips
        (12, 40_000),              // tcpi_ato
        (16, segment),             // tcpi_snd_mss
        (20, segment),             // tcpi_rcv_mss
        (60, 65_535),              // tcpi_pmtu
        (64, 65_535),              // tcpi_rcv_ssthresh
        (68, facts.rtt_us),        // tcpi_rtt
        (72, facts.rtt_us / 2),    // tcpi_rttvar
        (76, 0x7fff_ffff),         // tcpi_snd_ssthresh
        (80, 10),                  // tcpi_snd_cwnd
        (84, segment),             // tcpi_advmss
        (88, 3),                   // tcpi_reordering
        (96, 65_535),              // tcpi_rcv_space
        (144, facts.bytes_unsent), // tcpi_notsent_bytes
        (148, facts.rtt_us),       // tcpi_min_rtt
    ];
    for (at, word) in words {
        bytes[at..at + 4].copy_from_slice(&u32::to_ne_bytes(word));
    }
    let counters = [(112, u64::MAX), (120, facts.bytes_acked), (128, facts.bytes_received)];
    for (at, counter) in counters {
        bytes[at..at + 8].copy_from_slice(&counter.to_ne_bytes());
    }
    bytes
}
