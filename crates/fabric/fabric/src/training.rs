//! Training: how two endpoints agree that a link is up, and on its epoch. A state machine without I/O.

use crate::{Epoch, LinkState};

/// The phase that an endpoint has published to the peer, in the two low bits of the word below the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The endpoint does not use the link.
    Down = 0,
    /// The endpoint has stopped storing for older epochs. Stores keep their order, so a peer that sees this phase has
    /// seen all of those stores.
    Stopped = 1,
    /// The endpoint's inbound window is zeroed, so the peer may store in it.
    Ready = 2,
}

/// One endpoint of the training of a link.
///
/// Each endpoint publishes one word, [`Training::word`], to the peer, and steps with the word that the peer published
/// last. The endpoint with the lower epoch follows the other, so both reach the same epoch. A peer that publishes
/// invalid words keeps only its own link down.
///
/// ```text
///            train                  the peer has stopped too:
///   Down ───────────► Stopped(e) ─── zero the inbound window ────► Ready(e)     up = both endpoints Ready(e)
///    ▲                                                               │
///    └─────────────── taken down, or the peer left e ────────────────┘
/// ```
#[derive(Debug)]
pub struct Training {
    epoch: Epoch,
    phase: Phase,
}

impl Training {
    /// Attaches an endpoint to a link whose peer has published `theirs` (0: nothing).
    pub fn attach(theirs: u32) -> Self {
        let (epoch, _) = decode(theirs);
        Self { epoch, phase: Phase::Down }
    }

    /// Whether a word says that its endpoint has finished training for `epoch` and has not left it.
    pub fn is_ready(word: u32, epoch: Epoch) -> bool {
        decode(word) == (epoch, Some(Phase::Ready))
    }

    /// The word to publish to the peer.
    pub fn word(&self) -> u32 {
        self.epoch.0 << PHASE_BITS | self.phase as u32
    }

    /// The epoch that the endpoint is training for, or has trained for last.
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

