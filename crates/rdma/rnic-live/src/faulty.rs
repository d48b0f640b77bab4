//! Packet I/O with injected faults, determined by a seed.

use std::collections::VecDeque;
use std::time::Duration;

use rnic::verbs::NicAddress;
use rnic::wire::Encapsulation;
use sim::Random;

use crate::packet_io::{PacketIo, PacketIoError, ReceivedPacket};

/// Most later packets that overtake a delayed packet.
const OVERTAKES_MAX: u64 = 16;

/// Probabilities of faults. All but `loss_sent` are for received packets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FaultRates {
    /// The packet is lost.
    pub loss: f64,
    /// A sent packet is lost, for peers that do not use [`FaultyIo`] themselves.
    pub loss_sent: f64,
    /// The packet is delivered twice.
    pub duplication: f64,
    /// Up to 16 later packets overtake it.
    pub reordering: f64,
    /// One of its bits is flipped. Where packets have no checksum, it is lost instead.
    pub corruption: f64,
}

/// Number of packets with each fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Received packets lost.
    pub lost: u64,
    /// Sent packets lost.
    pub lost_sent: u64,
    /// Packets delivered twice.
    pub duplicated: u64,
    /// Packets delayed.
    pub reordered: u64,
    /// Packets delivered with a flipped bit.
    pub corrupted: u64,
}

/// A packet taken from the inner I/O.
struct HeldPacket {
    from: NicAddress,
    is_marked: bool,
    encapsulation: Option<Encapsulation>,
    has_identification: bool,
    packet: Vec<u8>,
    /// Number of packets that may still overtake it.
    overtakes: u64,
}

/// Packet I/O that injects faults at random, mostly into received packets. The same seed and the same packets give the
/// same faults.
pub struct FaultyIo<W> {
    inner: W,
    faults: FaultRates,
    random: Random,
    held: VecDeque<HeldPacket>,
    /// The packet returned by the last [`PacketIo::receive`].
    current: Option<HeldPacket>,
    /// Whether a wait found no packet to overtake the held ones, which are therefore delivered.
    is_quiet: bool,
    counters: FaultCounters,
}

impl<W: PacketIo> FaultyIo<W> {
    /// Injects faults into the packets of `inner`.
    ///
    /// # Errors
    /// When a rate is not a probability.
    pub fn new(inner: W, faults: FaultRates, seed: u64) -> Result<Self, PacketIoError> {
        let FaultRates { loss, loss_sent, duplication, reordering, corruption } = faults;
        let named = [
            ("loss", loss),
            ("loss_sent", loss_sent),
            ("duplication", duplication),
            ("reordering", reordering),
            ("corruption", corruption),
        ];
        if let Some((what, value)) = named.into_iter().find(|(_, value)| !(0.0..=1.0).contains(value)) {
            return Err(PacketIoError::Probability { what, value });
        }
        Ok(Self {
            inner,
            faults,
            random: Random::new(seed, "faults"),
            held: VecDeque::new(),
            current: None,
            is_quiet: false,
            counters: FaultCounters::default(),
        })
    }

    /// Returns the number of faults so far.
    pub fn fault_counters(&self) -> FaultCounters {
        self.counters
    }

    /// Returns the inner packet I/O.
    pub fn inner(&self) -> &W {
        &self.inner
    }

    /// Returns the inner packet I/O, for adding peers.
    pub fn inner_mut(&mut self) -> &mut W {
        &mut self.inner
    }

    /// Receives packets until one is to be delivered.
    fn next(&mut self) -> Result<Option<HeldPacket>, PacketIoError> {
        loop {
            let is_due = |held: &HeldPacket| held.overtakes == 0 || self.is_quiet;
            if let Some(due) = self.held.iter().position(is_due) {
                return Ok(self.held.remove(due));
            }
            let Some(arrival) = self.inner.receive()? else {
                return Ok(None);
            };
            let held = HeldPacket {
                from: arrival.from,
                is_marked: arrival.is_marked,
                encapsulation: arrival.encapsulation,
                has_identification: arrival.has_identification,
                packet: arrival.packet.to_vec(),
                overtakes: 0,
            };
            for late in &mut self.held {
                late.overtakes = late.overtakes.saturating_sub(1);
            }
            if let Some(held) = self.inject_faults(held) {
                return Ok(Some(held));
            }
        }
    }

    /// Injects faults into a packet. Returns it unless it is lost or delayed.
    fn inject_faults(&mut self, mut held: HeldPacket) -> Option<HeldPacket> {
        if self.random.chance(self.faults.loss) {
            self.counters.lost += 1;
            return None;
        }
        if self.random.chance(self.faults.corruption) {
            if held.encapsulation.is_none() {
                self.counters.lost += 1;
                return None;
            }
            let bit = self.random.below(8 * held.packet.len() as u64);
            held.packet[bit as usize / 8] ^= 1 << (bit % 8);
            self.counters.corrupted += 1;
        }
        if self.random.chance(self.faults.duplication) {
            let overtakes = 1 + self.random.below(OVERTAKES_MAX);
            self.held.push_back(HeldPacket { packet: held.packet.clone(), overtakes, ..held });
            self.counters.duplicated += 1;
        }
        if self.random.chance(self.faults.reordering) {
            held.overtakes = 1 + self.random.below(OVERTAKES_MAX);
            self.held.push_back(held);
            self.counters.reordered += 1;
            return None;
        }
        Some(held)
    }
}

impl<W: PacketIo> PacketIo for FaultyIo<W> {
    fn encapsulation(&self, to: NicAddress) -> Result<Option<Encapsulation>, PacketIoError> {
        self.inner.encapsulation(to)
    }

