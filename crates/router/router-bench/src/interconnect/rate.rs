//! What rate an interconnect carries.

use router_node::interconnect::TransportKind;
use serde::Serialize;
use stats::Ratio;

use super::beside::{Better, ByRound, Rounds, beside_best};
use super::nodes::{Cores, Offered, TrialSetup, run};
use super::{BATCHES, Batching, BenchError, Effort, name};
use crate::search::{Rules, Verdict, highest};
use crate::statistics::median;

/// A rate without loss is held by one trial of so many: a processor that is taken away for a moment loses packets, and
/// says nothing of the interconnect.
const TRIES: u32 = 3;
/// No search goes beyond the flood's rate by more.
const ABOVE_FLOOD: f64 = 1.25;
/// Where a policy's first search begins, as a share of the flood's rate.
const FIRST_SHARE: f64 = 0.94;
/// A fixed batch whose rate is a smaller share of the highest one's, after the rounds of all, is not the best one.
const CONTENDERS_SHARE_MIN: f64 = 0.8;

/// What one policy carries. *Measured*, medians over rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RateRow {
    /// Over which interconnect.
    pub interconnect: &'static str,
    /// Bytes of a frame.
    pub frame_bytes: usize,
    /// How packets are put together.
    pub batching: Batching,
    /// The highest load, in bursts at random moments, of which nothing was lost (RFC 2544, with shorter trials).
    pub zero_loss_mpps: f64,
    /// What arrives when the sender makes as many as it can.
    pub flood_mpps: f64,
    /// Packets a message in the flood.
    pub packets_per_message: f64,
    /// The rate without a loss of each round; 0 where the search ended at nothing.
    pub rounds_zero_loss_mpps: Vec<f64>,
}

/// The rate without a loss of the adaptive policy, beside the best fixed batch's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdaptiveRate {
    /// Over which interconnect.
    pub interconnect: &'static str,
    /// Bytes of a frame.
    pub size_bytes: usize,
    /// Of the adaptive policy, in million packets a second.
    pub zero_loss_mpps: f64,
    /// The fixed batch with the highest rate.
    pub best_fixed_batch: u8,
    /// Its rate: in each half of the rounds, that of the batch which is the best in the other half.
    pub best_fixed_zero_loss_mpps: f64,
    /// The adaptive rate as a multiple of that in the same round.
    pub ratio: Ratio,
}

/// The adaptive policy beside the best fixed batch, one for each size and interconnect of what [`rates`] found.
pub fn adaptive_rates(rows: &[RateRow]) -> Vec<AdaptiveRate> {
    rows.iter().filter(|row| row.batching == Batching::Adaptive).filter_map(|row| beside_fixed(rows, row)).collect()
}

fn beside_fixed(rows: &[RateRow], adaptive: &RateRow) -> Option<AdaptiveRate> {
    let of = |row: &RateRow| (row.frame_bytes, row.interconnect);
    let seen = |row: &RateRow| -> ByRound {
        row.rounds_zero_loss_mpps.iter().map(|mpps| Some(*mpps).filter(|mpps| *mpps > 0.0)).collect()
    };
    let fixed = rows.iter().filter(|other| of(other) == of(adaptive)).filter_map(|other| match other.batching {
        Batching::Fixed(batch) => Some((batch, seen(other))),
        Batching::Adaptive => None,
    });
    let (batches, rounds): (Vec<u8>, Vec<ByRound>) = fixed.unzip();
    let beside = beside_best(&seen(adaptive), &rounds.iter().collect::<Vec<_>>(), Better::More)?;
    Some(AdaptiveRate {
        interconnect: adaptive.interconnect,
        size_bytes: adaptive.frame_bytes,
        zero_loss_mpps: adaptive.zero_loss_mpps,
        best_fixed_batch: batches[beside.best],
        best_fixed_zero_loss_mpps: beside.best_value,
        ratio: beside.ratio,
    })
}

