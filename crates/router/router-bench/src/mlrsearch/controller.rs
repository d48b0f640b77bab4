//! The choice of loads and durations.

use std::collections::BTreeMap;

use super::classify::{LoadClass, classify, conditional_throughput};
use super::{Goal, GoalResult, Measurer, Range, SearchResult, Trial};

/// Largest number of trials of a search: several times what a search over the whole range takes.
const TRIALS_MAX: u32 = 1000;
/// The first phase of a goal ends with bounds that are this many times as far apart as the goal asks for.
const FIRST_PHASE_WIDTHS: f64 = 2.0;

/// The trials at each load. The bits of positive numbers are in the order of the numbers.
type Loads = BTreeMap<u64, Vec<Trial>>;

/// The bounds of a goal: each is `None` while no load has shown it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bounds {
    lower: Option<f64>,
    upper: Option<f64>,
}

impl Bounds {
    /// Returns the lowest upper bound, and the highest lower bound below it.
    fn of(goal: &Goal, loads: &Loads) -> Bounds {
        let mut bounds = Bounds::default();
        for (bits, trials) in loads {
            match classify(goal, trials) {
                LoadClass::UpperBound => return Bounds { upper: Some(f64::from_bits(*bits)), ..bounds },
                LoadClass::LowerBound => bounds.lower = Some(f64::from_bits(*bits)),
                LoadClass::Undecided => {}
            }
        }
        bounds
    }

    fn are_close(self, width: f64) -> bool {
        matches!((self.lower, self.upper), (Some(lower), Some(upper)) if upper - lower <= width * upper)
    }

    /// Returns whether a load can still change the bounds.
    fn encloses(self, load: f64) -> bool {
        self.lower.is_none_or(|lower| load > lower) && self.upper.is_none_or(|upper| load < upper)
    }
}

/// Searches for the results of all goals. Each trial counts for every goal.
///
/// # Errors
/// Returns the errors of the measurer.
///
/// # Panics
/// Panics unless `0 < range.min <= range.first <= range.max`.
pub fn search<M: Measurer>(measurer: &mut M, goals: &[Goal], range: Range) -> Result<SearchResult, M::Error> {
    assert!(0.0 < range.min && range.min <= range.first && range.first <= range.max, "{range:?}");
    let mut controller = Controller { measurer, range, loads: Loads::new(), trials: 0, trials_s: 0.0 };
    // The bounds that are found suggest where the next phase has to look.
    let mut hints = Bounds { lower: Some(range.first), upper: None };
    for goal in goals {
        let first_phase = Goal {
            final_trial_s: goal.initial_trial_s,
            duration_sum_s: goal.initial_trial_s,
            width: FIRST_PHASE_WIDTHS * goal.width,
            ..*goal
        };
        for phase in [&first_phase, goal] {
            hints = controller.narrow(phase, hints)?;
        }
    }
    let Controller { loads, trials, trials_s, .. } = controller;
    let goals = goals.iter().map(|goal| result(goal, &loads)).collect();
    Ok(SearchResult { goals, trials, trials_s })
}

fn result(goal: &Goal, loads: &Loads) -> GoalResult {
    let bounds = Bounds::of(goal, loads);
    let trials = bounds.lower.and_then(|lower| Some((lower, loads.get(&lower.to_bits())?)));
    GoalResult {
        lower: bounds.lower,
        upper: bounds.upper,
        conditional_throughput: trials.map(|(lower, trials)| conditional_throughput(goal, lower, trials)),
        is_regular: bounds.are_close(goal.width),
    }
}

struct Controller<'a, M> {
    measurer: &'a mut M,
    range: Range,
    loads: Loads,
    trials: u32,
    trials_s: f64,
}

