//! The highest rate at which a subject loses nothing (RFC 2544, section 26.1).
//!
//! What a subject loses is what the source sent and the sink did not receive. A rate that the source cannot send is not
//! carried either: where the kernel forwards in the sender's call, that is the kernel's limit; elsewhere, the source's.

use std::fs;

use serde::Serialize;

use super::bed::Bed;
use super::traffic::{Load, Pace, Paced};
use super::{Error, Options, Subject};
use crate::search::{Found, Length, Rules, Verdict, highest};

/// A trial in which a processor was taken away for as long, in ns, says nothing of what was lost: rings and backlogs of
/// a thousand frames are full after that at most of the rates here.
const STALL_NS_MAX: u64 = 500_000;

/// A source that has sent this part of what was due kept up: what is missing is under way when the trial ends.
const KEPT_UP: f64 = 0.995;

/// Rates at which nothing was lost. *Measured.*
#[derive(Clone, Debug, Serialize)]
pub struct ZeroLoss {
    /// Who.
    pub subject: Subject,
    /// 4 or 6.
    pub version: u8,
    /// Bytes of a frame, check sequence included, or `IMIX`.
    pub size: String,
    /// Millions of frames a second, raw: whatever the machine did meanwhile counts.
    pub mpps: f64,
    /// Millions of frames a second; trials that the machine disturbed were repeated.
    pub mpps_undisturbed: f64,
    /// What ended the next higher rate that was tried: frames were lost, or the source could not send them.
    pub ended_by: Verdict,
    /// Trials of the undisturbed search, and how many the machine disturbed.
    pub trials: u32,
    /// Of those, how many the machine disturbed.
    pub trials_disturbed: u32,
    /// How long the trial was that held what shorter ones had found, in ms.
    pub trial_ms: u64,
}

/// What a search begins with where there was none before it, as a share of what arrives of as much as can be sent.
pub const FIRST_SHARE: f64 = 0.95;

/// Searches with this load, whose sizes the report calls `size`, first at this share of what arrives of as much as can
/// be sent: the share that a search before it found, if there was one. Says the share that it found too.
pub fn search(
    bed: &mut Bed,
    load: Load,
    size: String,
    options: &Options,
    first_share: f64,
) -> Result<(ZeroLoss, f64), Error> {
    let (precision, subject) = (options.precision, bed.subject());
    let flood = bed.overload(load, options.trial_short)?;
    // At least something: one frame a trial.
    let arrived = (flood.arrived_mpps * 1e6).max(1.0 / options.trial_short.as_secs_f64());
    let ceiling = (flood.offered_mpps * 1e6).max(arrived) * 1.1;
    let mut search = |rules: Rules, first: f64, ceiling: f64, counts_stalls: bool| -> Result<Found, Error> {
        highest(rules, first, ceiling, |frames_per_s, length| {
            let trial = if length == Length::Short { options.trial_short } else { options.trial };
            try_rate(bed, load, Pace { frames_per_s, trial, counts_stalls })
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

fn try_rate(bed: &mut Bed, load: Load, pace: Pace) -> Result<Verdict, Error> {
    let stolen_before = stolen();
    let paced = bed.pace(load, pace)?;
    let is_disturbed = paced.stall_ns_max >= STALL_NS_MAX || stolen() > stolen_before;
    Ok(verdict(&paced, is_disturbed && !pace.counts_stalls))
}

fn verdict(paced: &Paced, is_disturbed: bool) -> Verdict {
    let has_kept_up = paced.sent as f64 >= KEPT_UP * paced.due as f64;
    match (paced.arrived >= paced.sent, has_kept_up) {
        (true, true) => Verdict::Carried,
        _ if is_disturbed => Verdict::Disturbed,
        (true, false) => Verdict::Behind,
        (false, _) => Verdict::Lost,
    }
}

/// The time that the hypervisor gave to others while a processor of this machine wanted it, in ticks.
fn stolen() -> Option<u64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().next()?.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_judged_by_what_was_due_sent_and_received_and_by_what_the_machine_did() {
        let of =
            |due, sent, arrived, is_disturbed| verdict(&Paced { due, sent, arrived, stall_ns_max: 0 }, is_disturbed);
        assert_eq!(of(1000, 999, 999, true), Verdict::Carried, "nothing was lost, whatever the machine did");
        assert_eq!(of(1000, 999, 998, false), Verdict::Lost);
        assert_eq!(of(1000, 999, 998, true), Verdict::Disturbed);
        assert_eq!(of(1000, 990, 990, false), Verdict::Behind);
        assert_eq!(of(1000, 990, 990, true), Verdict::Disturbed);
        assert_eq!(of(1000, 990, 989, false), Verdict::Lost, "frames were lost, and it was late too");
    }
}
