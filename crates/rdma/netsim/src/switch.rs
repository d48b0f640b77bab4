//! Switches: a buffer shared by all ports, ECN marking, priority flow control, packet trimming and load balancing.

use sim::{Random, Span};
use thiserror::Error;

use crate::packet::PACKET_BYTES_MAX;
use crate::rate::LinkRate;
use crate::topology::{NetworkNode, SwitchId, Topology};

/// Settings of all switches of a network.
#[derive(Clone, Debug, PartialEq)]
pub struct SwitchConfig {
    /// Size of the buffer that all ports of a switch share.
    pub buffer_bytes: u64,
    /// Dynamic threshold factor: a queue may hold `alpha` times the free bytes of the buffer (Choudhury and Hahne
    /// 1998).
    pub alpha: f64,
    /// ECN marking, if any.
    pub ecn: Option<Ecn>,
    /// Priority flow control, if any. Without it, a full buffer drops.
    pub pfc: Option<Pfc>,
    /// Whether a packet that does not fit is cut down to its headers, which are then forwarded with priority.
    pub trimming: bool,
    /// How packets are spread over equal-cost paths.
    pub load_balancing: LoadBalancing,
}

/// ECN marking thresholds on the queue that a packet leaves behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ecn {
    /// Queue length below which no packet is marked, for a link of 100 Gb/s. It scales with the rate.
    pub kmin_bytes: u64,
    /// Queue length above which every packet is marked, for a link of 100 Gb/s. It scales with the rate.
    pub kmax_bytes: u64,
    /// Marking probability just below `kmax_bytes`.
    pub pmax: f64,
}

impl Ecn {
    /// *Published*: the thresholds of HPCC's simulator (9f4be2a, run.py) for DCQCN: 100 and 400 KB, 20% for each
    /// 25 Gb/s. SRNIC's simulations have the same.
    pub const DCQCN: Self = Self { kmin_bytes: 400_000, kmax_bytes: 1_600_000, pmax: 0.2 };
    /// *Published*: the thresholds of the DCQCN paper, as later papers quote them: 5 and 200 KB, 1% at 40 Gb/s.
    pub const DCQCN_PAPER: Self = Self { kmin_bytes: 12_500, kmax_bytes: 500_000, pmax: 0.01 };
    /// *Published*: the single threshold of HPCC's simulator for DCTCP: 30 KB for each 10 Gb/s.
    pub const DCTCP: Self = Self { kmin_bytes: 300_000, kmax_bytes: 300_000, pmax: 1.0 };
}

/// The rate for which the ECN thresholds are given, 100 Gb/s.
const THRESHOLD_RATE_MBPS: u64 = 100_000;

/// Priority flow control (IEEE 802.1Qbb).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pfc {
    /// Threshold factor of ports with the hosts' rate: a port pauses its neighbor when the buffered bytes that came by
    /// the port exceed `alpha` times the free bytes of the buffer. See [`Self::alpha_of`] for faster ports.
    pub alpha: f64,
    /// The neighbor is resumed when those bytes are this far below the threshold.
    pub hysteresis_bytes: u64,
}

/// How packets are spread over equal-cost paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalancing {
    /// Equal-cost multi-path: all packets of a flow take the same path.
    Ecmp,
    /// Each packet takes a random path.
    PacketSpraying,
}

impl Default for SwitchConfig {
    /// Returns the settings published for SRNIC's simulations: 32 MB of buffer, ECN marks from 400 to 1600 KB at
    /// 100 Gb/s, no PFC.
    fn default() -> Self {
        Self {
            buffer_bytes: 32_000_000,
            alpha: 1.0,
            ecn: Some(Ecn::DCQCN),
            pfc: None,
            trimming: false,
            load_balancing: LoadBalancing::Ecmp,
        }
    }
}

impl Default for Pfc {
    fn default() -> Self {
        Self { alpha: 0.125, hysteresis_bytes: 3_000 }
    }
}

/// A switch's buffer is too small for its ports.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "a buffer of {buffer_bytes} B is too small; switch {switch} needs at least {needed_bytes} B for its ports{}: write \
     a larger buffer_bytes",
    if *has_pfc { " and what arrives after a pause" } else { "" }
)]
pub struct BufferError {
    /// The switch's name.
    pub switch: String,
    /// Its buffer size.
    pub buffer_bytes: u64,
    /// The size that it needs: one packet per port and, with PFC, the headroom of every port.
    pub needed_bytes: u64,
    /// Whether priority flow control needs a part of it.
    pub has_pfc: bool,
}

