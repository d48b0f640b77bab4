//! Comparison of one policy with the best of several others, over rounds in which each was measured.
//!
//! The minimum of six noisy figures is biased: compared with it, even a seventh sample of the same distribution looks
//! worse. The best policy is therefore chosen in one half of the rounds and evaluated in the other half, and vice versa
//! (two-fold cross-validation: Stone, Journal of the Royal Statistical Society B 36, 1974).

use stats::Ratio;

use crate::statistics::median;

/// The figures of one policy by round; `None` for a round without a valid figure.
pub(super) type ByRound = Vec<Option<f64>>;

/// The numbers of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// Rounds in which all policies are measured.
    pub all: usize,
    /// The maximum with the additional rounds, in which only the adaptive policy and the candidates for the best fixed
    /// one are measured, until their ratio is known to a twentieth.
    pub most: usize,
}

impl Rounds {
    /// Returns rounds with all policies and no additional ones.
    pub const fn with_all(all: usize) -> Rounds {
        Rounds { all, most: all }
    }

    /// Returns whether additional rounds are allowed until the difference between the two is known.
    pub(super) const fn compares(self) -> bool {
        self.most > self.all
    }
}

/// The direction in which figures are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Better {
    /// Smaller figures are better: latencies.
    Less,
    /// Larger figures are better: rates.
    More,
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BestComparison {
    /// The index of the policy that is the best over all rounds.
    pub best: usize,
    /// The median figure of the chosen policies, in rounds by which they were not chosen.
    pub best_value: f64,
    /// The figure of the policy as a multiple of theirs.
    pub ratio: Ratio,
}

/// Compares a policy with the best of the others. Returns `None` if there are no others or they have no valid round.
pub(super) fn compare_with_best(policy: &[Option<f64>], others: &[&ByRound], better: Better) -> Option<BestComparison> {
    let best = best_of(others, better, |_| true)?;
    let (mut values, mut ratios) = (Vec::new(), Vec::new());
    for half in 0..2 {
        // A single round per half leaves only the choice over all rounds.
        let chosen = best_of(others, better, |round| round % 2 != half).unwrap_or(best);
        for round in (half..policy.len()).step_by(2) {
            let Some(value) = others[chosen].get(round).copied().flatten() else { continue };
            values.push(value);
            ratios.extend(policy[round].map(|figure| figure / value));
        }
    }
    Some(BestComparison { best, best_value: median(values)?, ratio: Ratio::of(&ratios) })
}

/// Returns the policy with the best median over the counted rounds.
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
        let found = compare_with_best(&policy, &[&slow, &fast], Better::Less).unwrap();
        assert_eq!(found, BestComparison { best: 1, best_value: 4.5, ratio: Ratio::of(&[0.5, 0.5, 2.0, 2.0]) });
        let found = compare_with_best(&policy, &[&slow, &fast], Better::More).unwrap();
        assert_eq!((found.best, found.best_value), (0, 9.25));
    }

    #[test]
    fn the_choice_of_the_best_policy_is_unbiased() {
        // Seven policies of the same distribution: the minimum of six medians is biased, and the cross-validated choice
        // is not.
        let mut state = 7_u64;
        let mut noisy = || -> ByRound {
            let mut draw = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                Some(1.0 + (state >> 33) as f64 / f64::from(1 << 30))
            };
            (0..11).map(|_| draw()).collect()
        };
        let (mut unbiased, mut biased) = (Vec::new(), Vec::new());
        for _ in 0..400 {
            let others: Vec<ByRound> = (0..6).map(|_| noisy()).collect();
            let (policy, others) = (noisy(), others.iter().collect::<Vec<_>>());
            let found = compare_with_best(&policy, &others, Better::Less).unwrap();
            unbiased.push(found.ratio.median);
            let of = |rounds: &ByRound| median(rounds.iter().copied().flatten()).unwrap();
            biased.push(of(&policy) / of(others[found.best]));
        }
        let [unbiased, biased] = [unbiased, biased].map(|ratios| median(ratios).unwrap());
        assert!((unbiased - 1.0).abs() < 0.04 && biased > 1.15, "{unbiased} {biased}");
    }

    #[test]
    fn rounds_without_a_figure_are_left_out() {
        let other = vec![Some(2.0), None, Some(4.0), Some(8.0)];
        let policy = vec![Some(1.0), Some(9.0), None, Some(2.0)];
        let found = compare_with_best(&policy, &[&other], Better::Less).unwrap();
        assert_eq!(found, BestComparison { best: 0, best_value: 4.0, ratio: Ratio::of(&[0.5, 0.25]) });
        assert_eq!(compare_with_best(&policy, &[], Better::Less), None);
        assert_eq!(compare_with_best(&policy, &[&vec![None; 4]], Better::Less), None);
    }

    #[test]
    fn one_round_is_compared_with_itself() {
        let found =
            compare_with_best(&by_round(&[3.0]), &[&by_round(&[6.0]), &by_round(&[5.0])], Better::Less).unwrap();
        assert_eq!(found, BestComparison { best: 1, best_value: 5.0, ratio: Ratio::of(&[0.6]) });
    }
}
