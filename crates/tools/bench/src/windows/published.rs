//! Figures that NTSocks (CoNEXT 2022) published, and figures derived from them.

use serde::Serialize;

/// Round trip of 8 bytes of the prototype, over a PCIe 3.0 bridge with 16 lanes.
pub const RTT_8_NS: f64 = 1060.0;
/// Round trip of 4 KiB of the prototype.
pub const RTT_4K_NS: f64 = 7050.0;
/// Ratio of the ping-pong over the Linux TCP of its machines to that of the prototype.
pub const TIMES_BELOW_TCP: f64 = 20.4;
/// Ratio of the ping-pong over RDMA sockets to that of the prototype.
pub const TIMES_BELOW_RDMA: f64 = 2.3;
/// Round trip of RDMA without software.
pub const RDMA_RTT_NS: f64 = 1600.0;

/// Round trip of RDMA sockets that follows from the published ratio: wire and software.
pub const RDMA_SOCKETS_NS: f64 = TIMES_BELOW_RDMA * RTT_8_NS;

/// An assumption of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Assumption {
    /// `published`, `modelled` or `measured`.
    pub kind: &'static str,
    /// The assumption.
    pub what: String,
}

/// Returns all assumptions.
pub fn assumptions() -> Vec<Assumption> {
    let say = |kind, what: String| Assumption { kind, what };
    vec![
        say(
            "modelled",
            "the wire: PCIe 3.0 x16, 500 ns one way, so 1.0 us a round trip; stores are delayed by this".into(),
        ),
        say(
            "modelled",
            "its rate: packets of at most 256 B plus 24 B, one after the other, from any writer; a lane stores 8 B in \
             one of them, and its credit returns in another"
                .into(),
        ),
        say(
            "measured",
            "in addition: all software, on this machine, whose processors differ from those of the paper".into(),
        ),
        say(
            "published",
            format!(
                "NTSocks: 8 B in {:.2} us, 4 KiB in {:.2} us; two Xeon Gold 5218, a bridge of 80 Gb/s",
                RTT_8_NS / 1e3,
                RTT_4K_NS / 1e3
            ),
        ),
        say(
            "published",
            format!(
                "NTSocks: {TIMES_BELOW_TCP} x below Linux TCP, {TIMES_BELOW_RDMA} x below RDMA sockets, on its machines"
            ),
        ),
        say(
            "modelled",
            format!(
                "RDMA sockets: {:.1} us on the wire, {:.2} us of software, to be {TIMES_BELOW_RDMA} x NTSocks' 8 B",
                RDMA_RTT_NS / 1e3,
                (RDMA_SOCKETS_NS - RDMA_RTT_NS) / 1e3
            ),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_software_of_rdma_sockets_follows_from_the_published_ratio() {
        assert!((RDMA_SOCKETS_NS - 2438.0).abs() < 1.0 && RDMA_SOCKETS_NS > RDMA_RTT_NS);
        assert!(assumptions().iter().all(|one| ["published", "modelled", "measured"].contains(&one.kind)));
    }
}