/// The rates of all policies with frames of one size, in alternating rounds; `step` hears of each, and once of those
/// that follow. A policy searches first where its round before ended.
///
/// # Errors
/// When the nodes could not be made.
pub fn rates(
    kind: TransportKind,
    frame_bytes: usize,
    rounds: Rounds,
    effort: &Effort,
    cores: Cores,
    step: &mut dyn FnMut(&str),
) -> Result<Vec<RateRow>, BenchError> {
    let mut found: Vec<(Batching, Found)> = Batching::all().map(|batching| (batching, Found::default())).collect();
    let mut taking_part: Vec<usize> = (0..found.len()).collect();
    for round in 0..rounds.most {
        if round < rounds.all {
            step(&format!("rates without a loss, {frame_bytes} B, round {} of {}", round + 1, rounds.all));
        } else {
            let rows = rows_of(kind, frame_bytes, &found);
            if round == rounds.all {
                step(&format!("rates without a loss, {frame_bytes} B, of those that may be the best"));
                taking_part = contenders(&rows);
            }
            if adaptive_rates(&rows).iter().all(|row| row.ratio.is_known()) {
                break;
            }
        }
        // Nobody is always the first.
        taking_part.rotate_left(1);
        for at in &taking_part {
            let (batching, found) = &mut found[*at];
            let search = Search { kind, batching: *batching, frame_bytes, effort, cores, seed: round as u64 };
            found.search(&search)?;
        }
    }
    Ok(rows_of(kind, frame_bytes, &found))
}

fn rows_of(kind: TransportKind, frame_bytes: usize, found: &[(Batching, Found)]) -> Vec<RateRow> {
    let of = |rounds: &[f64]| median(rounds.iter().copied()).unwrap_or(0.0);
    let row = |(batching, found): &(Batching, Found)| RateRow {
        interconnect: name(kind),
        frame_bytes,
        batching: *batching,
        zero_loss_mpps: of(&found.zero_loss_mpps),
        flood_mpps: of(&found.flood_mpps),
        packets_per_message: of(&found.packets_per_message),
        rounds_zero_loss_mpps: found.zero_loss_mpps.clone(),
    };
    found.iter().map(row).collect()
}

/// Of the rows of one size, those of the adaptive policy and of the fixed batches that may be the best.
fn contenders(rows: &[RateRow]) -> Vec<usize> {
    let fixed = rows.iter().filter(|row| row.batching != Batching::Adaptive);
    let highest_mpps = fixed.map(|row| row.zero_loss_mpps).fold(0.0, f64::max);
    let is_one =
        |row: &RateRow| row.batching == Batching::Adaptive || row.zero_loss_mpps >= CONTENDERS_SHARE_MIN * highest_mpps;
    (0..rows.len()).filter(|at| is_one(&rows[*at])).collect()
}

/// Of one policy, by rounds.
#[derive(Clone, Default)]
struct Found {
    zero_loss_mpps: Vec<f64>,
    flood_mpps: Vec<f64>,
    packets_per_message: Vec<f64>,
}

impl Found {
    fn search(&mut self, search: &Search) -> Result<(), BenchError> {
        let (flood_mpps, packets_per_message) = search.flood()?;
        let before_mpps = self.zero_loss_mpps.iter().rev().copied().find(|mpps| *mpps > 0.0);
        self.zero_loss_mpps.push(search.zero_loss(flood_mpps, before_mpps)?);
        self.flood_mpps.push(flood_mpps);
        self.packets_per_message.push(packets_per_message);
        Ok(())
    }
}

struct Search<'a> {
    kind: TransportKind,
    batching: Batching,
    frame_bytes: usize,
    effort: &'a Effort,
    cores: Cores,
    seed: u64,
}

impl Search<'_> {
    fn setup(&self, offered: Offered) -> TrialSetup {
        TrialSetup {
            kind: self.kind,
            batching: self.batching,
            frame_bytes: self.frame_bytes,
            offered,
            trial: self.effort.trial,
            warm_up: self.effort.warm_up,
            seed: self.seed,
        }
    }

    fn flood(&self) -> Result<(f64, f64), BenchError> {
        let trial = run(&self.setup(Offered::Flood), self.cores)?;
        Ok((trial.delivered_mpps, trial.packets_per_message))
    }

    fn verdict(&self, mpps: f64) -> Result<Verdict, BenchError> {
        let trial = run(&self.setup(Offered::Mpps(mpps)), self.cores)?;
        // What comes late all the same is a queue that grows: carried is what leaves as fast as it comes.
        let is_carried = trial.lost_packets == 0 && trial.delivered_mpps >= 0.98 * mpps;
        Ok(if is_carried { Verdict::Carried } else { Verdict::Lost })
    }

    /// Searches, first at what was found before, if something was.
    fn zero_loss(&self, flood_mpps: f64, before_mpps: Option<f64>) -> Result<f64, BenchError> {
        let ceiling = ABOVE_FLOOD * flood_mpps;
        if ceiling <= 0.0 {
            return Ok(0.0);
        }
        let first = before_mpps.unwrap_or(FIRST_SHARE * flood_mpps).min(ceiling);
        let precision = self.effort.search_precision;
        let rules = Rules { precision, trials_max: TRIES, failures: TRIES, is_held: false };
        Ok(highest(rules, first, ceiling, |mpps, _| self.verdict(mpps))?.rate)
    }
}