impl SwitchConfig {
    /// Checks that the buffer is large enough for every switch of a topology.
    ///
    /// # Errors
    /// When it is not; the error names the first such switch.
    pub fn check(&self, topology: &Topology) -> Result<(), BufferError> {
        let mut needed = vec![0; topology.switches() as usize];
        for link in topology.links() {
            let packet = u64::from(PACKET_BYTES_MAX);
            let headroom = self.pfc.map_or(0, |_| Pfc::headroom_bytes(link.rate, link.delay, packet));
            for end in link.ends {
                if let NetworkNode::Switch(switch) = end {
                    needed[switch.0 as usize] += packet + headroom;
                }
            }
        }
        match needed.iter().position(|needed| *needed > self.buffer_bytes) {
            Some(switch) => Err(BufferError {
                switch: topology.name(NetworkNode::Switch(SwitchId(switch as u32))).to_owned(),
                buffer_bytes: self.buffer_bytes,
                needed_bytes: needed[switch],
                has_pfc: self.pfc.is_some(),
            }),
            None => Ok(()),
        }
    }
}

/// The state of a switch.
#[derive(Debug)]
pub(crate) struct Switch {
    /// Bytes of the shared buffer in use.
    pub used: u64,
    pub used_max: u64,
    /// Size of the shared buffer: all bytes except the PFC headroom.
    shared: u64,
    alpha: f64,
    random: Random,
    salt: u32,
}

impl Switch {
    /// Creates a switch whose ports reserve `headroom_bytes` of the buffer in total.
    pub fn new(config: &SwitchConfig, headroom_bytes: u64, mut random: Random) -> Self {
        let salt = random.bits() as u32;
        let shared = config.buffer_bytes.saturating_sub(headroom_bytes);
        Self { used: 0, used_max: 0, shared, alpha: config.alpha, random, salt }
    }

    /// Returns whether the shared buffer has room for a packet of `bytes` in a queue that holds `queued` bytes.
    pub fn admits(&self, queued: u64, bytes: u64) -> bool {
        let free = self.shared.saturating_sub(self.used);
        bytes <= free && (queued + bytes) as f64 <= self.alpha * free as f64
    }

    pub fn allocate(&mut self, bytes: u64) {
        self.used += bytes;
        assert!(self.used <= self.shared, "a buffer of {} B holds {} B", self.shared, self.used);
        self.used_max = self.used_max.max(self.used);
    }

    pub fn release(&mut self, bytes: u64) {
        self.used -= bytes;
    }

    /// Returns how many buffered bytes may come by a port with this threshold factor before its neighbor is paused.
    pub fn pause_threshold(&self, alpha: f64) -> u64 {
        (alpha * self.shared.saturating_sub(self.used) as f64) as u64
    }

    /// Returns the index of the path for a packet with this label, below `paths`.
    pub fn select_path(&mut self, load_balancing: LoadBalancing, label: u32, paths: usize) -> usize {
        let bits = match load_balancing {
            LoadBalancing::Ecmp => u64::from(mix32(label ^ self.salt)),
            LoadBalancing::PacketSpraying => self.random.bits() >> 32,
        };
        ((bits * paths as u64) >> 32) as usize
    }

    /// Returns whether to mark a packet that leaves `queued` bytes behind in its queue.
    pub fn should_mark(&mut self, ecn: &Ecn, rate: LinkRate, queued: u64) -> bool {
        // The common case, so it does without a division.
        if queued.saturating_mul(THRESHOLD_RATE_MBPS) <= ecn.kmin_bytes.saturating_mul(rate.mbps()) {
            return false;
        }
        let at_100_gbps = queued as f64 * 100.0 / rate.gbps();
        let (kmin, kmax) = (ecn.kmin_bytes as f64, ecn.kmax_bytes as f64);
        at_100_gbps >= kmax || self.random.chance(ecn.pmax * (at_100_gbps - kmin) / (kmax - kmin))
    }
}

