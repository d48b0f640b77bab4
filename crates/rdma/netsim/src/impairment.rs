//! What lines do to packets.

use sim::{Random, Span};

/// What is wrong with a line, each way by itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Impairments {
    /// Which packets are lost.
    pub loss: Loss,
    /// The share of packets that are late.
    pub reorder: f64,
    /// How late those are at most; evenly from nothing.
    pub reorder_delay_max: Span,
    /// The share of packets that arrive twice.
    pub duplicate: f64,
    /// The share of packets whose checksum is wrong when they arrive.
    pub corrupt: f64,
}

/// Which packets are lost.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Loss {
    /// None.
    #[default]
    None,
    /// Each one with this probability.
    Uniform(f64),
    /// In bursts.
    GilbertElliott(GilbertElliott),
    /// These, counted from 0 on this line and this way, in order.
    Listed(Vec<u64>),
}

/// A line that is good or bad, and changes at random between packets (Gilbert 1960, Elliott 1963).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GilbertElliott {
    /// The probability to turn bad after a packet.
    pub to_bad: f64,
    /// The probability to turn good after a packet.
    pub to_good: f64,
    /// The loss while good.
    pub loss_good: f64,
    /// The loss while bad.
    pub loss_bad: f64,
}

impl GilbertElliott {
    /// The share of packets lost in the long run.
    pub fn loss(&self) -> f64 {
        let bad = self.to_bad / (self.to_bad + self.to_good);
        bad * self.loss_bad + (1.0 - bad) * self.loss_good
    }
}

impl Impairments {
    /// A line that loses each packet with this probability.
    pub fn uniform_loss(probability: f64) -> Self {
        Self { loss: Loss::Uniform(probability), ..Self::default() }
    }

    /// Whether it does nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// One way of a line that is not perfect.
#[derive(Clone, Debug)]
pub(crate) struct ImpairmentState {
    config: Impairments,
    random: Random,
    is_bad: bool,
    /// Packets so far.
    seen: u64,
    /// Of a list: how many of its packets have come.
    listed: usize,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PacketImpairment {
    pub is_lost: bool,
    pub is_corrupt: bool,
    pub is_duplicated: bool,
    pub late: Span,
}

impl ImpairmentState {
    pub fn new(config: Impairments, random: Random) -> Self {
        Self { config, random, is_bad: false, seen: 0, listed: 0 }
    }

    pub fn fate(&mut self) -> PacketImpairment {
        let is_lost = self.is_lost();
        self.seen += 1;
        let late = if self.random.chance(self.config.reorder) {
            Span::from_ps(self.random.below(self.config.reorder_delay_max.ps() + 1))
        } else {
            Span::ZERO
        };
        let is_duplicated = self.random.chance(self.config.duplicate);
        PacketImpairment { is_lost, late, is_duplicated, is_corrupt: self.random.chance(self.config.corrupt) }
    }

    fn is_lost(&mut self) -> bool {
        match &self.config.loss {
            Loss::None => false,
            Loss::Uniform(probability) => self.random.chance(*probability),
            Loss::GilbertElliott(bursts) => {
                let is_lost = self.random.chance(if self.is_bad { bursts.loss_bad } else { bursts.loss_good });
                let turns = self.random.chance(if self.is_bad { bursts.to_good } else { bursts.to_bad });
                self.is_bad ^= turns;
                is_lost
            }
            Loss::Listed(packets) => {
                let is_lost = packets.get(self.listed) == Some(&self.seen);
                self.listed += usize::from(is_lost);
                is_lost
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(config: Impairments, packets: usize) -> Vec<PacketImpairment> {
        let mut link = ImpairmentState::new(config, Random::new(3, "line"));
        (0..packets).map(|_| link.fate()).collect()
    }

    #[test]
    fn a_list_loses_its_packets_and_no_others() {
        let config = Impairments { loss: Loss::Listed(vec![0, 3, 4]), ..Impairments::default() };
        let lost: Vec<bool> = fates(config, 6).iter().map(|fate| fate.is_lost).collect();
        assert_eq!(lost, [true, false, false, true, true, false]);
    }

    #[test]
    fn bursts_lose_their_share_and_lose_it_together() {
        let bursts = GilbertElliott { to_bad: 0.002, to_good: 0.1, loss_good: 0.0, loss_bad: 0.5 };
        let config = Impairments { loss: Loss::GilbertElliott(bursts), ..Impairments::default() };
        let lost: Vec<bool> = fates(config, 400_000).iter().map(|fate| fate.is_lost).collect();
        let share = |lost: &[bool]| lost.iter().filter(|lost| **lost).count() as f64 / lost.len() as f64;
        let all = share(&lost);
        assert!((all / bursts.loss() - 1.0).abs() < 0.1, "{all}");
        let after_loss: Vec<bool> = lost.windows(2).filter(|pair| pair[0]).map(|pair| pair[1]).collect();
        assert!(share(&after_loss) > 20.0 * all, "a loss makes the next one likely");
    }

    #[test]
    fn the_rest_happens_as_often_as_asked_for() {
        let config = Impairments {
            reorder: 0.25,
            reorder_delay_max: Span::from_ns(100.0),
            duplicate: 0.1,
            corrupt: 0.05,
            ..Impairments::default()
        };
        let fates = fates(config, 100_000);
        let count = |is: fn(&PacketImpairment) -> bool| fates.iter().filter(|fate| is(fate)).count();
        assert!((24_000..26_000).contains(&count(|fate| fate.late > Span::ZERO)));
        assert!((9_500..10_500).contains(&count(|fate| fate.is_duplicated)));
        assert!((4_700..5_300).contains(&count(|fate| fate.is_corrupt)));
        assert_eq!(count(|fate| fate.is_lost), 0);
        assert!(fates.iter().all(|fate| fate.late <= Span::from_ns(100.0)));
    }
}
