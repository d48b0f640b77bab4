//! What latency at what load.

use router_node::interconnect::Kind;
use serde::Serialize;

use super::nodes::{Cores, Offered, Trial, TrialSetup, run};
use super::{Batching, BenchError, Effort, name};
use crate::statistics::{Quantiles, median};

/// Who delivers a smaller share does not carry the load: its latency is the length of a queue.
pub(super) const CARRIED_SHARE: f64 = 0.97;
/// A trial with fewer undisturbed packets says nothing of them.
const SAMPLES_MIN: usize = 300;

/// Latency under one load with one policy. *Measured*, medians over rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoadRow {
    /// Over which interconnect.
    pub interconnect: &'static str,
    /// Bytes of a frame.
    pub frame_bytes: usize,
    /// Million packets a second that were offered.
    pub load_mpps: f64,
    /// How packets are put together.
    pub batching: Batching,
    /// Median latency of the packets that no stall of the machine had anything to do with.
    pub p50_us: f64,
    /// 99% of those took at most this.
    pub p99_us: f64,
    /// What share of all packets those are.
    pub undisturbed_share: f64,
    /// 99% of all packets took at most this.
    pub p99_all_us: f64,
    /// Million packets a second that arrived: less than offered beyond what the policy carries.
    pub delivered_mpps: f64,
    /// Packets a message.
    pub packets_per_message: f64,
    /// The adaptive policy's p99 as a multiple of this one's in the same round, in which both saw the same packets and
    /// nearly the same machine: median over rounds.
    pub adaptive_p99_ratio: f64,
}

impl LoadRow {
    /// Whether what was offered arrived: beyond that, latency is the length of a queue.
    pub fn is_carried(&self) -> bool {
        self.delivered_mpps >= CARRIED_SHARE * self.load_mpps
    }
}

/// Latencies of all policies under one load, in so many alternating rounds.
///
/// # Errors
/// When the nodes could not be made.
pub fn load(
    kind: Kind,
    frame_bytes: usize,
    load_mpps: f64,
    rounds: usize,
    effort: &Effort,
    cores: Cores,
) -> Result<Vec<LoadRow>, BenchError> {
    let policies: Vec<Batching> = Batching::all().collect();
    let mut trials = vec![Vec::new(); policies.len()];
    for round in 0..rounds {
        for at in 0..policies.len() {
            // Nobody is always the first.
            let at = (at + round) % policies.len();
            let setup = TrialSetup {
                kind,
                batching: policies[at],
                frame_bytes,
                offered: Offered::Mpps(load_mpps),
                trial: effort.load_trial,
                warm_up: effort.load_warm_up,
                // All policies of a round see the same packets at the same moments.
                seed: round as u64,
            };
            trials[at].push(run(&setup, cores)?);
        }
    }
    let is_adaptive = |batching: &Batching| *batching == Batching::Adaptive;
    let adaptive = policies.iter().position(is_adaptive).map_or(&[][..], |at| &trials[at]);
    let row = |(batching, trials): (&Batching, &Vec<Trial>)| {
        let of = |value: fn(&Trial) -> f64| median(trials.iter().map(value)).unwrap_or(0.0);
        let of_quiet = |value: fn(Quantiles) -> f64| median(trials.iter().filter_map(quiet).map(value));
        LoadRow {
            interconnect: name(kind),
            frame_bytes,
            load_mpps,
            batching: *batching,
            p50_us: of_quiet(|quiet| quiet.p50_us).unwrap_or_else(|| of(|trial| trial.latency.p50_us)),
            p99_us: of_quiet(|quiet| quiet.p99_us).unwrap_or_else(|| of(|trial| trial.latency.p99_us)),
            undisturbed_share: of(|trial| trial.undisturbed.samples as f64 / trial.latency.samples.max(1) as f64),
            p99_all_us: of(|trial| trial.latency.p99_us),
            delivered_mpps: of(|trial| trial.delivered_mpps),
            packets_per_message: of(|trial| trial.packets_per_message),
            adaptive_p99_ratio: ratio_of_rounds(adaptive, trials),
        }
    };
    Ok(policies.iter().zip(&trials).map(row).collect())
}

/// What a trial says of packets that no stall had anything to do with, where those are enough to say something.
fn quiet(trial: &Trial) -> Option<Quantiles> {
    Some(trial.undisturbed).filter(|quiet| quiet.samples >= SAMPLES_MIN)
}

/// The median, over rounds, of one policy's p99 as a multiple of another's; 0 where no round says anything.
fn ratio_of_rounds(policy: &[Trial], other: &[Trial]) -> f64 {
    let of_round = |(policy, other): (&Trial, &Trial)| Some(quiet(policy)?.p99_us / quiet(other)?.p99_us);
    median(policy.iter().zip(other).filter_map(of_round)).unwrap_or(0.0)
}

/// The adaptive policy beside the best fixed batch at one load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdaptiveRow {
    /// Bytes of a frame.
    pub size_bytes: usize,
    /// Million packets a second that were offered.
    pub load_mpps: f64,
    /// Adaptive: median latency.
    pub p50_us: f64,
    /// Adaptive: 99% took at most this.
    pub p99_us: f64,
    /// The fixed batch with the least p99 of those that carry the load.
    pub best_fixed_batch: u8,
    /// That p99.
    pub best_fixed_p99_us: f64,
    /// The adaptive p99 as a multiple of that in the same round: median over rounds, which the moods of a machine move
    /// less than they move the two.
    pub p99_ratio: f64,
}

