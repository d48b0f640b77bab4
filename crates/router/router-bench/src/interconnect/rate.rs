//! The rate that an interconnect carries.

use router_node::interconnect::TransportKind;
use serde::Serialize;
use stats::Ratio;

use super::comparison::{Better, ByRound, Rounds, compare_with_best};
use super::nodes::{Cores, Offered, TrialSetup, run};
use super::{BATCHES, Batching, BenchError, Effort, name};
use crate::search::{Rules, Verdict, highest};
use crate::statistics::median;

/// The trials of a rate, one of which must carry it: a stall of the processor loses packets without a fault of the
/// interconnect.
const TRIES: u32 = 3;
/// The upper bound of a search, as a multiple of the rate of a flood.
const ABOVE_FLOOD: f64 = 1.25;
/// The start of a policy's first search, as a share of the rate of a flood.
const FIRST_SHARE: f64 = 0.94;
/// After the rounds with all policies, a fixed batch whose rate is below this share of the highest one is not a
/// candidate for the best one.
const CANDIDATES_SHARE_MIN: f64 = 0.8;

/// The rate of one policy. *Measured*, medians over rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RateRow {
    /// The name of the interconnect.
    pub interconnect: &'static str,
    /// The frame size in bytes.
    pub frame_bytes: usize,
    /// The batching policy.
    pub batching: Batching,
    /// The highest load, in bursts at random times, without a loss (RFC 2544, with shorter trials).
    pub zero_loss_mpps: f64,
    /// The rate that arrives when the sender makes as many packets as it can.
    pub flood_mpps: f64,
    /// The mean number of packets in a message of the flood.
    pub packets_per_message: f64,
    /// The rate without a loss in each round; 0 if the search found none.
    pub rounds_zero_loss_mpps: Vec<f64>,
}

/// The rate without a loss of the adaptive policy, compared with that of the best fixed batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdaptiveRate {
    /// The name of the interconnect.
    pub interconnect: &'static str,
    /// The frame size in bytes.
    pub size_bytes: usize,
    /// The rate of the adaptive policy, in million packets a second.
    pub zero_loss_mpps: f64,
    /// The fixed batch with the highest rate.
    pub best_fixed_batch: u8,
    /// Its rate: in each half of the rounds, that of the batch which is the best in the other half.
    pub best_fixed_zero_loss_mpps: f64,
    /// The adaptive rate as a multiple of that rate in the same round.
    pub ratio: Ratio,
}

/// Returns the comparison of the adaptive policy with the best fixed batch, one for each size and interconnect that
/// [`rates`] measured.
pub fn adaptive_rates(rows: &[RateRow]) -> Vec<AdaptiveRate> {
    rows.iter()
        .filter(|row| row.batching == Batching::Adaptive)
        .filter_map(|row| compare_with_fixed(rows, row))
        .collect()
}

fn compare_with_fixed(rows: &[RateRow], adaptive: &RateRow) -> Option<AdaptiveRate> {
    let of = |row: &RateRow| (row.frame_bytes, row.interconnect);
    let nonzero_rates = |row: &RateRow| -> ByRound {
        row.rounds_zero_loss_mpps.iter().map(|mpps| Some(*mpps).filter(|mpps| *mpps > 0.0)).collect()
    };
    let fixed = rows.iter().filter(|other| of(other) == of(adaptive)).filter_map(|other| match other.batching {
        Batching::Fixed(batch) => Some((batch, nonzero_rates(other))),
        Batching::Adaptive => None,
    });
    let (batches, rounds): (Vec<u8>, Vec<ByRound>) = fixed.unzip();
    let comparison = compare_with_best(&nonzero_rates(adaptive), &rounds.iter().collect::<Vec<_>>(), Better::More)?;
    Some(AdaptiveRate {
        interconnect: adaptive.interconnect,
        size_bytes: adaptive.frame_bytes,
        zero_loss_mpps: adaptive.zero_loss_mpps,
        best_fixed_batch: batches[comparison.best],
        best_fixed_zero_loss_mpps: comparison.best_value,
        ratio: comparison.ratio,
    })
}

