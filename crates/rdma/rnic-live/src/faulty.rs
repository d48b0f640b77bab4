//! A wire on which things go wrong, by a seed.

use std::collections::VecDeque;
use std::time::Duration;

use rnic::verbs::Address;
use rnic::wire::Encapsulation;
use sim::Random;

use crate::wire::{Arrival, Wire, WireError};

/// By how many later packets a late one is overtaken, at most.
const OVERTAKES_MAX: u64 = 16;

/// How likely it is that a packet which comes is struck; and one that goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// It is lost.
    pub loss: f64,
    /// One that is sent is lost: for a peer whose wire is not [`Faulty`] itself.
    pub loss_sent: f64,
    /// It comes twice.
    pub duplication: f64,
    /// Up to 16 packets that were sent later overtake it.
    pub reordering: f64,
    /// A bit of it is changed. Only where packets have checksums: elsewhere it is lost.
    pub corruption: f64,
}

/// What was done to packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Struck {
    /// Lost.
    pub lost: u64,
    /// Lost of those that were sent.
    pub lost_sent: u64,
    /// Delivered twice.
    pub duplicated: u64,
    /// Delivered late.
    pub reordered: u64,
    /// Delivered with a bit changed.
    pub corrupted: u64,
}

struct Held {
    from: Address,
    is_marked: bool,
    datagram: Option<Encapsulation>,
    is_identified: bool,
    packet: Vec<u8>,
    /// How many packets may still overtake it.
    overtakes: u64,
}

/// A wire whose packets are struck by chance, mostly those that arrive. The same seed and the same packets give the
/// same faults.
pub struct Faulty<W> {
    wire: W,
    faults: Faults,
    random: Random,
    held: VecDeque<Held>,
    /// The one that is given out.
    current: Option<Held>,
    /// Nothing came for a while: what is late comes now.
    is_quiet: bool,
    struck: Struck,
}

impl<W: Wire> Faulty<W> {
    /// Lets packets that come by `wire` be struck.
    ///
    /// # Errors
    /// When something is no probability.
    pub fn new(wire: W, faults: Faults, seed: u64) -> Result<Self, WireError> {
        let Faults { loss, loss_sent, duplication, reordering, corruption } = faults;
        let named = [
            ("loss", loss),
            ("loss_sent", loss_sent),
            ("duplication", duplication),
            ("reordering", reordering),
            ("corruption", corruption),
        ];
        if let Some((what, value)) = named.into_iter().find(|(_, value)| !(0.0..=1.0).contains(value)) {
            return Err(WireError::Probability { what, value });
        }
        Ok(Self {
            wire,
            faults,
            random: Random::new(seed, "faults"),
            held: VecDeque::new(),
            current: None,
            is_quiet: false,
            struck: Struck::default(),
        })
    }

    /// What was done so far.
    pub fn struck(&self) -> Struck {
        self.struck
    }

    /// The wire underneath.
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// The wire underneath, for new peers.
    pub fn wire_mut(&mut self) -> &mut W {
        &mut self.wire
    }

    /// Takes packets off the wire until one may be given out.
    fn next(&mut self) -> Result<Option<Held>, WireError> {
        loop {
            let is_due = |held: &Held| held.overtakes == 0 || self.is_quiet;
            if let Some(due) = self.held.iter().position(is_due) {
                return Ok(self.held.remove(due));
            }
            let Some(arrival) = self.wire.receive()? else {
                return Ok(None);
            };
            let held = Held {
                from: arrival.from,
                is_marked: arrival.is_marked,
                datagram: arrival.datagram,
                is_identified: arrival.is_identified,
                packet: arrival.packet.to_vec(),
                overtakes: 0,
            };
            for late in &mut self.held {
                late.overtakes = late.overtakes.saturating_sub(1);
            }
            if let Some(held) = self.strike(held) {
                return Ok(Some(held));
            }
        }
    }

    /// What comes of a packet now.
    fn strike(&mut self, mut held: Held) -> Option<Held> {
        if self.random.chance(self.faults.loss) {
            self.struck.lost += 1;
            return None;
        }
        if self.random.chance(self.faults.corruption) {
            if held.datagram.is_none() {
                self.struck.lost += 1;
                return None;
            }
            let bit = self.random.below(8 * held.packet.len() as u64);
            held.packet[bit as usize / 8] ^= 1 << (bit % 8);
            self.struck.corrupted += 1;
        }
        if self.random.chance(self.faults.duplication) {
            let overtakes = 1 + self.random.below(OVERTAKES_MAX);
            self.held.push_back(Held { packet: held.packet.clone(), overtakes, ..held });
            self.struck.duplicated += 1;
        }
        if self.random.chance(self.faults.reordering) {
            held.overtakes = 1 + self.random.below(OVERTAKES_MAX);
            self.held.push_back(held);
            self.struck.reordered += 1;
            return None;
        }
        Some(held)
    }
}

impl<W: Wire> Wire for Faulty<W> {
    fn datagram(&self, to: Address) -> Result<Option<Encapsulation>, WireError> {
        self.wire.datagram(to)
    }

    fn send(&mut self, to: Address, packet: &[u8]) -> Result<bool, WireError> {
        if self.random.chance(self.faults.loss_sent) {
            self.struck.lost_sent += 1;
            return Ok(true); // who sent it cannot know
        }
        self.wire.send(to, packet)
    }