/// The adaptive rows of what [`load`] found, one for each load. Where the machine was so busy that no fixed batch
/// carried a load, it stands beside the one that carried the most of it: [`uncarried`] says which loads those are.
pub fn adaptive_rows(rows: &[LoadRow]) -> Vec<AdaptiveRow> {
    let adaptive = rows.iter().filter(|row| row.batching == Batching::Adaptive);
    let beside = |row: &LoadRow| {
        let (best_fixed_batch, best) = best_fixed(rows, row)?;
        Some(AdaptiveRow {
            size_bytes: row.frame_bytes,
            load_mpps: row.load_mpps,
            p50_us: row.p50_us,
            p99_us: row.p99_us,
            best_fixed_batch,
            best_fixed_p99_us: best.p99_us,
            p99_ratio: best.adaptive_p99_ratio,
        })
    };
    adaptive.filter_map(beside).collect()
}

/// A remark for each load that no fixed batch carried: the p99 that stands for it is the length of a queue.
pub fn uncarried(rows: &[LoadRow]) -> Vec<String> {
    let adaptive = rows.iter().filter(|row| row.batching == Batching::Adaptive);
    let best = adaptive.filter_map(|row| best_fixed(rows, row)).filter(|(_, best)| !best.is_carried());
    let remark = |(batch, best): (u8, &LoadRow)| {
        let LoadRow { interconnect, frame_bytes, load_mpps, delivered_mpps, p99_us, .. } = best;
        format!(
            "{interconnect}: no fixed batch carried {load_mpps:.3} Mpps of {frame_bytes} B; {batch} packets a message \
             came to {delivered_mpps:.3} Mpps, and their p99 of {p99_us:.1} us is a queue's"
        )
    };
    best.map(remark).collect()
}

/// The fixed batch with the least p99 of those that carry what `row` was offered; where none does, the one that carries
/// the most.
fn best_fixed<'a>(rows: &'a [LoadRow], row: &LoadRow) -> Option<(u8, &'a LoadRow)> {
    let of = |row: &LoadRow| (row.frame_bytes, row.load_mpps, row.interconnect);
    let fixed = rows.iter().filter(|other| of(other) == of(row)).filter_map(|other| match other.batching {
        Batching::Fixed(batch) => Some((batch, other)),
        Batching::Adaptive => None,
    });
    let carried = fixed.clone().filter(|(_, other)| other.is_carried());
    let least = carried.min_by(|(_, one), (_, other)| one.p99_us.total_cmp(&other.p99_us));
    least.or_else(|| fixed.max_by(|(_, one), (_, other)| one.delivered_mpps.total_cmp(&other.delivered_mpps)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(batching: Batching, load_mpps: f64, delivered_mpps: f64, p99_us: f64) -> LoadRow {
        LoadRow {
            interconnect: "lanes",
            frame_bytes: 64,
            load_mpps,
            batching,
            p50_us: p99_us / 2.0,
            p99_us,
            undisturbed_share: 1.0,
            p99_all_us: p99_us,
            delivered_mpps,
            packets_per_message: 1.0,
            adaptive_p99_ratio: 1.0,
        }
    }

    fn trial(p99_us: f64, samples: usize) -> Trial {
        let undisturbed = Quantiles { p99_us, samples, ..Quantiles::default() };
        Trial {
            delivered_mpps: 1.0,
            offered_packets: 1,
            lost_packets: 0,
            packets_per_message: 1.0,
            latency: Quantiles::default(),
            undisturbed,
        }
    }

    #[test]
    fn policies_are_compared_round_by_round() {
        // A machine that is ten times slower for two rounds, and a round that says nothing of one of them.
        let policy = [trial(5.0, 999), trial(50.0, 999), trial(60.0, 999), trial(900.0, 999), trial(6.0, 999)];
        let other = [trial(10.0, 999), trial(100.0, 999), trial(60.0, 999), trial(1.0, 10), trial(8.0, 999)];
        assert_eq!(ratio_of_rounds(&policy, &other), 0.625);
        assert_eq!(ratio_of_rounds(&policy[3..4], &other[3..4]), 0.0);
    }

    #[test]
    fn adaptive_stands_beside_the_best_batch_that_carries_the_load() {
        let rows = [
            row(Batching::Fixed(1), 1.0, 1.0, 2.0),
            row(Batching::Fixed(8), 1.0, 0.99, 9.0),
            row(Batching::Adaptive, 1.0, 1.0, 1.5),
            row(Batching::Fixed(1), 9.0, 3.0, 0.5),
            row(Batching::Fixed(8), 9.0, 9.0, 5.0),
            row(Batching::Adaptive, 9.0, 9.0, 4.0),
        ];
        let found = adaptive_rows(&rows);
        let found: Vec<_> = found.iter().map(|row| (row.load_mpps, row.p99_us, row.best_fixed_batch)).collect();
        assert_eq!((found, uncarried(&rows)), (vec![(1.0, 1.5, 1), (9.0, 4.0, 8)], vec![]));
    }

    #[test]
    fn a_load_that_nothing_carries_keeps_its_row_and_is_remarked_upon() {
        let rows = [
            row(Batching::Fixed(1), 99.0, 3.0, 0.5),
            row(Batching::Fixed(8), 99.0, 95.0, 70.0),
            row(Batching::Adaptive, 99.0, 97.0, 40.0),
        ];
        let found = adaptive_rows(&rows);
        let found: Vec<_> =
            found.iter().map(|row| (row.load_mpps, row.best_fixed_batch, row.best_fixed_p99_us)).collect();
        assert_eq!(found, [(99.0, 8, 70.0)]);
        let remark = "lanes: no fixed batch carried 99.000 Mpps of 64 B; 8 packets a message came to 95.000 Mpps, and \
                      their p99 of 70.0 us is a queue's";
        assert_eq!(uncarried(&rows), [remark]);
    }
}