    fn send(&mut self, to: NicAddress, packet: &[u8]) -> Result<bool, PacketIoError> {
        if self.random.chance(self.faults.loss_sent) {
            self.counters.lost_sent += 1;
            return Ok(true); // the sender must not notice
        }
        self.inner.send(to, packet)
    }

    fn flush(&mut self) -> Result<(), PacketIoError> {
        self.inner.flush()
    }

    fn receive(&mut self) -> Result<Option<ReceivedPacket<'_>>, PacketIoError> {
        self.current = self.next()?;
        self.is_quiet &= !self.held.is_empty();
        Ok(self.current.as_ref().map(|held| ReceivedPacket {
            from: held.from,
            is_marked: held.is_marked,
            encapsulation: held.encapsulation,
            has_identification: held.has_identification,
            packet: &held.packet,
        }))
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), PacketIoError> {
        if self.held.is_empty() {
            return self.inner.wait(limit);
        }
        self.is_quiet = true;
        Ok(())
    }

    fn rejected(&self) -> u64 {
        self.inner.rejected()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Delivers packets that hold the numbers 0 to `count`.
    struct CountingIo {
        next: u32,
        count: u32,
        packet: [u8; 4],
        sent: u64,
    }

    impl CountingIo {
        fn new(count: u32) -> Self {
            Self { next: 0, count, packet: [0; 4], sent: 0 }
        }
    }

    impl PacketIo for CountingIo {
        fn encapsulation(&self, _: NicAddress) -> Result<Option<Encapsulation>, PacketIoError> {
            Ok(None)
        }

        fn send(&mut self, _: NicAddress, _: &[u8]) -> Result<bool, PacketIoError> {
            self.sent += 1;
            Ok(true)
        }

        fn flush(&mut self) -> Result<(), PacketIoError> {
            Ok(())
        }

        fn receive(&mut self) -> Result<Option<ReceivedPacket<'_>>, PacketIoError> {
            if self.next == self.count {
                return Ok(None);
            }
            self.packet = self.next.to_be_bytes();
            self.next += 1;
            Ok(Some(ReceivedPacket {
                from: NicAddress(0),
                is_marked: false,
                encapsulation: None,
                has_identification: true,
                packet: &self.packet,
            }))
        }

        fn wait(&mut self, _: Option<Duration>) -> Result<(), PacketIoError> {
            Ok(())
        }

        fn rejected(&self) -> u64 {
            0
        }
    }

    fn received(faults: FaultRates, seed: u64) -> (Vec<u32>, FaultCounters) {
        let mut io = FaultyIo::new(CountingIo::new(10_000), faults, seed).unwrap();
        let mut received = Vec::new();
        for quiet in 0..3 {
            while let Some(arrival) = io.receive().unwrap() {
                received.push(u32::from_be_bytes(arrival.packet.try_into().unwrap()));
            }
            assert!(quiet < 2 || io.held.is_empty());
            io.wait(None).unwrap();
        }
        (received, io.fault_counters())
    }

    #[test]
    fn without_faults_packets_arrive_in_order() {
        let (received, counters) = received(FaultRates::default(), 1);
        assert!(received.into_iter().eq(0..10_000));
        assert_eq!(counters, FaultCounters::default());
    }

    #[test]
    fn the_seed_determines_the_faults() {
        let faults = FaultRates { loss: 0.1, duplication: 0.05, reordering: 0.2, ..FaultRates::default() };
        assert_eq!(received(faults, 1), received(faults, 1));
        assert_ne!(received(faults, 1), received(faults, 2));
    }

    #[test]
    fn each_fault_has_its_effect_and_its_rate() {
        let (lossy, counters) = received(FaultRates { loss: 0.1, ..FaultRates::default() }, 3);
        assert_eq!(lossy.len() as u64, 10_000 - counters.lost);
        assert!((800..1200).contains(&counters.lost), "{counters:?}");
        assert!(lossy.is_sorted());
        let (mut doubled, counters) = received(FaultRates { duplication: 0.1, ..FaultRates::default() }, 3);
        assert_eq!(doubled.len() as u64, 10_000 + counters.duplicated);
        doubled.sort_unstable();
        doubled.dedup();
        assert!(doubled.into_iter().eq(0..10_000) && counters.duplicated > 800);
        let (mut late, counters) = received(FaultRates { reordering: 0.1, ..FaultRates::default() }, 3);
        let overtaken = late.iter().enumerate().map(|(at, number)| (at as i64 - i64::from(*number)).unsigned_abs());
        assert!(overtaken.max().unwrap() <= 3 * OVERTAKES_MAX && !late.is_sorted());
        late.sort_unstable();
        assert!(late.into_iter().eq(0..10_000) && counters.reordered > 800);
        let (_, counters) = received(FaultRates { corruption: 0.1, ..FaultRates::default() }, 3);
        assert!(
            counters.lost > 800 && counters.corrupted == 0,
            "packets without checksums are lost instead of corrupted"
        );
    }

    #[test]
    fn sent_packets_are_lost_at_their_rate_without_an_error() {
        let faults = FaultRates { loss_sent: 0.1, ..FaultRates::default() };
        let mut io = FaultyIo::new(CountingIo::new(0), faults, 3).unwrap();
        assert!((0..10_000).all(|_| io.send(NicAddress(0), &[]).unwrap()));
        let lost = io.fault_counters().lost_sent;
        assert!((800..1200).contains(&lost) && io.inner().sent == 10_000 - lost, "{lost}");
    }

    #[test]
    fn a_rate_that_is_not_a_probability_is_refused() {
        let error =
            FaultyIo::new(CountingIo::new(0), FaultRates { loss: 1.5, ..FaultRates::default() }, 0).err().unwrap();
        assert_eq!(error.to_string(), "loss of 1.5 is not a probability; choose 0 to 1");
    }
}