    fn flush(&mut self) -> Result<(), WireError> {
        self.wire.flush()
    }

    fn receive(&mut self) -> Result<Option<Arrival<'_>>, WireError> {
        self.current = self.next()?;
        self.is_quiet &= !self.held.is_empty();
        Ok(self.current.as_ref().map(|held| Arrival {
            from: held.from,
            is_marked: held.is_marked,
            datagram: held.datagram,
            is_identified: held.is_identified,
            packet: &held.packet,
        }))
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), WireError> {
        if self.held.is_empty() {
            return self.wire.wait(limit);
        }
        self.is_quiet = true;
        Ok(())
    }

    fn strangers(&self) -> u64 {
        self.wire.strangers()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives out packets 0 to `count`.
    struct Counting {
        next: u32,
        count: u32,
        packet: [u8; 4],
        sent: u64,
    }

    impl Counting {
        fn new(count: u32) -> Self {
            Self { next: 0, count, packet: [0; 4], sent: 0 }
        }
    }

    impl Wire for Counting {
        fn datagram(&self, _: Address) -> Result<Option<Encapsulation>, WireError> {
            Ok(None)
        }

        fn send(&mut self, _: Address, _: &[u8]) -> Result<bool, WireError> {
            self.sent += 1;
            Ok(true)
        }

        fn flush(&mut self) -> Result<(), WireError> {
            Ok(())
        }

        fn receive(&mut self) -> Result<Option<Arrival<'_>>, WireError> {
            if self.next == self.count {
                return Ok(None);
            }
            self.packet = self.next.to_be_bytes();
            self.next += 1;
            Ok(Some(Arrival {
                from: Address(0),
                is_marked: false,
                datagram: None,
                is_identified: true,
                packet: &self.packet,
            }))
        }

        fn wait(&mut self, _: Option<Duration>) -> Result<(), WireError> {
            Ok(())
        }

        fn strangers(&self) -> u64 {
            0
        }
    }

    fn received(faults: Faults, seed: u64) -> (Vec<u32>, Struck) {
        let mut wire = Faulty::new(Counting::new(10_000), faults, seed).unwrap();
        let mut received = Vec::new();
        for quiet in 0..3 {
            while let Some(arrival) = wire.receive().unwrap() {
                received.push(u32::from_be_bytes(arrival.packet.try_into().unwrap()));
            }
            assert!(quiet < 2 || wire.held.is_empty());
            wire.wait(None).unwrap();
        }
        (received, wire.struck())
    }

    #[test]
    fn without_faults_everything_comes_in_order() {
        let (received, struck) = received(Faults::default(), 1);
        assert!(received.into_iter().eq(0..10_000));
        assert_eq!(struck, Struck::default());
    }

    #[test]
    fn a_seed_repeats_its_faults_and_another_makes_others() {
        let faults = Faults { loss: 0.1, duplication: 0.05, reordering: 0.2, ..Faults::default() };
        assert_eq!(received(faults, 1), received(faults, 1));
        assert_ne!(received(faults, 1), received(faults, 2));
    }

    #[test]
    fn each_fault_does_what_it_says_as_often_as_it_says() {
        let (lossy, struck) = received(Faults { loss: 0.1, ..Faults::default() }, 3);
        assert_eq!(lossy.len() as u64, 10_000 - struck.lost);
        assert!((800..1200).contains(&struck.lost), "{struck:?}");
        assert!(lossy.is_sorted());
        let (mut doubled, struck) = received(Faults { duplication: 0.1, ..Faults::default() }, 3);
        assert_eq!(doubled.len() as u64, 10_000 + struck.duplicated);
        doubled.sort_unstable();
        doubled.dedup();
        assert!(doubled.into_iter().eq(0..10_000) && struck.duplicated > 800);
        let (mut late, struck) = received(Faults { reordering: 0.1, ..Faults::default() }, 3);
        let overtaken = late.iter().enumerate().map(|(at, number)| (at as i64 - i64::from(*number)).unsigned_abs());
        assert!(overtaken.max().unwrap() <= 3 * OVERTAKES_MAX && !late.is_sorted());
        late.sort_unstable();
        assert!(late.into_iter().eq(0..10_000) && struck.reordered > 800);
        let (_, struck) = received(Faults { corruption: 0.1, ..Faults::default() }, 3);
        assert!(struck.lost > 800 && struck.corrupted == 0, "without checksums spoilt packets are lost");
    }

    #[test]
    fn of_what_is_sent_the_share_asked_for_is_lost_and_nobody_is_told() {
        let faults = Faults { loss_sent: 0.1, ..Faults::default() };
        let mut wire = Faulty::new(Counting::new(0), faults, 3).unwrap();
        assert!((0..10_000).all(|_| wire.send(Address(0), &[]).unwrap()));
        let lost = wire.struck().lost_sent;
        assert!((800..1200).contains(&lost) && wire.wire().sent == 10_000 - lost, "{lost}");
    }

    #[test]
    fn what_is_no_probability_is_refused() {
        let error = Faulty::new(Counting::new(0), Faults { loss: 1.5, ..Faults::default() }, 0).err().unwrap();
        assert_eq!(error.to_string(), "loss of 1.5 is no probability; choose 0 to 1");
    }
}