/// Measures the rates of all policies with frames of one size, in alternating rounds; `step` is called for each round,
/// and once for the additional rounds. A policy's search starts at the result of its previous round.
///
/// # Errors
/// Fails if the nodes could not be created.
pub fn rates(
    kind: TransportKind,
    frame_bytes: usize,
    rounds: Rounds,
    effort: &Effort,
    cores: Cores,
    step: &mut dyn FnMut(&str),
) -> Result<Vec<RateRow>, BenchError> {
    let mut found: Vec<(Batching, PolicyRates)> =
        Batching::all().map(|batching| (batching, PolicyRates::default())).collect();
    let mut participants: Vec<usize> = (0..found.len()).collect();
    for round in 0..rounds.most {
        if round < rounds.all {
            step(&format!("rates without a loss, {frame_bytes} B, round {} of {}", round + 1, rounds.all));
        } else {
            let rows = rows_of(kind, frame_bytes, &found);
            if round == rounds.all {
                step(&format!("rates without a loss, {frame_bytes} B, candidates for the best batch"));
                participants = candidates(&rows);
            }
            if adaptive_rates(&rows).iter().all(|row| row.ratio.is_known()) {
                break;
            }
        }
        // No policy is always the first of a round.
        participants.rotate_left(1);
        for at in &participants {
            let (batching, found) = &mut found[*at];
            let search = Search { kind, batching: *batching, frame_bytes, effort, cores, seed: round as u64 };
            found.search(&search)?;
        }
    }
    Ok(rows_of(kind, frame_bytes, &found))
}

fn rows_of(kind: TransportKind, frame_bytes: usize, found: &[(Batching, PolicyRates)]) -> Vec<RateRow> {
    let of = |rounds: &[f64]| median(rounds.iter().copied()).unwrap_or(0.0);
    let row = |(batching, found): &(Batching, PolicyRates)| RateRow {
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

/// Returns the rows of the adaptive policy and of the candidates for the best fixed batch.
fn candidates(rows: &[RateRow]) -> Vec<usize> {
    let fixed = rows.iter().filter(|row| row.batching != Batching::Adaptive);
    let highest_mpps = fixed.map(|row| row.zero_loss_mpps).fold(0.0, f64::max);
    let is_candidate =
        |row: &RateRow| row.batching == Batching::Adaptive || row.zero_loss_mpps >= CANDIDATES_SHARE_MIN * highest_mpps;
    (0..rows.len()).filter(|at| is_candidate(&rows[*at])).collect()
}

/// The rates of one policy, by round.
#[derive(Clone, Default)]
struct PolicyRates {
    zero_loss_mpps: Vec<f64>,
    flood_mpps: Vec<f64>,
    packets_per_message: Vec<f64>,
}

impl PolicyRates {
    fn search(&mut self, search: &Search) -> Result<(), BenchError> {
        let (flood_mpps, packets_per_message) = search.flood()?;
        let previous_mpps = self.zero_loss_mpps.iter().rev().copied().find(|mpps| *mpps > 0.0);
        self.zero_loss_mpps.push(search.zero_loss(flood_mpps, previous_mpps)?);
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
        // Packets that arrive late mean a growing queue: a rate is carried if packets leave as fast as they arrive.
        let is_carried = trial.lost_packets == 0 && trial.delivered_mpps >= 0.98 * mpps;
        Ok(if is_carried { Verdict::Carried } else { Verdict::Lost })
    }

    /// Searches for the highest rate without a loss, from the result of the previous round if there is one.
    fn zero_loss(&self, flood_mpps: f64, previous_mpps: Option<f64>) -> Result<f64, BenchError> {
        let ceiling = ABOVE_FLOOD * flood_mpps;
        if ceiling <= 0.0 {
            return Ok(0.0);
        }
        let first = previous_mpps.unwrap_or(FIRST_SHARE * flood_mpps).min(ceiling);
        let precision = self.effort.search_precision;
        let rules = Rules { precision, trials_max: TRIES, failures: TRIES, is_confirmed: false };
        Ok(highest(rules, first, ceiling, |mpps, _| self.verdict(mpps))?.rate)
    }
}

/// The gain of batches over one packet a message. *Measured*; the median of the ratios within each round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchGain {
    /// The name of the interconnect.
    pub interconnect: &'static str,
    /// The frame size in bytes.
    pub frame_bytes: usize,
    /// The rate that arrives in a flood with one packet a message, in million packets a second.
    pub single_mpps: f64,
    /// The best fixed batch.
    pub best_batch: u8,
    /// The rate with that batch, in million packets a second.
    pub best_mpps: f64,
    /// The ratio of that rate to the rate with one packet a message.
    pub gain: f64,
    /// The same ratio with adaptive batches.
    pub gain_adaptive: f64,
}

/// Measures the gain of each batch over single packets, in floods, in alternating rounds.
///
/// # Errors
/// Fails if the nodes could not be created.
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
    fn candidates_for_the_best_batch_continue() {
        let rows = [
            row(Batching::Fixed(1), 64, &[1.0]),
            row(Batching::Fixed(8), 64, &[7.9]),
            row(Batching::Fixed(16), 64, &[8.1]),
            row(Batching::Fixed(32), 64, &[10.0]),
            row(Batching::Adaptive, 64, &[3.0]),
        ];
        assert_eq!(candidates(&rows), [2, 3, 4]);
    }
}