    /// Makes one step of training. `zero_window` zeroes the inbound window. It is called when no store of an older
    /// epoch can arrive any more and no store of this epoch can have arrived. Publish [`Training::word`] afterwards.
    pub fn step(&mut self, theirs: u32, zero_window: impl FnOnce(Epoch)) {
        let (their_epoch, their_phase) = decode(theirs);
        let in_use = matches!(their_phase, Some(Phase::Stopped | Phase::Ready));
        match self.phase {
            Phase::Stopped if their_epoch == self.epoch && in_use => {
                zero_window(self.epoch);
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

    /// Follows a peer that is ahead and stopped; otherwise begins a new epoch. Only a peer that published invalid words
    /// reaches the last epoch. The link then starts again at the first epoch: otherwise it would stay down for ever,
    /// also for an honest successor of that peer.
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

/// Decodes a peer's word. The phase is `None` for a word that no honest peer publishes.
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

    /// Two endpoints that see each other's word immediately.
    struct Pair {
        endpoints: [Training; 2],
        zeroed: [Epoch; 2],
    }

    impl Pair {
        fn new() -> Self {
            Self { endpoints: [Training::attach(0), Training::attach(0)], zeroed: [Epoch::NONE; 2] }
        }

        fn step(&mut self, index: usize) {
            let theirs = self.endpoints[1 - index].word();
            let zeroed = &mut self.zeroed[index];
            self.endpoints[index].step(theirs, |epoch| {
                assert!(epoch > *zeroed, "zeroed twice for epoch {epoch}");
                *zeroed = epoch;
            });
        }

        fn state(&self, index: usize) -> LinkState {
            self.endpoints[index].state(self.endpoints[1 - index].word())
        }

        fn act(&mut self, index: usize, action: u8) {
            match action {
                0..=5 => self.step(index),
                6 => self.endpoints[index].take_down(),
                _ => self.endpoints[index] = Training::attach(self.endpoints[1 - index].word()),
            }
        }
    }

    /// The epoch in which both endpoints come up when they train alternately, each with a zeroed window.
    fn settled(pair: &mut Pair) -> Option<Epoch> {
        (0..8).for_each(|turn| pair.step(turn % 2));
        let epochs = pair.endpoints.each_ref().map(Training::epoch);
        let is_up = [pair.state(0), pair.state(1)] == [LinkState::Up; 2];
        (is_up && epochs[0] == epochs[1] && pair.zeroed == epochs).then_some(epochs[0])
    }

    #[test]
    fn a_fresh_link_is_down_and_training_brings_it_up_in_epoch_one() {
        let mut pair = Pair::new();
        assert_eq!(pair.state(0), LinkState::Down);
        pair.step(0);
        assert_eq!(pair.state(0), LinkState::Training);
        (0..2).for_each(|_| [1, 0].into_iter().for_each(|end| pair.step(end)));
        assert_eq!([pair.state(0), pair.state(1)], [LinkState::Up; 2]);
        assert_eq!([pair.endpoints[0].epoch(), pair.endpoints[1].epoch()], [Epoch(1); 2]);
    }

    #[test]
    fn a_peer_that_claims_the_last_epoch_keeps_the_link_down_until_an_honest_peer_attaches() {
        for phase in 0..4 {
            let mut pair = Pair::new();
            let claim = Epoch::MAX.0 << PHASE_BITS | phase;
            for _ in 0..5 {
                pair.endpoints[0].step(claim, |_| {});
                assert_ne!(pair.endpoints[0].state(claim), LinkState::Up);
            }
            pair.endpoints[1] = Training::attach(pair.endpoints[0].word());
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
        fn after_any_history_both_endpoints_come_up_in_a_newer_epoch(
            actions in prop::collection::vec((0..2_usize, 0..8_u8), 0..40)
        ) {
            let mut pair = Pair::new();
            for (index, action) in actions {
                let epoch_before = pair.endpoints[index].epoch();
                pair.act(index, action);
                prop_assert!(pair.endpoints[index].epoch() >= epoch_before || action == 7);
                let up = [pair.state(0), pair.state(1)].map(|state| state == LinkState::Up);
                prop_assert_eq!(up[0], up[1]);
            }
            let epoch_first = settled(&mut pair);
            prop_assert!(epoch_first.is_some());
            pair.endpoints[0].take_down();
            prop_assert_eq!(pair.state(1), LinkState::Down);
            prop_assert!(settled(&mut pair) > epoch_first);
        }

        #[test]
        fn invalid_words_do_not_panic_and_lower_the_epoch_only_after_the_last(
            words in prop::collection::vec(prop_oneof![any::<u32>(), u32::MAX - 9..=u32::MAX], 0..40)
        ) {
            let mut endpoint = Training::attach(words.first().copied().unwrap_or(0));
            for word in words {
                let epoch_before = endpoint.epoch();
                endpoint.step(word, |_| {});
                let starts_again = epoch_before.max(decode(word).0) == Epoch::MAX && endpoint.epoch() == Epoch(1);
                prop_assert!(endpoint.epoch() >= epoch_before || starts_again);
                prop_assert!((Epoch(1)..=Epoch::MAX).contains(&endpoint.epoch()));
            }
        }

        #[test]
        fn with_any_initial_words_both_endpoints_come_up_in_one_epoch(words in any::<[u32; 2]>(), steps in 0..6_usize) {
            let mut pair = Pair { endpoints: words.map(Training::attach), zeroed: [Epoch::NONE; 2] };
            let mut alone = Training::attach(words[1]);
            (0..steps).for_each(|_| alone.step(words[1], |_| {}));
            prop_assert_ne!(alone.state(words[1]), LinkState::Up);
            pair.endpoints[0] = alone;
            pair.endpoints[1] = Training::attach(pair.endpoints[0].word());
            prop_assert!(settled(&mut pair).is_some());
        }
    }
}
