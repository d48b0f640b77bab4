//! Search by bisection for the highest rate that is carried (RFC 2544, section 26.1), on a machine with other load.
//!
//! The machine takes processors away at times, and a trial that it disturbed is not valid for the measured program. So
//! each rate is searched twice. *Raw*: every trial counts, and one lost frame ends a rate. *Undisturbed*: a trial that
//! the machine is known to have disturbed is repeated, and a loss must occur twice.
//!
//! Long trials are more reliable, and take longer. Short trials therefore search, in steps from a rate near the
//! previous result, and a long trial confirms the result. If it fails, the search continues with long trials from
//! there.

use serde::Serialize;

/// The result of a trial of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All offered packets arrived.
    Carried,
    /// Packets were lost, and the machine did not disturb the trial.
    Lost,
    /// The source could not keep up with the rate.
    Behind,
    /// Packets were lost after the machine disturbed the trial, which is therefore not valid.
    Disturbed,
}

/// The length of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// A trial that narrows the search.
    Short,
    /// A trial that confirms a result.
    Long,
}

/// The rules of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// The relative precision at which the search ends.
    pub precision: f64,
    /// The largest number of trials of a rate: disturbed ones are repeated.
    pub trials_max: u32,
    /// The failed trials after which a rate counts as not carried.
    pub failures: u32,
    /// Whether a long trial confirms the result of short ones. Otherwise all trials are short.
    pub is_confirmed: bool,
}

impl Rules {
    /// Returns the rules of a raw search: every trial counts.
    pub fn raw(precision: f64) -> Rules {
        Rules { precision, trials_max: 1, failures: 1, is_confirmed: true }
    }

    /// Returns the rules of an undisturbed search: trials with known disturbances do not count.
    pub fn undisturbed(precision: f64) -> Rules {
        Rules { precision, trials_max: 6, failures: 2, is_confirmed: true }
    }
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchResult {
    /// The highest rate that was carried; 0 if none was.
    pub rate: f64,
    /// The verdict on the next higher rate that was tried.
    pub ended_by: Verdict,
    /// The number of trials.
    pub trials: u32,
    /// The number of trials that the machine disturbed.
    pub disturbed: u32,
}

/// The largest number of rates that are tried with trials of one length; bisection alone takes seven to find a rate to
/// one percent.
const RATES_MAX: u32 = 20;

/// The first step of the search, as a multiple of the precision; each step is twice the previous one.
const STEP_PRECISIONS: f64 = 4.0;

/// Searches for the highest rate below `ceiling`, a rate that cannot be offered or is not carried, and begins with
/// `first`. The search is shorter if `first` is near the result.
///
/// # Errors
/// Returns the errors of `trial`.
pub fn highest<E>(
    rules: Rules,
    first: f64,
    ceiling: f64,
    trial: impl FnMut(f64, Length) -> Result<Verdict, E>,
) -> Result<SearchResult, E> {
    assert!(first > 0.0 && first <= ceiling, "a search from {first} to {ceiling}");
    let mut search = Search { rules, trial, trials: 0, disturbed: 0 };
    let mut limits = Limits { carried: 0.0, failing: ceiling, ended_by: Verdict::Behind };
    search.narrow(&mut limits, first, Length::Short)?;
    if rules.is_confirmed && limits.carried > 0.0 {
        let found = limits.carried;
        let verdict = search.judge(found, Length::Long)?;
        if verdict != Verdict::Carried {
            limits = Limits { carried: 0.0, failing: found, ended_by: verdict };
            let below = found * (1.0 - STEP_PRECISIONS * rules.precision).max(0.5);
            search.narrow(&mut limits, below, Length::Long)?;
        }
    }
    let Search { trials, disturbed, .. } = search;
    Ok(SearchResult { rate: limits.carried, ended_by: limits.ended_by, trials, disturbed })
}

/// The bounds of the highest rate.
struct Limits {
    carried: f64,
    failing: f64,
    ended_by: Verdict,
}

struct Search<T> {
    rules: Rules,
    trial: T,
    trials: u32,
    disturbed: u32,
}

impl<E, T: FnMut(f64, Length) -> Result<Verdict, E>> Search<T> {
    /// Narrows the bounds: by growing steps from `next` while one bound is not known, then by bisection.
    fn narrow(&mut self, limits: &mut Limits, mut next: f64, length: Length) -> Result<(), E> {
        let mut step = STEP_PRECISIONS * self.rules.precision;
        for _ in 0..RATES_MAX {
            match self.judge(next, length)? {
                Verdict::Carried => limits.carried = next,
                verdict => (limits.failing, limits.ended_by) = (next, verdict),
            }
            let Limits { carried, failing, .. } = *limits;
            if failing - carried <= self.rules.precision * failing {
                break;
            }
            let middle = f64::midpoint(carried, failing);
            next = if carried > 0.0 { middle.min(carried * (1.0 + step)) } else { middle.max(failing * (1.0 - step)) };
            step *= 2.0;
        }
        Ok(())
    }

