//! What switches do with packets: a buffer that all ports share, marks, pauses, trimming, and the choice among paths.

use sim::{Random, Span};
use thiserror::Error;

use crate::packet::PACKET_BYTES_MAX;
use crate::rate::LinkRate;
use crate::topology::{NetworkNode, Topology};

/// How a network's switches work.
#[derive(Clone, Debug, PartialEq)]
pub struct SwitchConfig {
    /// Bytes that all ports of a switch share.
    pub buffer_bytes: u64,
    /// A queue may be this many times what is free of the buffer (dynamic thresholds, Choudhury and Hahne 1998).
    pub alpha: f64,
    /// Marks of congestion; none without it.
    pub ecn: Option<Ecn>,
    /// Priority flow control; none without it: a full buffer drops.
    pub pfc: Option<Pfc>,
    /// Whether the payload of a packet that does not fit is cut off, and its head sent on before everything else.
    pub trimming: bool,
    /// Which of the shortest paths a packet takes.
    pub load_balancing: LoadBalancing,
}

/// When packets are marked: by the queue that they leave behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ecn {
    /// None is marked below so many bytes, at 100 Gb/s; in proportion at other rates.
    pub kmin_bytes: u64,
    /// All are marked above so many bytes, at 100 Gb/s.
    pub kmax_bytes: u64,
    /// The share that is marked just below that.
    pub pmax: f64,
}

/// The rate for which thresholds of marks are given.
const THRESHOLD_RATE_MBPS: u64 = 100_000;

/// Priority flow control.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pfc {
    /// A port's neighbour is paused when what came from it and is still here is more than this share of what is free.
    pub alpha: f64,
    /// The neighbour goes on when that has shrunk by so many bytes.
    pub hysteresis_bytes: u64,
}

/// Which of the shortest paths a packet takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalancing {
    /// All packets of a flow the same one.
    Ecmp,
    /// Each packet a random one.
    PacketSpraying,
}

impl Default for SwitchConfig {
    /// As published for SRNIC's simulations: 32 MB of buffer, marks from 400 to 1600 KB at 100 Gb/s, no pauses.
    fn default() -> Self {
        Self {
            buffer_bytes: 32_000_000,
            alpha: 1.0,
            ecn: Some(Ecn { kmin_bytes: 400_000, kmax_bytes: 1_600_000, pmax: 0.2 }),
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

/// A buffer that is too small for what it must hold at least.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("a buffer of {buffer_bytes} B; switch {switch} needs at least {needed_bytes} B for its ports")]
pub struct BufferError {
    /// Which switch.
    pub switch: String,
    /// What it has.
    pub buffer_bytes: u64,
    /// What it needs: a packet a port, and with pauses their headroom.
    pub needed_bytes: u64,
}

impl SwitchConfig {
    /// Whether the buffer is large enough for the switches of a topology.
    ///
    /// # Errors
    /// Names the first switch for which it is not.
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
                switch: topology.name(NetworkNode::Switch(crate::topology::SwitchId(switch as u32))).to_owned(),
                buffer_bytes: self.buffer_bytes,
                needed_bytes: needed[switch],
            }),
            None => Ok(()),
        }
    }
}

/// A switch at work.
#[derive(Debug)]
pub(crate) struct Switch {
    /// Bytes of the shared part that are taken.
    pub used: u64,
    pub used_max: u64,
    /// Bytes of the buffer that are shared: all but the headroom.
    shared: u64,
    alpha: f64,
    random: Random,
    salt: u32,
}

impl Switch {
    /// A switch whose ports need so much headroom together.
    pub fn new(config: &SwitchConfig, headroom_bytes: u64, mut random: Random) -> Self {
        let salt = random.bits() as u32;
        let shared = config.buffer_bytes.saturating_sub(headroom_bytes);
        Self { used: 0, used_max: 0, shared, alpha: config.alpha, random, salt }
    }

    /// Whether the shared buffer takes a packet into a queue that holds so much.
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

    /// What a neighbour may have here before it is paused.
    pub fn pause_threshold(&self, pfc: &Pfc) -> u64 {
        (pfc.alpha * self.shared.saturating_sub(self.used) as f64) as u64
    }

    /// Which of so many paths.
    pub fn select_path(&mut self, load_balancing: LoadBalancing, label: u32, paths: usize) -> usize {
        let bits = match load_balancing {
            LoadBalancing::Ecmp => u64::from(mix32(label ^ self.salt)),
            LoadBalancing::PacketSpraying => self.random.bits() >> 32,
        };
        ((bits * paths as u64) >> 32) as usize
    }

    /// Whether a packet is marked that leaves so many bytes in its queue.
    pub fn should_mark(&mut self, ecn: &Ecn, rate: LinkRate, queued: u64) -> bool {
        // As almost always, so without a division.
        if queued.saturating_mul(THRESHOLD_RATE_MBPS) <= ecn.kmin_bytes.saturating_mul(rate.mbps()) {
            return false;
        }
        let at_100_gbps = queued as f64 * 100.0 / rate.gbps();
        let (kmin, kmax) = (ecn.kmin_bytes as f64, ecn.kmax_bytes as f64);
        at_100_gbps >= kmax || self.random.chance(ecn.pmax * (at_100_gbps - kmin) / (kmax - kmin))
    }
}

impl Pfc {
    /// What may still come on a line after its other end was asked to pause: what is under way both ways, a packet that
    /// had begun there and one that had begun here.
    pub fn headroom_bytes(rate: LinkRate, delay: Span, packet_bytes_max: u64) -> u64 {
        let under_way = 2.0 * delay.ns() * rate.gbps() / 8.0;
        under_way.ceil() as u64 + 2 * packet_bytes_max
    }
}

/// A hash of 32 bits in which every bit depends on every bit (the finalizer of MurmurHash3, public domain).
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
    fn one_queue_gets_half_the_buffer_and_two_get_a_third_each() {
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
    fn marks_begin_at_kmin_and_are_certain_at_kmax_in_proportion_to_the_rate() {
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
    fn flows_keep_their_path_and_fill_all_of_them_and_spraying_does_not_keep() {
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
