//! The highest rate that is carried (RFC 2544, section 26.1), by halving, on a machine that does other things too.
//!
//! A benchmark's machine takes processors away now and then, and a trial that it disturbed says nothing of what is
//! measured. So each rate is searched twice. *Raw*: a trial is a trial, and one lost frame ends a rate. *Undisturbed*:
//! a trial of which it is known that the machine disturbed it is repeated, and a loss must be seen twice.
//!
//! Long trials say more, and take as long as they say. So short ones search, in steps from a rate that is near what was
//! found before, and a long one holds what they found. Where it does not, long ones search on from there.

use serde::Serialize;

/// What a trial says of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Everything that was offered arrived.
    Carried,
    /// Something was lost, and nothing else can be to blame.
    Lost,
    /// Whoever offers could not keep up.
    Behind,
    /// Something was lost after the machine had done something else: it says nothing.
    Disturbed,
}

/// How long a trial is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// To find out where to look.
    Short,
    /// To be believed.
    Long,
}

/// How much a search believes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// The search ends when it knows the rate to this part.
    pub precision: f64,
    /// Trials of a rate, at most: disturbed ones are repeated.
    pub trials_max: u32,
    /// Trials that fail before the rate counts as not carried.
    pub failures: u32,
    /// Whether a long trial holds what short ones found. Without it, trials are short.
    pub is_held: bool,
}

impl Rules {
    /// A trial is a trial.
    pub fn raw(precision: f64) -> Rules {
        Rules { precision, trials_max: 1, failures: 1, is_held: true }
    }

    /// What the machine did is left out, as far as it is known.
    pub fn undisturbed(precision: f64) -> Rules {
        Rules { precision, trials_max: 6, failures: 2, is_held: true }
    }
}

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// The highest rate that was carried; 0 if none was.
    pub rate: f64,
    /// What ended the next higher one that was tried.
    pub ended_by: Verdict,
    /// Trials that were made.
    pub trials: u32,
    /// Of them, how many the machine disturbed.
    pub disturbed: u32,
}

/// Rates that are tried with trials of one length, at most: halving alone takes seven to know one to a hundredth.
const RATES_MAX: u32 = 20;

/// The first step away from where a search begins, in precisions; each step is twice the one before.
const STEP_PRECISIONS: f64 = 4.0;

/// Searches below `ceiling`, a rate that nobody can offer or that is not carried, and begins with `first`: the nearer
/// that is, the sooner the search ends.
///
/// # Errors
/// Those of `trial`.
pub fn highest<E>(
    rules: Rules,
    first: f64,
    ceiling: f64,
    trial: impl FnMut(f64, Length) -> Result<Verdict, E>,
) -> Result<Found, E> {
    assert!(first > 0.0 && first <= ceiling, "a search from {first} to {ceiling}");
    let mut search = Search { rules, trial, trials: 0, disturbed: 0 };
    let mut limits = Limits { carried: 0.0, failing: ceiling, ended_by: Verdict::Behind };
    search.narrow(&mut limits, first, Length::Short)?;
    if rules.is_held && limits.carried > 0.0 {
        let found = limits.carried;
        let verdict = search.judge(found, Length::Long)?;
        if verdict != Verdict::Carried {
            limits = Limits { carried: 0.0, failing: found, ended_by: verdict };
            let below = found * (1.0 - STEP_PRECISIONS * rules.precision).max(0.5);
            search.narrow(&mut limits, below, Length::Long)?;
        }
    }
    let Search { trials, disturbed, .. } = search;
    Ok(Found { rate: limits.carried, ended_by: limits.ended_by, trials, disturbed })
}

/// Between which rates the highest one lies.
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
    /// Brings the limits together: by growing steps from `next` on while there is no limit near, then by halving.
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

    /// One trial, counted.
    fn try_once(&mut self, rate: f64, length: Length) -> Result<Verdict, E> {
        let verdict = (self.trial)(rate, length)?;
        self.trials += 1;
        self.disturbed += u32::from(verdict == Verdict::Disturbed);
        Ok(verdict)
    }

    /// Trials until one carries the rate, or enough have failed.
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

    fn found(rules: Rules, mut trial: impl FnMut(f64, Length) -> Verdict) -> Found {
        match highest(rules, 50.0, 100.0, |rate, length| Ok::<_, Infallible>(trial(rate, length))) {
            Ok(found) => found,
        }
    }

    fn of(limit: f64, rate: f64) -> Verdict {
        if rate <= limit { Verdict::Carried } else { Verdict::Lost }
    }

    #[test]
    fn a_rate_is_found_to_its_precision_and_never_too_high() {
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
    fn a_search_that_begins_near_takes_few_trials_and_one_long_one() {
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
    fn what_short_trials_carry_and_long_ones_lose_is_searched_with_long_ones() {
        for (short, long) in [(80.0, 78.0), (80.0, 40.0)] {
            let limit = |length| if length == Length::Short { short } else { long };
            let found = found(Rules::undisturbed(0.01), |rate, length| of(limit(length), rate));
            assert!(found.rate <= long && found.rate >= 0.98 * long, "{long}: {found:?}");
            assert_eq!(found.ended_by, Verdict::Lost);
        }
    }

    #[test]
    fn the_machine_ends_a_raw_search_and_not_an_undisturbed_one() {
        // Every third trial is disturbed, and every fifth loses something for no reason that is known.
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
    fn what_was_carried_by_luck_is_not_held() {
        let mut lucky = 1;
        let found = found(Rules::undisturbed(0.01), |rate, _| {
            if rate > 60.0 && lucky > 0 {
                lucky -= 1;
                return Verdict::Carried;
            }
            of(60.0, rate)
        });
        assert!(found.rate <= 60.0 && found.rate > 58.0, "{found:?}");
    }

    #[test]
    fn a_search_ends_however_the_machine_behaves() {
        let found = found(Rules::undisturbed(0.001), |_, _| Verdict::Disturbed);
        assert!(found.rate == 0.0 && found.trials <= 6 * (2 * RATES_MAX + 1), "{found:?}");
    }
}
