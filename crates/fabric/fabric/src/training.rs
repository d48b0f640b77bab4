//! How two ends agree that a link is up, and on its epoch: a state machine without I/O.

use crate::{Epoch, LinkState};

/// What an end has told the peer. It travels in the two low bits of the word, under the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// "I do not use the link."
    Down = 0,
    /// "I store nothing of an older epoch any more": whoever sees this has seen all of those stores, for stores keep
    /// their order.
    Stopped = 1,
    /// "My inbound window is clean: store into it."
    Ready = 2,
}

/// One end of the training of a link.
///
/// Each end publishes one word, [`Training::word`], to the peer, and steps with the word that the peer published last.
/// The end with the lower epoch follows the other, so both get to the same one. A peer that publishes nonsense keeps
/// its own link down.
///
/// ```text
///            train                  the peer has stopped too:
///   Down ───────────► Stopped(e) ─── clean the inbound window ───► Ready(e)     up = both ends Ready(e)
///    ▲                                                               │
///    └─────────────── taken down, or the peer left e ────────────────┘
/// ```
#[derive(Debug)]
pub struct Training {
    epoch: Epoch,
    phase: Phase,
}

impl Training {
    /// An end that attaches to a link whose peer has published `theirs` (0 when nothing).
    pub fn attach(theirs: u32) -> Self {
        let (epoch, _) = decode(theirs);
        Self { epoch, phase: Phase::Down }
    }

    /// Whether a word says that its end has finished training for `epoch`, and has not left it.
    pub fn is_ready(word: u32, epoch: Epoch) -> bool {
        decode(word) == (epoch, Some(Phase::Ready))
    }

    /// What to publish to the peer.
    pub fn word(&self) -> u32 {
        self.epoch.0 << PHASE_BITS | self.phase as u32
    }

    /// The epoch being trained for, or trained for last.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The state of the link while the peer has published `theirs`.
    pub fn state(&self, theirs: u32) -> LinkState {
        let same_epoch = decode(theirs).0 == self.epoch;
        match (self.phase, decode(theirs).1) {
            (Phase::Down, _) => LinkState::Down,
            (Phase::Stopped, _) => LinkState::Training,
            (Phase::Ready, Some(Phase::Ready)) if same_epoch => LinkState::Up,
            (Phase::Ready, Some(Phase::Stopped)) if same_epoch => LinkState::Training,
            (Phase::Ready, _) => LinkState::Down,
        }
    }

    /// One step of training. `clean` zeroes the inbound window; it is called when nothing of an older epoch can arrive
    /// any more and nothing of this one can have arrived. Publish [`Training::word`] afterwards.
    pub fn step(&mut self, theirs: u32, clean: impl FnOnce(Epoch)) {
        let (their_epoch, their_phase) = decode(theirs);
        let in_use = matches!(their_phase, Some(Phase::Stopped | Phase::Ready));
        match self.phase {
            Phase::Stopped if their_epoch == self.epoch && in_use => {
                clean(self.epoch);
                self.phase = Phase::Ready;
            }
            Phase::Stopped if their_epoch <= self.epoch => {} // The peer will follow.
            Phase::Ready if self.state(theirs) != LinkState::Down => {}
            _ => self.begin(their_epoch, their_phase),
        }
    }

    /// Leaves the epoch.
    pub fn take_down(&mut self) {
        self.phase = Phase::Down;
    }

    /// Follows a peer that is ahead and waits for us; goes ahead of any other. Only a peer that published nonsense gets
    /// as far as the last epoch, and its link begins again at the first: one that ended there would stay down for ever,
    /// also for an honest heir of that peer.
    fn begin(&mut self, their_epoch: Epoch, their_phase: Option<Phase>) {
        if their_epoch > self.epoch && their_phase == Some(Phase::Stopped) {
            (self.epoch, self.phase) = (their_epoch, Phase::Stopped);
            return;
        }
        let last = self.epoch.max(their_epoch);
        let next = if last < Epoch::MAX { Epoch(last.0 + 1) } else { Epoch(1) };
        (self.epoch, self.phase) = (next, Phase::Stopped);
    }
}

const PHASE_BITS: u32 = 2;

