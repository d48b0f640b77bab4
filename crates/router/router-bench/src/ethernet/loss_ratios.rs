//! The rates of a subject by accepted loss: NDR and PDR, by MLRsearch (RFC 9971).

use std::time::Duration;

use serde::Serialize;

use super::testbed::Testbed;
use super::traffic::{Load, PacedResult, SendRate};
use super::zero_loss::KEPT_UP;
use super::{Error, Options, Subject};
use crate::mlrsearch::{self, Goal, GoalResult, Measurer, Range, Trial};

/// The loss ratio of the partial drop rate.
const PDR_LOSS_RATIO: f64 = 0.005;
/// RFC 9971 recommends one half.
const EXCEED_RATIO: f64 = 0.5;
/// The duration sum of a load, in trials of the final duration.
const TRIALS_PER_LOAD: f64 = 4.0;
/// The lowest load that is tried, as a share of the rate that arrives when the source sends at full speed.
const SHARE_MIN: f64 = 0.01;
/// The highest load that is tried, as a multiple of what the source sends at full speed: more than it can send, even if
/// the machine has slowed that down.
const SHARE_MAX: f64 = 1.5;

/// The rates by accepted loss, searched with the same trials. *Measured.*
#[derive(Clone, Debug, Serialize)]
pub struct LossRatios {
    /// The subject.
    pub subject: Subject,
    /// 4 or 6.
    pub version: u8,
    /// The size of a frame in bytes, check sequence included, or `IMIX`.
    pub size: String,
    /// The frames that arrived, in millions a second, when the source sent at full speed.
    pub peak_mpps: f64,
    /// The rate without a loss in the median trial (non-drop rate).
    pub ndr: GoalResult,
    /// The rate with a loss of at most 0.5 % in the median trial (partial drop rate).
    pub pdr: GoalResult,
    /// The number of trials.
    pub trials: u32,
    /// The length of the trials on which the rates rest, in ms.
    pub trial_ms: u64,
}

/// Returns the goals of the partial drop rate and of the non-drop rate.
fn goals(options: &Options) -> [Goal; 2] {
    let final_trial_s = options.trial.as_secs_f64();
    let goal = |loss_ratio: f64| Goal {
        loss_ratio,
        exceed_ratio: EXCEED_RATIO,
        width: options.precision.max(loss_ratio),
        initial_trial_s: options.trial_short.as_secs_f64(),
        final_trial_s,
        duration_sum_s: TRIALS_PER_LOAD * final_trial_s,
    };
    [goal(PDR_LOSS_RATIO), goal(0.0)]
}

/// Searches for both rates with this load, whose sizes the report calls `size`.
pub fn search(testbed: &mut Testbed, load: Load, size: String, options: &Options) -> Result<LossRatios, Error> {
    let subject = testbed.subject();
    let flood = testbed.peak(load, options.trial_short)?;
    // At least one frame a trial.
    let arrived = (flood.arrived_mpps * 1e6).max(1.0 / options.trial_short.as_secs_f64());
    let max = (flood.offered_mpps * 1e6).max(arrived) * SHARE_MAX;
    let range = Range { min: arrived * SHARE_MIN, max, first: arrived };
    let found = mlrsearch::search(&mut PacedTrials { testbed, load }, &goals(options), range)?;
    let [pdr, ndr] = found.goals[..] else { unreachable!("a result for each goal") };
    Ok(LossRatios {
        subject,
        version: load.version.number(),
        size,
        peak_mpps: flood.arrived_mpps,
        ndr,
        pdr,
        trials: found.trials,
        trial_ms: options.trial.as_millis() as u64,
    })
}

/// Trials in which the source sends at a rate.
struct PacedTrials<'a> {
    testbed: &'a mut Testbed,
    load: Load<'a>,
}

impl Measurer for PacedTrials<'_> {
    type Error = Error;

    fn trial(&mut self, load: f64, duration_s: f64) -> Result<Trial, Error> {
        let trial = Duration::from_secs_f64(duration_s);
        let paced = self.testbed.pace(self.load, SendRate { frames_per_s: load, trial, counts_stalls: true })?;
        Ok(result(duration_s, &paced))
    }
}

/// Counts frames that a source did not send as lost if it could not keep up (RFC 9971, Measurer).
fn result(duration_s: f64, paced: &PacedResult) -> Trial {
    let has_kept_up = paced.sent as f64 >= KEPT_UP * paced.due as f64;
    let expected = if has_kept_up { paced.sent } else { paced.due };
    Trial::new(duration_s, expected, expected.saturating_sub(paced.arrived))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_were_due_and_not_sent_are_lost_unless_the_source_has_kept_up() {
        let of = |due, sent, arrived| result(1.0, &PacedResult { due, sent, arrived, stall_ns_max: 0 }).loss_ratio;
        assert_eq!([of(1000, 1000, 1000), of(1000, 996, 996), of(1000, 1000, 990)], [0.0, 0.0, 0.01]);
        assert_eq!([of(1000, 500, 500), of(1000, 500, 250), of(1000, 0, 0)], [0.5, 0.75, 1.0]);
    }
}
