//! One policy beside the best of several others, by rounds in which each had its turn.
//!
//! The least of six noisy figures is partly the luckiest one: beside it even a seventh of the same kind looks worse. So
//! the best is chosen in one half of the rounds and stands as it was in the other half, and the other way round
//! (cross-validation in two folds: Stone, Journal of the Royal Statistical Society B 36, 1974).

use stats::Ratio;

use crate::statistics::median;

/// Figures of one policy; nothing where a round says nothing.
pub(super) type ByRound = Vec<Option<f64>>;

/// How many rounds there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// In which all policies take their turn.
    pub all: usize,
    /// With those in which only the adaptive policy does and who may be the best of the others: until the ratio of the
    /// two is known to a twentieth, or there are so many.
    pub most: usize,
}

impl Rounds {
    /// With all policies, and none more.
    pub const fn with_all(all: usize) -> Rounds {
        Rounds { all, most: all }
    }

    /// Whether they may go on until the two are told from each other.
    pub(super) const fn compares(self) -> bool {
        self.most > self.all
    }
}

/// Which of two figures is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Better {
    /// Of latencies.
    Less,
    /// Of rates.
    More,
}

/// What became of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Beside {
    /// Which of the others is the best in all rounds.
    pub best: usize,
    /// The median of what those chosen had in rounds by which they were not chosen.
    pub best_value: f64,
    /// The policy's figure as a multiple of theirs.
    pub ratio: Ratio,
}

/// Compares; nothing where there are no others, or no round says anything of them.
pub(super) fn beside_best(policy: &[Option<f64>], others: &[&ByRound], better: Better) -> Option<Beside> {
    let best = best_of(others, better, |_| true)?;
    let (mut values, mut ratios) = (Vec::new(), Vec::new());
    for half in 0..2 {
        // The only round of its half is all there is to choose by.
        let chosen = best_of(others, better, |round| round % 2 != half).unwrap_or(best);
        for round in (half..policy.len()).step_by(2) {
            let Some(value) = others[chosen].get(round).copied().flatten() else { continue };
            values.push(value);
            ratios.extend(policy[round].map(|figure| figure / value));
        }
    }
    Some(Beside { best, best_value: median(values)?, ratio: Ratio::of(&ratios) })
}

/// The one with the best median over those rounds.
fn best_of(policies: &[&ByRound], better: Better, is_counted: impl Fn(usize) -> bool) -> Option<usize> {
    let of = |rounds: &ByRound| {
        let counted = rounds.iter().enumerate().filter(|(round, _)| is_counted(*round));
        median(counted.filter_map(|(_, value)| *value))
    };
    let medians = policies.iter().enumerate().filter_map(|(at, rounds)| Some((at, of(rounds)?)));
    let best = match better {
        Better::Less => medians.min_by(|(_, one), (_, other)| one.total_cmp(other)),
        Better::More => medians.max_by(|(_, one), (_, other)| one.total_cmp(other)),
    };
    best.map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_round(values: &[f64]) -> ByRound {
        values.iter().copied().map(Some).collect()
    }

    #[test]
    fn the_best_is_the_best_where_one_is() {
        let (slow, fast) = (by_round(&[9.0, 9.5, 9.0, 9.5]), by_round(&[4.0, 5.0, 4.0, 5.0]));
        let policy = by_round(&[2.0, 10.0, 2.0, 10.0]);
        let found = beside_best(&policy, &[&slow, &fast], Better::Less).unwrap();
        assert_eq!(found, Beside { best: 1, best_value: 4.5, ratio: Ratio::of(&[0.5, 0.5, 2.0, 2.0]) });
        let found = beside_best(&policy, &[&slow, &fast], Better::More).unwrap();
        assert_eq!((found.best, found.best_value), (0, 9.25));
    }

    #[test]
    fn luck_does_not_choose_whom_a_policy_stands_beside() {
        // Seven of the same kind, by any seed: the least of six medians is a lucky one, and those chosen are not.
        let mut state = 7_u64;
        let mut noisy = || -> ByRound {
            let mut draw = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                Some(1.0 + (state >> 33) as f64 / f64::from(1 << 30))
            };
            (0..11).map(|_| draw()).collect()
        };
        let (mut fair, mut lucky) = (Vec::new(), Vec::new());
        for _ in 0..400 {
            let others: Vec<ByRound> = (0..6).map(|_| noisy()).collect();
            let (policy, others) = (noisy(), others.iter().collect::<Vec<_>>());
            let found = beside_best(&policy, &others, Better::Less).unwrap();
            fair.push(found.ratio.median);
            let of = |rounds: &ByRound| median(rounds.iter().copied().flatten()).unwrap();
            lucky.push(of(&policy) / of(others[found.best]));
        }
        let [fair, lucky] = [fair, lucky].map(|ratios| median(ratios).unwrap());
        assert!((fair - 1.0).abs() < 0.04 && lucky > 1.15, "{fair} {lucky}");
    }

    #[test]
    fn rounds_that_say_nothing_are_left_out() {
        let other = vec![Some(2.0), None, Some(4.0), Some(8.0)];
        let policy = vec![Some(1.0), Some(9.0), None, Some(2.0)];
        let found = beside_best(&policy, &[&other], Better::Less).unwrap();
        assert_eq!(found, Beside { best: 0, best_value: 4.0, ratio: Ratio::of(&[0.5, 0.25]) });
        assert_eq!(beside_best(&policy, &[], Better::Less), None);
        assert_eq!(beside_best(&policy, &[&vec![None; 4]], Better::Less), None);
    }

    #[test]
    fn one_round_is_compared_with_itself() {
        let found = beside_best(&by_round(&[3.0]), &[&by_round(&[6.0]), &by_round(&[5.0])], Better::Less).unwrap();
        assert_eq!(found, Beside { best: 1, best_value: 5.0, ratio: Ratio::of(&[0.6]) });
    }
}
