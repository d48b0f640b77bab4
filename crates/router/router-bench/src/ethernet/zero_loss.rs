//! The highest rate at which a subject loses no frame (RFC 2544, section 26.1).
//!
//! The lost frames are those that the source sent and the sink did not receive. A rate that the source cannot send
//! counts as not carried. If the kernel forwards in the sender's call, this is the limit of the kernel; otherwise it is
//! the limit of the source.

use std::fs;

use serde::Serialize;

use super::testbed::Testbed;
use super::traffic::{Load, PacedResult, SendRate};
use super::{Error, Options, Subject};
use crate::search::{Length, Rules, SearchResult, Verdict, highest};

/// A trial with a stall of this length, in ns, does not count if frames were lost: at most of the rates here, such a
/// stall fills rings and backlogs of a thousand frames.
const STALL_NS_MAX: u64 = 500_000;

/// The share of the due frames that a source must send to have kept up; the rest is in flight when the trial ends.
pub(super) const KEPT_UP: f64 = 0.995;

/// The highest rates without a loss. *Measured.*
#[derive(Clone, Debug, Serialize)]
pub struct ZeroLoss {
    /// The subject.
    pub subject: Subject,
    /// 4 or 6.
    pub version: u8,
    /// The size of a frame in bytes, check sequence included, or `IMIX`.
    pub size: String,
    /// The raw rate in millions of frames a second: stalls of the machine count.
    pub mpps: f64,
    /// The rate in millions of frames a second when trials that the machine disturbed are repeated.
    pub mpps_undisturbed: f64,
    /// What ended the next higher rate: frames were lost, or the source could not send them.
    pub ended_by: Verdict,
    /// The number of trials of the undisturbed search.
    pub trials: u32,
    /// The number of those trials that the machine disturbed.
    pub trials_disturbed: u32,
    /// The length of the trial that confirmed the result of shorter ones, in ms.
    pub trial_ms: u64,
}

/// The start of the first search, as a share of the frames that arrive when the source sends at full speed.
pub const FIRST_SHARE: f64 = 0.95;

/// Searches for the highest rates without a loss with this load, whose sizes the report calls `size`. The search starts
/// at `first_share` of the rate that arrives when the source sends at full speed: [`FIRST_SHARE`], or the share that a
/// previous search found. Returns the rates and the share that this search found.
pub fn search(
    testbed: &mut Testbed,
    load: Load,
    size: String,
    options: &Options,
    first_share: f64,
) -> Result<(ZeroLoss, f64), Error> {
    let (precision, subject) = (options.precision, testbed.subject());
    let flood = testbed.peak(load, options.trial_short)?;
    // At least one frame a trial.
    let arrived = (flood.arrived_mpps * 1e6).max(1.0 / options.trial_short.as_secs_f64());
    let ceiling = (flood.offered_mpps * 1e6).max(arrived) * 1.1;
    let mut search = |rules: Rules, first: f64, ceiling: f64, counts_stalls: bool| -> Result<SearchResult, Error> {
        highest(rules, first, ceiling, |frames_per_s, length| {
            let trial = if length == Length::Short { options.trial_short } else { options.trial };
            try_rate(testbed, load, SendRate { frames_per_s, trial, counts_stalls })
        })
    };
    let first = (arrived * first_share).min(ceiling);
    let undisturbed = search(Rules::undisturbed(precision), first, ceiling, false)?;
    let share = if undisturbed.rate > 0.0 { undisturbed.rate / arrived } else { first_share };
    let first = if undisturbed.rate > 0.0 { undisturbed.rate } else { first };
    let raw = search(Rules::raw(precision), first, first * (1.0 + 2.0 * precision), true)?;
    let found = ZeroLoss {
        subject,
        version: load.version.number(),
        size,
        mpps: raw.rate / 1e6,
        mpps_undisturbed: undisturbed.rate.max(raw.rate) / 1e6,
        ended_by: undisturbed.ended_by,
        trials: undisturbed.trials,
        trials_disturbed: undisturbed.disturbed,
        trial_ms: options.trial.as_millis() as u64,
    };
    Ok((found, share))
}

fn try_rate(testbed: &mut Testbed, load: Load, pace: SendRate) -> Result<Verdict, Error> {
    let stolen_before = stolen();
    let paced = testbed.pace(load, pace)?;
    let is_disturbed = paced.stall_ns_max >= STALL_NS_MAX || stolen() > stolen_before;
    Ok(verdict(&paced, is_disturbed && !pace.counts_stalls))
}

fn verdict(paced: &PacedResult, is_disturbed: bool) -> Verdict {
    let has_kept_up = paced.sent as f64 >= KEPT_UP * paced.due as f64;
    match (paced.arrived >= paced.sent, has_kept_up) {
        (true, true) => Verdict::Carried,
        _ if is_disturbed => Verdict::Disturbed,
        (true, false) => Verdict::Behind,
        (false, _) => Verdict::Lost,
    }
}

/// Returns the time, in ticks, in which the hypervisor ran other guests while a processor of this machine was runnable
/// (steal time).
fn stolen() -> Option<u64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().next()?.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_judged_by_due_sent_and_received_frames_and_by_stalls() {
        let of = |due, sent, arrived, is_disturbed| {
            verdict(&PacedResult { due, sent, arrived, stall_ns_max: 0 }, is_disturbed)
        };
        assert_eq!(of(1000, 999, 999, true), Verdict::Carried, "nothing was lost despite the stall");
        assert_eq!(of(1000, 999, 998, false), Verdict::Lost);
        assert_eq!(of(1000, 999, 998, true), Verdict::Disturbed);
        assert_eq!(of(1000, 990, 990, false), Verdict::Behind);
        assert_eq!(of(1000, 990, 990, true), Verdict::Disturbed);
        assert_eq!(of(1000, 990, 989, false), Verdict::Lost, "frames were lost, and the source was late");
    }
}
