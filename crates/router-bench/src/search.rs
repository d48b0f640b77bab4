//! The highest rate that is carried (RFC 2544, section 26.1), by halving, on a machine that does other things too.
//!
//! A benchmark's machine takes processors away now and then, and a trial that it disturbed says nothing of what is
//! measured. So each rate is searched twice. *Raw*: a trial is a trial, and one lost frame ends a rate. *Undisturbed*:
//! a trial of which it is known that the machine disturbed it is repeated, a loss must be seen twice, and what is found
//! is held once more at the end.

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

/// How much a search believes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// The search ends when it knows the rate to this part.
    pub precision: f64,
    /// Trials of a rate, at most: disturbed ones are repeated.
    pub trials_max: u32,
    /// Trials that fail before the rate counts as not carried.
    pub failures: u32,
    /// Trials that hold what was found once more.
    pub confirmations: u32,
}

impl Rules {
    /// A trial is a trial.
    pub fn raw(precision: f64) -> Rules {
        Rules { precision, trials_max: 1, failures: 1, confirmations: 0 }
    }

    /// What the machine did is left out, as far as it is known.
    pub fn undisturbed(precision: f64) -> Rules {
        Rules { precision, trials_max: 6, failures: 2, confirmations: 1 }
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

/// Rates that are tried, at most: halving alone takes seven to know one to a hundredth.
const RATES_MAX: u32 = 16;

/// Searches below `ceiling`, a rate that nobody can offer or that is not carried, and begins with `first`. Where what
/// is found fails its confirmation, the search goes on from what was found before it.
///
/// # Errors
/// Those of `trial`.
pub fn highest<E>(
    rules: Rules,
    first: f64,
    ceiling: f64,
    trial: impl FnMut(f64) -> Result<Verdict, E>,
) -> Result<Found, E> {
    assert!(first > 0.0 && first <= ceiling, "a search from {first} to {ceiling}");
    let mut search = Search { rules, trial, trials: 0, disturbed: 0 };
    // Rates that were carried once, each above the one before; none of them is known not to be carried.
    let mut carried = Vec::new();
    let (mut failing, mut ended_by, mut next) = (ceiling, Verdict::Behind, first);
    for _ in 0..RATES_MAX {
        match search.judge(next)? {
            Verdict::Carried => carried.push(next),
            verdict => (failing, ended_by) = (next, verdict),
        }
        let mut best = carried.last().copied().unwrap_or(0.0);
        if failing - best <= rules.precision * failing {
            if search.is_confirmed(best)? {
                break;
            }
            carried.pop();
            (failing, ended_by) = (best, Verdict::Lost);
            best = carried.last().copied().unwrap_or(0.0);
        }
        next = f64::midpoint(best, failing);
    }
    let Search { trials, disturbed, .. } = search;
    Ok(Found { rate: carried.last().copied().unwrap_or(0.0), ended_by, trials, disturbed })
}

struct Search<T> {
    rules: Rules,
    trial: T,
    trials: u32,
    disturbed: u32,
}

impl<E, T: FnMut(f64) -> Result<Verdict, E>> Search<T> {
    /// One trial, counted.
    fn try_once(&mut self, rate: f64) -> Result<Verdict, E> {
        let verdict = (self.trial)(rate)?;
        self.trials += 1;
        self.disturbed += u32::from(verdict == Verdict::Disturbed);
        Ok(verdict)
    }

    /// Trials until one carries the rate, or enough have failed.
    fn judge(&mut self, rate: f64) -> Result<Verdict, E> {
        let (mut failures, mut last) = (0, Verdict::Disturbed);
        for _ in 0..self.rules.trials_max {
            match self.try_once(rate)? {
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

    fn is_confirmed(&mut self, rate: f64) -> Result<bool, E> {
        if rate == 0.0 {
            return Ok(true);
        }
        for _ in 0..self.rules.confirmations {
            if self.judge(rate)? != Verdict::Carried {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn found(rules: Rules, trial: impl FnMut(f64) -> Verdict) -> Found {
        let mut trial = trial;
        match highest(rules, 50.0, 100.0, |rate| Ok::<_, Infallible>(trial(rate))) {
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
                let found = found(rules, |rate| of(limit, rate));
                assert!(found.rate <= limit && found.rate >= 0.98 * limit, "{limit}: {found:?}");
            }
        }
        let nothing = found(Rules::undisturbed(0.01), |_| Verdict::Behind);
        assert_eq!((nothing.rate, nothing.ended_by), (0.0, Verdict::Behind));
    }

    #[test]
    fn the_machine_ends_a_raw_search_and_not_an_undisturbed_one() {
        // Every third trial is disturbed, and every fifth loses something for no reason that is known.
        let machine = |known: Verdict| {
            let mut trials = 0;
            move |rate: f64| {
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
    fn what_was_carried_by_luck_is_not_confirmed() {
        let mut lucky = 1;
        let found = found(Rules::undisturbed(0.01), |rate| {
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
        let found = found(Rules::undisturbed(0.001), |_| Verdict::Disturbed);
        assert!(found.rate == 0.0 && found.trials <= 6 * 2 * RATES_MAX, "{found:?}");
    }
}
