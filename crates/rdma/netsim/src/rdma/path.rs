//! What a NIC derives its windows, rates and timeouts from: its link, and the longest path of the network.

use sim::{Span, Time};

use crate::endpoint::{Flow, Framing};
use crate::ideal::IdealFct;
use crate::network::NetworkConfig;
use crate::rate::LinkRate;
use crate::topology::{HostId, Topology};

/// The properties of a network from which a NIC derives its window, rate and timeouts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathProperties {
    /// Rate of the host's link.
    pub rate: LinkRate,
    /// Rate of the network's slowest link.
    pub slowest: LinkRate,
    /// Longest round-trip time of the empty network.
    pub round_trip: Span,
    /// Links on the longest path.
    pub links: u32,
}

/// *Published*: the rate of IRN's simulated links in Gb/s, for which its timeouts are.
const PUBLISHED_GBPS: f64 = 40.0;
/// *Published*: the longest round trip of IRN's simulations: six links of 2 us, there and back.
const PUBLISHED_ROUND_TRIP_NS: f64 = 24_000.0;

impl PathProperties {
    /// Returns the properties that the first host of a network has.
    pub fn of_network(network: &NetworkConfig) -> Self {
        let topology = &network.topology;
        let rate = topology.host_link(HostId(0)).rate;
        let slowest = topology.links().iter().map(|link| link.rate).min().unwrap_or(rate);
        let (round_trip, links) = longest_path(topology);
        Self { rate, slowest, round_trip, links }
    }

    /// Returns the properties of a single cable.
    pub fn of_cable(rate: LinkRate, round_trip: Span) -> Self {
        Self { rate, slowest: rate, round_trip, links: 1 }
    }

    /// Returns the bytes that the host's link carries in this time, plus one packet.
    pub(super) fn bytes_in(&self, span: Span, mtu_bytes: u32) -> u32 {
        (self.rate.gbps() * span.ns() / 8.0) as u32 + mtu_bytes
    }

    /// Returns a timeout that was published for networks of 40 Gb/s and 24 us, as much longer as this network is slower
    /// or longer. Otherwise senders of slow networks would retransmit before any response can arrive.
    pub(super) fn stretched(&self, timeout: Span) -> Span {
        let of_rate = PUBLISHED_GBPS / self.slowest.gbps();
        let of_round_trip = self.round_trip.ns() / PUBLISHED_ROUND_TRIP_NS;
        match of_rate.max(of_round_trip) {
            factor if factor > 1.0 => Span::from_ns(timeout.ns() * factor),
            _ => timeout,
        }
    }
}

/// Returns the longest round-trip time, of a packet with one byte of payload and its acknowledgement, and the largest
/// number of links between two hosts: of the host that is farthest from the first, to that farthest from it. In trees,
/// and in networks whose hosts are alike, no path is longer.
fn longest_path(topology: &Topology) -> (Span, u32) {
    let framing = Framing { payload_bytes: 1, overhead_bytes: 1000, ack_bytes: 86 };
    let ideal = IdealFct::new(topology, framing);
    let others = |from: HostId| (0..topology.hosts()).map(HostId).filter(move |to| *to != from);
    let round_trip = |from, to| ideal.fct(&Flow::new(Time::ZERO, from, to, 1));
    let farthest = |from| others(from).map(|to| (round_trip(from, to), to)).max_by_key(|(span, _)| *span);
    let end = farthest(HostId(0)).map_or(HostId(0), |(_, to)| to);
    let span = farthest(end).map_or(Span::ZERO, |(span, _)| span);
    let links = others(end).map(|to| ideal.links(end, to)).max().unwrap_or(1);
    (span, links)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;

    fn path(lines: &str) -> PathProperties {
        let text = format!(
            "version = 1\n[topology]\nkind = 'graph'\nhosts = ['a', 'b', 'c']\nswitches = ['s']\nlines = [{lines}]\n\
             [workload]\nkind = 'permutation'\n"
        );
        PathProperties::of_network(&Scenario::parse("a.toml", &text).unwrap().network)
    }

    fn line(host: &str, gbps: f64, us: u32) -> String {
        format!("{{ ends = ['{host}', 's'], gbps = {gbps}, delay = '{us} us' }},")
    }

    #[test]
    fn the_longest_path_need_not_begin_at_the_first_host() {
        let found = path(&[line("a", 100.0, 1), line("b", 100.0, 500), line("c", 25.0, 300)].concat());
        assert!((1600e3..1601e3).contains(&found.round_trip.ns()), "{found:?}");
        assert_eq!((found.rate.mbps(), found.slowest.mbps(), found.links), (100_000, 25_000, 2));
    }

    #[test]
    fn published_timeouts_hold_in_fast_and_short_networks_and_grow_with_others() {
        let stretched = |gbps, us| {
            let lines: String = ["a", "b", "c"].map(|host| line(host, gbps, us)).concat();
            path(&lines).stretched(Span::from_ns(100_000.0)).ns() / 1e3
        };
        assert_eq!([(400.0, 1), (100.0, 1), (40.0, 5)].map(|(gbps, us)| stretched(gbps, us)), [100.0; 3]);
        assert_eq!(stretched(1.0, 1), 4_000.0);
        assert!((4_160.0..4_180.0).contains(&stretched(100.0, 250)), "{}", stretched(100.0, 250));
    }
}
