//! Link impairments: loss, reordering, duplication and corruption of packets.

use sim::{Random, Span};

/// The impairments of one direction of a link; each is drawn independently.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Impairments {
    /// Which packets are lost.
    pub loss: Loss,
    /// The share of packets that are delayed, so that later ones may overtake them.
    pub reorder: f64,
    /// The largest additional delay of those packets; it is uniform from 0.
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
    /// Each packet with this probability.
    Uniform(f64),
    /// Bursts of losses.
    GilbertElliott(GilbertElliott),
    /// The packets with these numbers, counted from 0 in this direction of this link, in ascending order.
    Listed(Vec<u64>),
}

/// The Gilbert-Elliott burst loss model: a link is in a good or a bad state and changes at random between packets
/// (Gilbert 1960, Elliott 1963).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GilbertElliott {
    /// Probability of going from good to bad after a packet.
    pub to_bad: f64,
    /// Probability of going from bad to good after a packet.
    pub to_good: f64,
    /// Loss probability in the good state.
    pub loss_good: f64,
    /// Loss probability in the bad state.
    pub loss_bad: f64,
}

impl GilbertElliott {
    /// Returns the share of packets lost in the long run.
    pub fn mean_loss(&self) -> f64 {
        let bad = self.to_bad / (self.to_bad + self.to_good);
        bad * self.loss_bad + (1.0 - bad) * self.loss_good
    }
}

impl Impairments {
    /// Impairments that only lose packets, each with this probability.
    pub fn uniform_loss(probability: f64) -> Self {
        Self { loss: Loss::Uniform(probability), ..Self::default() }
    }

    /// Returns whether nothing is impaired.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// The impairment process of one direction of a link.
#[derive(Clone, Debug)]
pub(crate) struct ImpairmentState {
    config: Impairments,
    random: Random,
    is_bad: bool,
    /// Packets sent so far.
    seen: u64,
    /// Number of entries of [`Loss::Listed`] that have been lost so far.
    listed: usize,
}

/// What the link does to one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PacketImpairment {
    pub is_lost: bool,
    pub is_corrupt: bool,
    pub is_duplicated: bool,
    pub extra_delay: Span,
}

impl ImpairmentState {
    pub fn new(config: Impairments, random: Random) -> Self {
        Self { config, random, is_bad: false, seen: 0, listed: 0 }
    }

    /// Draws the impairments of the next packet.
    pub fn next_packet(&mut self) -> PacketImpairment {
        let is_lost = self.is_lost();
        self.seen += 1;
        let extra_delay = if self.random.chance(self.config.reorder) {
            Span::from_ps(self.random.below(self.config.reorder_delay_max.ps() + 1))
        } else {
            Span::ZERO
        };
        let is_duplicated = self.random.chance(self.config.duplicate);
        PacketImpairment { is_lost, extra_delay, is_duplicated, is_corrupt: self.random.chance(self.config.corrupt) }
    }

    fn is_lost(&mut self) -> bool {
        match &self.config.loss {
            Loss::None => false,
            Loss::Uniform(probability) => self.random.chance(*probability),
            Loss::GilbertElliott(bursts) => {
                let is_lost = self.random.chance(if self.is_bad { bursts.loss_bad } else { bursts.loss_good });
                self.is_bad ^= self.random.chance(if self.is_bad { bursts.to_good } else { bursts.to_bad });
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

    fn draw(config: Impairments, packets: usize) -> Vec<PacketImpairment> {
        let mut link = ImpairmentState::new(config, Random::new(3, "line"));
        (0..packets).map(|_| link.next_packet()).collect()
    }

    #[test]
    fn listed_packets_are_lost_and_no_others() {
        let config = Impairments { loss: Loss::Listed(vec![0, 3, 4]), ..Impairments::default() };
        let lost: Vec<bool> = draw(config, 6).iter().map(|packet| packet.is_lost).collect();
        assert_eq!(lost, [true, false, false, true, true, false]);
    }

    #[test]
    fn gilbert_elliott_loses_its_share_in_bursts() {
        let bursts = GilbertElliott { to_bad: 0.002, to_good: 0.1, loss_good: 0.0, loss_bad: 0.5 };
        let config = Impairments { loss: Loss::GilbertElliott(bursts), ..Impairments::default() };
        let lost: Vec<bool> = draw(config, 400_000).iter().map(|packet| packet.is_lost).collect();
        let share = |lost: &[bool]| lost.iter().filter(|lost| **lost).count() as f64 / lost.len() as f64;
        let all = share(&lost);
        assert!((all / bursts.mean_loss() - 1.0).abs() < 0.1, "{all}");
        let after_loss: Vec<bool> = lost.windows(2).filter(|pair| pair[0]).map(|pair| pair[1]).collect();
        assert!(share(&after_loss) > 20.0 * all, "a loss makes the next one likely");
    }

    #[test]
    fn reordering_duplication_and_corruption_have_their_probabilities() {
        let config = Impairments {
            reorder: 0.25,
            reorder_delay_max: Span::from_ns(100.0),
            duplicate: 0.1,
            corrupt: 0.05,
            ..Impairments::default()
        };
        let packets = draw(config, 100_000);
        let count = |is: fn(&PacketImpairment) -> bool| packets.iter().filter(|packet| is(packet)).count();
        assert!((24_000..26_000).contains(&count(|packet| packet.extra_delay > Span::ZERO)));
        assert!((9_500..10_500).contains(&count(|packet| packet.is_duplicated)));
        assert!((4_700..5_300).contains(&count(|packet| packet.is_corrupt)));
        assert_eq!(count(|packet| packet.is_lost), 0);
        assert!(packets.iter().all(|packet| packet.extra_delay <= Span::from_ns(100.0)));
    }
}