impl<M: Measurer> Controller<'_, M> {
    /// Runs trials until the bounds of a goal are close, or the range or the number of trials is exhausted. Returns
    /// the bounds.
    fn narrow(&mut self, goal: &Goal, hints: Bounds) -> Result<Bounds, M::Error> {
        let mut hints: Vec<f64> = [hints.lower, hints.upper].into_iter().flatten().collect();
        let mut step = goal.width;
        loop {
            let bounds = Bounds::of(goal, &self.loads);
            let Range { min, max, .. } = self.range;
            let is_exhausted = bounds.lower == Some(max) || bounds.upper == Some(min) || self.trials >= TRIALS_MAX;
            if bounds.are_close(goal.width) || is_exhausted {
                return Ok(bounds);
            }
            hints.retain(|hint| bounds.encloses(*hint));
            let load = match (bounds.lower, bounds.upper) {
                _ if !hints.is_empty() => hints.remove(0),
                (Some(lower), Some(upper)) => f64::midpoint(lower, upper),
                (Some(lower), None) => (lower * (1.0 + step)).min(max),
                (None, Some(upper)) => (upper * (1.0 - step)).max(min),
                (None, None) => self.range.first,
            };
            step = (2.0 * step).min(0.5);
            self.decide(goal, load)?;
        }
    }

    /// Runs trials at a load until a goal is decided there.
    fn decide(&mut self, goal: &Goal, load: f64) -> Result<(), M::Error> {
        loop {
            let trials = self.loads.entry(load.to_bits()).or_default();
            if classify(goal, trials) != LoadClass::Undecided || self.trials >= TRIALS_MAX {
                return Ok(());
            }
            trials.push(self.measurer.trial(load, goal.final_trial_s)?);
            self.trials += 1;
            self.trials_s += goal.final_trial_s;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use sim::Random;

    use super::*;

    const NDR: Goal = Goal {
        loss_ratio: 0.0,
        exceed_ratio: 0.5,
        width: 0.01,
        initial_trial_s: 0.05,
        final_trial_s: 0.25,
        duration_sum_s: 1.0,
    };
    const PDR: Goal = Goal { loss_ratio: 0.005, ..NDR };
    const RANGE: Range = Range { min: 1e3, max: 2e6, first: 1e6 };

    /// A system that forwards up to a capacity, and that is disturbed in a share of the trials: it then loses frames.
    struct System {
        capacity: f64,
        disturbed_share: f64,
        random: Random,
        load_max: f64,
    }

    impl System {
        fn new(capacity: f64, disturbed_share: f64, seed: u64) -> System {
            System { capacity, disturbed_share, random: Random::new(seed, "system"), load_max: 0.0 }
        }
    }

    impl Measurer for System {
        type Error = Infallible;

        fn trial(&mut self, load: f64, duration_s: f64) -> Result<Trial, Infallible> {
            self.load_max = self.load_max.max(load);
            let sent = (load * duration_s) as u64;
            let capacity = (self.capacity * duration_s) as u64;
            let burst = if self.random.unit() < self.disturbed_share { sent / 20 + 1 } else { 0 };
            Ok(Trial::new(duration_s, sent, sent.saturating_sub(capacity) + burst))
        }
    }

    fn found(system: &mut System, goals: &[Goal]) -> SearchResult {
        match search(system, goals, RANGE) {
            Ok(found) => found,
        }
    }

    #[track_caller]
    fn assert_near(result: &GoalResult, capacity: f64, width: f64) {
        let (Some(lower), Some(upper)) = (result.lower, result.upper) else { panic!("{result:?}") };
        // Whole frames are counted.
        let slack = 1.0 + 1e-3;
        assert!(lower <= capacity * slack && upper * slack >= capacity, "{capacity}: {result:?}");
        assert!(result.is_regular && upper - lower <= width * upper, "{capacity}: {result:?}");
    }

    #[test]
    fn both_rates_of_a_system_with_a_threshold_are_found_within_the_goal_width() {
        for capacity in [1.9e6, 1.2e6, 1e6, 7.7e5, 1e5, 2e3] {
            for goals in [[PDR, NDR], [NDR, PDR]] {
                let mut system = System::new(capacity, 0.0, 1);
                let found = found(&mut system, &goals);
                for (goal, result) in goals.iter().zip(&found.goals) {
                    assert_near(result, capacity / (1.0 - goal.loss_ratio), goal.width);
                    let throughput = result.conditional_throughput.unwrap();
                    assert!(throughput <= capacity * 1.001 && throughput >= 0.985 * capacity, "{found:?}");
                }
                assert!(found.trials <= 100, "{found:?}");
            }
        }
    }

    #[test]
    fn disturbances_of_a_quarter_of_the_trials_change_nothing_but_the_number_of_trials() {
        let undisturbed = found(&mut System::new(7.7e5, 0.0, 1), &[PDR, NDR]).trials;
        let mut trials = 0;
        for seed in 0..100 {
            // Enough trials that a majority of them is disturbed very rarely.
            let goals =
                [PDR, NDR].map(|goal| Goal { duration_sum_s: 5.0, initial_trial_s: goal.final_trial_s, ..goal });
            let found = found(&mut System::new(7.7e5, 0.25, seed), &goals);
            for result in &found.goals {
                let lower = result.lower.expect("a rate");
                assert!((0.9 * 7.7e5..=7.75e5).contains(&lower), "seed {seed}: {found:?}");
            }
            trials += found.trials;
        }
        assert!(trials / 100 > undisturbed, "{trials}");
    }

    #[test]
    fn a_goal_without_tolerance_follows_every_disturbance() {
        let strict = Goal { exceed_ratio: 0.0, duration_sum_s: 5.0, ..NDR };
        let lower = found(&mut System::new(7.7e5, 0.25, 1), &[strict]).goals[0].lower;
        assert!(lower.is_none_or(|lower| lower < 0.9 * 7.7e5), "{lower:?}");
    }

    #[test]
    fn a_system_that_is_faster_than_the_source_has_no_upper_bound() {
        let mut system = System::new(3e6, 0.0, 1);
        let found = found(&mut system, &[PDR, NDR]);
        for result in &found.goals {
            assert_eq!((result.lower, result.upper, result.is_regular), (Some(RANGE.max), None, false));
            assert_eq!(result.conditional_throughput, Some(RANGE.max));
        }
        assert!(system.load_max <= RANGE.max);
    }

    #[test]
    fn a_system_that_forwards_nothing_has_no_lower_bound_and_the_search_ends() {
        let found = found(&mut System::new(0.0, 0.0, 1), &[PDR, NDR]);
        for result in &found.goals {
            assert_eq!((result.lower, result.upper, result.is_regular), (None, Some(RANGE.min), false));
        }
        // Trials that contradict each other at random.
        let mut coin = System::new(1e9, 0.5, 7);
        assert!(super::super::search(&mut coin, &[PDR, NDR], RANGE).is_ok_and(|found| found.trials <= TRIALS_MAX));
    }

    #[test]
    fn lower_bounds_rest_on_full_length_trials() {
        /// Short trials lose nothing: buffers hold what is too much.
        struct Buffered;
        impl Measurer for Buffered {
            type Error = Infallible;

            fn trial(&mut self, load: f64, duration_s: f64) -> Result<Trial, Infallible> {
                let sent = (load * duration_s) as u64;
                let room = 5e5 * duration_s + 5e4;
                Ok(Trial::new(duration_s, sent, sent.saturating_sub(room as u64)))
            }
        }
        let Ok(found) = search(&mut Buffered, &[NDR], RANGE);
        // 7e5 frames a second for 0.25 s.
        assert_near(&found.goals[0], 7e5, NDR.width);
    }
}
