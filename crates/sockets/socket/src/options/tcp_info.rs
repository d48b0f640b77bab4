//! `TCP_INFO` and other values that a lane connection reports as TCP on the loopback interface would.

/// The largest segment of TCP on the loopback interface.
pub const SEGMENT_BYTES_MAX: i32 = 65_483;

/// The largest IPv4 packet on the loopback interface.
pub const PACKET_BYTES_MAX: i32 = 65_535;

/// The TCP states that a lane connection can report, with Linux's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TcpState {
    /// Both directions are open.
    Established = 1,
    /// This side has shut down sending, the peer has not.
    FinWait = 5,
    /// The connection is closed.
    Close = 7,
    /// The peer has shut down sending, this side has not.
    CloseWait = 8,
}

/// The values that a lane connection reports in `TCP_INFO`.
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo {
    /// State of the connection.
    pub state: TcpState,
    /// The last measured round trip, or an estimate.
    pub rtt_us: u32,
    /// Bytes that the peer has received.
    pub bytes_acked: u64,
    /// Bytes that this side has received.
    pub bytes_received: u64,
    /// Bytes sent and not received by the peer yet.
    pub bytes_unsent: u32,
}

/// Size of `struct tcp_info` in Linux 6.
pub const TCP_INFO_BYTES: usize = 248;

/// Returns the bytes of a `struct tcp_info`. Programs built for an older kernel read the beginning only.
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