/// What a peer's word says; no phase for a word that no honest peer publishes.
fn decode(word: u32) -> (Epoch, Option<Phase>) {
    let phase = match word & 0b11 {
        0 => Some(Phase::Down),
        1 => Some(Phase::Stopped),
        2 => Some(Phase::Ready),
        _ => None,
    };
    (Epoch(word >> PHASE_BITS), phase)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two ends that see each other's word at once.
    struct Pair {
        ends: [Training; 2],
        cleaned: [Epoch; 2],
    }

    impl Pair {
        fn new() -> Self {
            Self { ends: [Training::attach(0), Training::attach(0)], cleaned: [Epoch::NONE; 2] }
        }

        fn step(&mut self, end: usize) {
            let theirs = self.ends[1 - end].word();
            let cleaned = &mut self.cleaned[end];
            self.ends[end].step(theirs, |epoch| {
                assert!(epoch > *cleaned, "cleaned twice for epoch {epoch}");
                *cleaned = epoch;
            });
        }

        fn state(&self, end: usize) -> LinkState {
            self.ends[end].state(self.ends[1 - end].word())
        }

        fn act(&mut self, end: usize, action: u8) {
            match action {
                0..=5 => self.step(end),
                6 => self.ends[end].take_down(),
                _ => self.ends[end] = Training::attach(self.ends[1 - end].word()),
            }
        }
    }

    /// The epoch in which both ends come up when they train in turn, each with a clean window.
    fn settled(pair: &mut Pair) -> Option<Epoch> {
        (0..8).for_each(|turn| pair.step(turn % 2));
        let epochs = pair.ends.each_ref().map(Training::epoch);
        let is_up = [pair.state(0), pair.state(1)] == [LinkState::Up; 2];
        (is_up && epochs[0] == epochs[1] && pair.cleaned == epochs).then_some(epochs[0])
    }

    #[test]
    fn a_fresh_link_is_down_and_training_brings_it_up_in_epoch_one() {
        let mut pair = Pair::new();
        assert_eq!(pair.state(0), LinkState::Down);
        pair.step(0);
        assert_eq!(pair.state(0), LinkState::Training);
        (0..2).for_each(|_| [1, 0].into_iter().for_each(|end| pair.step(end)));
        assert_eq!([pair.state(0), pair.state(1)], [LinkState::Up; 2]);
        assert_eq!([pair.ends[0].epoch(), pair.ends[1].epoch()], [Epoch(1); 2]);
    }

    #[test]
    fn a_peer_that_claims_the_last_epoch_keeps_the_link_down_and_its_honest_heir_brings_it_up() {
        for phase in 0..4 {
            let mut pair = Pair::new();
            let claim = Epoch::MAX.0 << PHASE_BITS | phase;
            for _ in 0..5 {
                pair.ends[0].step(claim, |_| {});
                assert_ne!(pair.ends[0].state(claim), LinkState::Up);
            }
            pair.ends[1] = Training::attach(pair.ends[0].word());
            assert!(settled(&mut pair).is_some(), "phase {phase}");
        }
    }

    #[test]
    fn a_word_is_ready_in_its_own_epoch_only() {
        let word = Epoch(7).0 << PHASE_BITS | Phase::Ready as u32;
        assert!(Training::is_ready(word, Epoch(7)));
        assert!(!Training::is_ready(word, Epoch(6)) && !Training::is_ready(word - 1, Epoch(7)));
        assert!(!Training::is_ready(0, Epoch::NONE) && !Training::is_ready(word + 1, Epoch(7)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_happened_before_both_ends_come_up_in_one_newer_epoch(
            actions in prop::collection::vec((0..2_usize, 0..8_u8), 0..40)
        ) {
            let mut pair = Pair::new();
            for (end, action) in actions {
                let epoch_before = pair.ends[end].epoch();
                pair.act(end, action);
                prop_assert!(pair.ends[end].epoch() >= epoch_before || action == 7);
                let up = [pair.state(0), pair.state(1)].map(|state| state == LinkState::Up);
                prop_assert_eq!(up[0], up[1]);
            }
            let epoch_first = settled(&mut pair);
            prop_assert!(epoch_first.is_some());
            pair.ends[0].take_down();
            prop_assert_eq!(pair.state(1), LinkState::Down);
            prop_assert!(settled(&mut pair) > epoch_first);
        }

        #[test]
        fn nonsense_from_a_peer_does_not_panic_and_lowers_the_epoch_only_past_the_last(
            words in prop::collection::vec(prop_oneof![any::<u32>(), u32::MAX - 9..=u32::MAX], 0..40)
        ) {
            let mut end = Training::attach(words.first().copied().unwrap_or(0));
            for word in words {
                let epoch_before = end.epoch();
                end.step(word, |_| {});
                let begins_again = epoch_before.max(decode(word).0) == Epoch::MAX && end.epoch() == Epoch(1);
                prop_assert!(end.epoch() >= epoch_before || begins_again);
                prop_assert!((Epoch(1)..=Epoch::MAX).contains(&end.epoch()));
            }
        }

        #[test]
        fn whatever_memory_held_both_ends_come_up_in_one_epoch(words in any::<[u32; 2]>(), steps in 0..6_usize) {
            let mut pair = Pair { ends: words.map(Training::attach), cleaned: [Epoch::NONE; 2] };
            let mut alone = Training::attach(words[1]);
            (0..steps).for_each(|_| alone.step(words[1], |_| {}));
            prop_assert_ne!(alone.state(words[1]), LinkState::Up);
            pair.ends[0] = alone;
            pair.ends[1] = Training::attach(pair.ends[0].word());
            prop_assert!(settled(&mut pair).is_some());
        }
    }
}