/// What putting packets together gains over one packet a message. *Measured*; ratios within each round, their median.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchGain {
    /// Over which interconnect.
    pub interconnect: &'static str,
    /// Bytes of a frame.
    pub frame_bytes: usize,
    /// What arrives in a flood with one packet a message.
    pub single_mpps: f64,
    /// The best fixed batch.
    pub best_batch: u8,
    /// What arrives with that.
    pub best_mpps: f64,
    /// How many times as many.
    pub gain: f64,
    /// How many times as many with adaptive batches.
    pub gain_adaptive: f64,
}

/// The gain of each batch over single packets, in floods, in alternating rounds.
///
/// # Errors
/// When the nodes could not be made.
pub fn batch_gain(
    kind: TransportKind,
    frame_bytes: usize,
    effort: &Effort,
    cores: Cores,
) -> Result<BatchGain, BenchError> {
    let policies: Vec<Batching> = Batching::all().collect();
    let mut rounds: Vec<Vec<f64>> = Vec::new();
    for round in 0..effort.rounds {
        let flood = |batching: &Batching| {
            let search = Search { kind, batching: *batching, frame_bytes, effort, cores, seed: round as u64 };
            Ok(search.flood()?.0)
        };
        rounds.push(policies.iter().map(flood).collect::<Result<_, BenchError>>()?);
    }
    let rate = |at: usize| median(rounds.iter().map(|round| round[at])).unwrap_or(0.0);
    let gain = |at: usize| median(rounds.iter().map(|round| round[at] / round[0])).unwrap_or(0.0);
    let best = (0..BATCHES.len()).max_by(|one, other| gain(*one).total_cmp(&gain(*other))).unwrap_or(0);
    Ok(BatchGain {
        interconnect: name(kind),
        frame_bytes,
        single_mpps: rate(0),
        best_batch: BATCHES[best],
        best_mpps: rate(best),
        gain: gain(best),
        gain_adaptive: gain(BATCHES.len()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(batching: Batching, frame_bytes: usize, rounds: &[f64]) -> RateRow {
        RateRow {
            interconnect: "lanes",
            frame_bytes,
            batching,
            zero_loss_mpps: median(rounds.iter().copied()).unwrap_or(0.0),
            flood_mpps: 9.0,
            packets_per_message: 1.0,
            rounds_zero_loss_mpps: rounds.to_vec(),
        }
    }

    #[test]
    fn rates_are_compared_with_the_best_batch_of_their_size_round_by_round() {
        let rows = [
            row(Batching::Fixed(1), 64, &[1.0, 2.0, 1.0, 1.0]),
            row(Batching::Fixed(8), 64, &[10.0, 20.0, 0.0, 7.0]),
            row(Batching::Adaptive, 64, &[9.0, 18.0, 4.0, 7.0]),
            row(Batching::Fixed(8), 1500, &[0.0, 0.0]),
            row(Batching::Adaptive, 1500, &[1.0, 1.0]),
        ];
        let found = adaptive_rates(&rows);
        let [
            AdaptiveRate {
                size_bytes: 64, best_fixed_batch: 8, zero_loss_mpps, best_fixed_zero_loss_mpps, ratio, ..
            },
        ] = found[..]
        else {
            panic!("{found:?}")
        };
        assert_eq!((zero_loss_mpps, best_fixed_zero_loss_mpps, ratio.median), (8.0, 10.0, 0.9));
    }

    #[test]
    fn who_may_be_the_best_goes_on() {
        let rows = [
            row(Batching::Fixed(1), 64, &[1.0]),
            row(Batching::Fixed(8), 64, &[7.9]),
            row(Batching::Fixed(16), 64, &[8.1]),
            row(Batching::Fixed(32), 64, &[10.0]),
            row(Batching::Adaptive, 64, &[3.0]),
        ];
        assert_eq!(contenders(&rows), [2, 3, 4]);
    }
}