    /// Runs one trial and counts it.
    fn try_once(&mut self, rate: f64, length: Length) -> Result<Verdict, E> {
        let verdict = (self.trial)(rate, length)?;
        self.trials += 1;
        self.disturbed += u32::from(verdict == Verdict::Disturbed);
        Ok(verdict)
    }

    /// Runs trials until one carries the rate or enough have failed.
    fn judge(&mut self, rate: f64, length: Length) -> Result<Verdict, E> {
        let (mut failures, mut last) = (0, Verdict::Disturbed);
        for _ in 0..self.rules.trials_max {
            match self.try_once(rate, length)? {
                Verdict::Carried => return Ok(Verdict::Carried),
                Verdict::Disturbed => {}
                verdict => {
                    (failures, last) = (failures + 1, verdict);
                    if failures >= self.rules.failures {
                        break;
                    }
                }
            }
        }
        Ok(last)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn found(rules: Rules, mut trial: impl FnMut(f64, Length) -> Verdict) -> SearchResult {
        match highest(rules, 50.0, 100.0, |rate, length| Ok::<_, Infallible>(trial(rate, length))) {
            Ok(found) => found,
        }
    }

    fn of(limit: f64, rate: f64) -> Verdict {
        if rate <= limit { Verdict::Carried } else { Verdict::Lost }
    }

    #[test]
    fn a_rate_is_found_to_the_precision_and_never_too_high() {
        for limit in [99.9, 77.0, 50.0, 33.0, 1.0] {
            for rules in [Rules::raw(0.01), Rules::undisturbed(0.01)] {
                let found = found(rules, |rate, _| of(limit, rate));
                assert!(found.rate <= limit && found.rate >= 0.98 * limit, "{limit}: {found:?}");
            }
        }
        let nothing = found(Rules::undisturbed(0.01), |_, _| Verdict::Behind);
        assert_eq!((nothing.rate, nothing.ended_by), (0.0, Verdict::Behind));
    }

    #[test]
    fn a_search_that_begins_near_the_result_takes_few_trials_and_one_long_one() {
        for limit in [50.5, 49.5] {
            let mut long = 0;
            let found = found(Rules::raw(0.01), |rate, length| {
                long += u32::from(length == Length::Long);
                of(limit, rate)
            });
            assert!(found.trials <= 6 && long == 1 && found.rate >= 0.98 * limit, "{limit}: {found:?}, {long} long");
        }
    }

    #[test]
    fn a_rate_that_only_short_trials_carry_is_searched_with_long_ones() {
        for (short, long) in [(80.0, 78.0), (80.0, 40.0)] {
            let limit = |length| if length == Length::Short { short } else { long };
            let found = found(Rules::undisturbed(0.01), |rate, length| of(limit(length), rate));
            assert!(found.rate <= long && found.rate >= 0.98 * long, "{long}: {found:?}");
            assert_eq!(found.ended_by, Verdict::Lost);
        }
    }

    #[test]
    fn disturbances_end_a_raw_search_but_not_an_undisturbed_one() {
        // Every third trial is disturbed, and every fifth loses packets for an unknown reason.
        let machine = |known: Verdict| {
            let mut trials = 0;
            move |rate: f64, _: Length| {
                trials += 1;
                match trials {
                    at if at % 3 == 2 => known,
                    at if at % 5 == 4 => Verdict::Lost,
                    _ => of(80.0, rate),
                }
            }
        };
        let raw = found(Rules::raw(0.01), machine(Verdict::Lost));
        assert!(raw.rate < 76.0, "{raw:?}");
        let undisturbed = found(Rules::undisturbed(0.01), machine(Verdict::Disturbed));
        assert!(undisturbed.rate >= 79.0 && undisturbed.disturbed > 0, "{undisturbed:?}");
    }

    #[test]
    fn a_rate_that_was_carried_by_chance_is_not_confirmed() {
        let mut chance_passes = 1;
        let found = found(Rules::undisturbed(0.01), |rate, _| {
            if rate > 60.0 && chance_passes > 0 {
                chance_passes -= 1;
                return Verdict::Carried;
            }
            of(60.0, rate)
        });
        assert!(found.rate <= 60.0 && found.rate > 58.0, "{found:?}");
    }

    #[test]
    fn a_search_ends_even_if_every_trial_is_disturbed() {
        let found = found(Rules::undisturbed(0.001), |_, _| Verdict::Disturbed);
        assert!(found.rate == 0.0 && found.trials <= 6 * (2 * RATES_MAX + 1), "{found:?}");
    }
}
