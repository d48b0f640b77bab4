//! What the trials at one load say about a goal.

use super::{Goal, Trial};

/// Rounding of sums of durations: a billionth of a second.
const SLACK_S: f64 = 1e-9;

/// What a load is for a goal (RFC 9971, Load Classification).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadClass {
    /// Whatever the missing trials show, the goal is met.
    LowerBound,
    /// Whatever the missing trials show, the goal is not met.
    UpperBound,
    /// More trials are needed.
    Undecided,
}

/// Classifies a load by its trials (RFC 9971, appendix *Load Classification Code*). Short trials count less: low-loss
/// ones only balance high-loss ones.
pub fn classify(goal: &Goal, trials: &[Trial]) -> LoadClass {
    let sum_s = |is_full: bool, is_high: bool| -> f64 {
        let is_it =
            |trial: &&Trial| is_full_length(goal, trial) == is_full && (trial.loss_ratio > goal.loss_ratio) == is_high;
        trials.iter().filter(is_it).map(|trial| trial.duration_s).sum()
    };
    let balancing_s = sum_s(false, false) * goal.exceed_ratio / (1.0 - goal.exceed_ratio);
    let high_s = sum_s(true, true) + (sum_s(false, true) - balancing_s).max(0.0);
    let full_s = high_s + sum_s(true, false);
    let whole_s = full_s.max(goal.duration_sum_s);
    let allowed_s = whole_s * goal.exceed_ratio + SLACK_S;
    if high_s + (whole_s - full_s) <= allowed_s {
        LoadClass::LowerBound
    } else if high_s > allowed_s {
        LoadClass::UpperBound
    } else {
        LoadClass::Undecided
    }
}

fn is_full_length(goal: &Goal, trial: &Trial) -> bool {
    trial.duration_s >= goal.final_trial_s - SLACK_S
}

/// Returns the rate that is typically forwarded at a lower bound: by the trial with the highest loss that the exceed
/// ratio does not exclude (RFC 9971, appendix *Conditional Throughput Code*). Missing trials count as all lost.
pub fn conditional_throughput(goal: &Goal, load: f64, trials: &[Trial]) -> f64 {
    let mut full: Vec<&Trial> = trials.iter().filter(|trial| is_full_length(goal, trial)).collect();
    full.sort_by(|one, other| one.loss_ratio.total_cmp(&other.loss_ratio));
    let measured_s: f64 = full.iter().map(|trial| trial.duration_s).sum();
    let mut left_s = measured_s.max(goal.duration_sum_s) * (1.0 - goal.exceed_ratio);
    for trial in full {
        left_s -= trial.duration_s;
        if left_s <= SLACK_S {
            return load * (1.0 - trial.loss_ratio);
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn goal(final_trial_s: f64, duration_sum_s: f64, loss_ratio: f64, exceed_ratio: f64) -> Goal {
        Goal { loss_ratio, exceed_ratio, width: 0.01, initial_trial_s: final_trial_s, final_trial_s, duration_sum_s }
    }

    /// The goals of the example in RFC 9971: RFC 2544, TST 009, 1 s final, 20 % exceed.
    fn goals() -> [Goal; 4] {
        [
            goal(60.0, 60.0, 0.0, 0.0),
            goal(60.0, 120.0, 0.0, 0.5),
            goal(1.0, 120.0, 0.005, 0.5),
            goal(60.0, 60.0, 0.005, 0.2),
        ]
    }

    /// The trials of the example up to each of its six points in time.
    fn points() -> Vec<Vec<Trial>> {
        let added = [(59, 1.0, 0.0), (1, 1.0, 0.01), (59, 1.0, 0.01), (1, 1.0, 0.0), (1, 60.0, 0.001), (1, 60.0, 0.0)];
        let mut trials = Vec::new();
        let point = |(count, duration_s, loss_ratio)| {
            trials.extend(vec![Trial { duration_s, loss_ratio }; count]);
            trials.clone()
        };
        added.into_iter().map(point).collect()
    }

    /// By the code of the appendix. The text of the example calls the last goal's bound at points 5 and 6 a lower one,
    /// although its exceed ratios there, 42.9 % and 27.3 %, are above 20 %.
    #[test]
    fn loads_are_classified_as_in_the_example_of_rfc_9971() {
        use LoadClass::{LowerBound as L, Undecided as U, UpperBound as H};
        let expected = [[U, U, U, U], [H, U, U, U], [H, U, U, H], [H, U, L, H], [H, U, L, H], [H, L, L, H]];
        for (trials, expected) in points().iter().zip(expected) {
            assert_eq!(goals().map(|goal| classify(&goal, trials)), expected, "{} trials", trials.len());
        }
    }

    #[test]
    fn conditional_throughput_is_that_of_the_example_of_rfc_9971() {
        let last = points().pop().expect("six points");
        let [strict, tst009, one_second, exceed_20] = goals();
        let of = |goal: &Goal, trials: &[Trial]| conditional_throughput(goal, 1e6, trials);
        assert_eq!([tst009, one_second, exceed_20].map(|goal| of(&goal, &last)), [1e6, 1e6, 999e3]);
        assert_eq!(of(&strict, &points()[0]), 0.0, "short trials do not count");
        assert_eq!(of(&strict, &[Trial { duration_s: 60.0, loss_ratio: 0.0 }]), 1e6);
    }
}