impl Pfc {
    /// Returns the threshold factor of a port: as much more as it is faster than the fastest host, because it carries
    /// the packets of as many more hosts; at most 1, or all of the free buffer. *Published*: HPCC's simulator, whose
    /// factor doubles with the rate.
    pub fn alpha_of(&self, rate: LinkRate, host_rate: LinkRate) -> f64 {
        let faster = (rate.gbps() / host_rate.gbps()).max(1.0);
        (self.alpha * faster).min(self.alpha.max(1.0))
    }

    /// Returns how many bytes may still arrive on a link after a pause was requested: the bytes in flight in both
    /// directions, a packet whose transmission has begun at the neighbor, and one that delays the pause frame here.
    pub fn headroom_bytes(rate: LinkRate, delay: Span, packet_bytes_max: u64) -> u64 {
        let in_flight = 2.0 * delay.ns() * rate.gbps() / 8.0;
        in_flight.ceil() as u64 + 2 * packet_bytes_max
    }
}

/// Mixes 32 bits so that every output bit depends on every input bit (the finalizer of MurmurHash3, public domain).
fn mix32(mut bits: u32) -> u32 {
    bits = (bits ^ bits >> 16).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ bits >> 13).wrapping_mul(0xc2b2_ae35);
    bits ^ bits >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(config: &SwitchConfig) -> Switch {
        Switch::new(config, 0, Random::new(1, "switch"))
    }

    #[test]
    fn a_port_that_is_faster_than_the_hosts_may_buffer_as_much_more_before_it_pauses() {
        let rate = |gbps| LinkRate::from_gbps(gbps).unwrap();
        let of = |alpha, gbps| Pfc { alpha, ..Pfc::default() }.alpha_of(rate(gbps), rate(100.0));
        assert_eq!(
            [25.0, 100.0, 200.0, 400.0, 800.0, 1600.0].map(|gbps| of(0.125, gbps)),
            [0.125, 0.125, 0.25, 0.5, 1.0, 1.0]
        );
        assert_eq!((of(2.0, 100.0), of(2.0, 400.0)), (2.0, 2.0));
    }

    #[test]
    fn with_alpha_1_one_queue_gets_half_the_buffer_and_two_get_a_third_each() {
        let config = SwitchConfig { buffer_bytes: 900_000, ..SwitchConfig::default() };
        let fill = |queues: usize| {
            let (mut switch, mut queued) = (switch(&config), vec![0; queues]);
            for packet in 0..10_000 {
                let queue: &mut u64 = &mut queued[packet % queues];
                if switch.admits(*queue, 1000) {
                    switch.allocate(1000);
                    *queue += 1000;
                }
            }
            queued
        };
        assert_eq!(fill(1), [450_000]);
        assert_eq!(fill(2), [300_000, 300_000]);
    }

    #[test]
    fn marking_starts_at_kmin_and_is_certain_at_kmax_scaled_by_the_rate() {
        let ecn = SwitchConfig::default().ecn.unwrap();
        let mut switch = switch(&SwitchConfig::default());
        for (gbps, unit) in [(100.0, 1), (400.0, 4)] {
            let rate = LinkRate::from_gbps(gbps).unwrap();
            let mut share =
                |queued| (0..20_000).filter(|_| switch.should_mark(&ecn, rate, queued)).count() as f64 / 20_000.0;
            assert_eq!(share(400_000 * unit), 0.0);
            assert!((share(1_000_000 * unit) - 0.1).abs() < 0.01);
            assert_eq!(share(1_600_000 * unit), 1.0);
        }
    }

    #[test]
    fn ecmp_keeps_a_flows_path_and_uses_all_paths_and_spraying_changes_paths() {
        let mut switch = switch(&SwitchConfig::default());
        let mut counts = [0_u32; 8];
        for label in 0..8_000 {
            let path = switch.select_path(LoadBalancing::Ecmp, label, 8);
            assert_eq!(path, switch.select_path(LoadBalancing::Ecmp, label, 8));
            counts[path] += 1;
        }
        assert!(counts.iter().all(|count| (880..1120).contains(count)), "{counts:?}");
        let sprayed: Vec<usize> = (0..64).map(|_| switch.select_path(LoadBalancing::PacketSpraying, 1, 8)).collect();
        assert!((0..8).all(|path| sprayed.contains(&path)));
    }
}
