//! Latency by load.

use router_node::interconnect::TransportKind;
use serde::Serialize;
use stats::Ratio;

use super::comparison::{Better, ByRound, Rounds, compare_with_best};
use super::nodes::{Cores, Offered, Trial, TrialSetup, run};
use super::{Batching, BenchError, Effort, name};
use crate::statistics::{Quantiles, median};

/// A policy that delivers a smaller share of the load does not carry it: its latency is the length of a queue.
pub(super) const CARRIED_SHARE: f64 = 0.97;
/// The fewest undisturbed packets with which a trial has a valid p99.
const SAMPLES_MIN: usize = 300;
/// After the rounds with all policies, a fixed batch whose p99 exceeds the lowest one by this factor is not a candidate
/// for the best one.
const CANDIDATES_P99_RATIO_MAX: f64 = 1.5;

/// Latency under one load with one policy. *Measured*, medians over rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadRow {
    /// The name of the interconnect.
    pub interconnect: &'static str,
    /// The frame size in bytes.
    pub frame_bytes: usize,
    /// The offered load in million packets a second.
    pub load_mpps: f64,
    /// The batching policy.
    pub batching: Batching,
    /// The median latency of undisturbed packets, those that no stall of the machine affected.
    pub p50_us: f64,
    /// The 99th percentile of the latency of undisturbed packets.
    pub p99_us: f64,
    /// The share of undisturbed packets.
    pub undisturbed_share: f64,
    /// The 99th percentile of the latency of all packets.
    pub p99_all_us: f64,
    /// Million packets a second that arrived: fewer than offered if the policy does not carry the load.
    pub delivered_mpps: f64,
    /// Packets for each message.
    pub packets_per_message: f64,
    /// The p99 of each round; `None` for a round in which stalls affected most packets.
    pub rounds_p99_us: Vec<Option<f64>>,
    /// The p99 of a second measurement of the same policy in the same rounds, as a control; `None` for rounds without
    /// it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub control_rounds_p99_us: Vec<Option<f64>>,
}

impl LoadRow {
    /// Returns whether the offered load arrived; otherwise the latency is the length of a queue.
    pub fn is_carried(&self) -> bool {
        self.delivered_mpps >= CARRIED_SHARE * self.load_mpps
    }
}

/// Measures the latencies of all policies under one load, in alternating rounds.
///
/// # Errors
/// Fails if the nodes could not be created.
pub fn load(
    kind: TransportKind,
    frame_bytes: usize,
    load_mpps: f64,
    rounds: Rounds,
    effort: &Effort,
    cores: Cores,
) -> Result<Vec<LoadRow>, BenchError> {
    let mut found: Vec<PolicyTrials> = Batching::all().map(PolicyTrials::of).collect();
    let mut participants: Vec<(usize, Role)> = (0..found.len()).map(|at| (at, Role::Policy)).collect();
    for round in 0..rounds.most {
        let rows = || rows_of(kind, frame_bytes, load_mpps, &found);
        if rounds.compares() && round == rounds.all / 3 {
            participants.extend(control(&rows()).map(|at| (at, Role::Control)));
        }
        if round >= rounds.all {
            let rows = rows();
            if adaptive_rows(&rows).iter().all(|row| row.p99_ratio.is_known()) {
                break;
            }
            if round == rounds.all {
                let candidates = candidates(&rows);
                participants.retain(|(at, _)| candidates.contains(at));
            }
        }
        // No policy is always the first of a round.
        participants.rotate_left(1);
        for (at, role) in &participants {
            let setup = TrialSetup {
                kind,
                batching: found[*at].batching,
                frame_bytes,
                offered: Offered::Mpps(load_mpps),
                trial: effort.load_trial,
                warm_up: effort.load_warm_up,
                // All policies of a round see the same packets at the same times.
                seed: round as u64,
            };
            found[*at].add(round, *role, run(&setup, cores)?);
        }
    }
    Ok(rows_of(kind, frame_bytes, load_mpps, &found))
}

/// The role of a policy in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The policy is compared with others.
    Policy,
    /// The policy is compared with itself: the difference is due to the machine.
    Control,
}

/// The trials of a policy, by round.
#[derive(Debug)]
struct PolicyTrials {
    batching: Batching,
    trials: Vec<Trial>,
    control_p99_us: ByRound,
}

impl PolicyTrials {
    fn of(batching: Batching) -> PolicyTrials {
        PolicyTrials { batching, trials: Vec::new(), control_p99_us: Vec::new() }
    }

    fn add(&mut self, round: usize, role: Role, trial: Trial) {
        match role {
            Role::Policy => self.trials.push(trial),
            Role::Control => {
                self.control_p99_us.resize(round, None);
                self.control_p99_us.push(p99_us(&trial));
            }
        }
    }
}

fn rows_of(kind: TransportKind, frame_bytes: usize, load_mpps: f64, found: &[PolicyTrials]) -> Vec<LoadRow> {
    let row = |PolicyTrials { batching, trials, control_p99_us }: &PolicyTrials| {
        let of = |value: fn(&Trial) -> f64| median(trials.iter().map(value)).unwrap_or(0.0);
        let of_undisturbed = |value: fn(Quantiles) -> f64| median(trials.iter().filter_map(undisturbed).map(value));
        LoadRow {
            interconnect: name(kind),
            frame_bytes,
            load_mpps,
            batching: *batching,
            p50_us: of_undisturbed(|times| times.p50_us).unwrap_or_else(|| of(|trial| trial.latency.p50_us)),
            p99_us: of_undisturbed(|times| times.p99_us).unwrap_or_else(|| of(|trial| trial.latency.p99_us)),
            undisturbed_share: of(|trial| trial.undisturbed.samples as f64 / trial.latency.samples.max(1) as f64),
            p99_all_us: of(|trial| trial.latency.p99_us),
            delivered_mpps: of(|trial| trial.delivered_mpps),
            packets_per_message: of(|trial| trial.packets_per_message),
            rounds_p99_us: trials.iter().map(p99_us).collect(),
            control_rounds_p99_us: control_p99_us.clone(),
        }
    };
    found.iter().map(row).collect()
}

/// Returns the row of the control: the fixed batch that is the best after a few rounds.
fn control(rows: &[LoadRow]) -> Option<usize> {
    let adaptive = rows.iter().find(|row| row.batching == Batching::Adaptive)?;
    let fixed = comparable(rows, adaptive);
    let (batch, _) = fixed.iter().min_by(|(_, one), (_, other)| one.p99_us.total_cmp(&other.p99_us))?;
    rows.iter().position(|row| row.batching == Batching::Fixed(*batch))
}

/// Returns the rows of the adaptive policy and of the candidates for the best fixed batch.
fn candidates(rows: &[LoadRow]) -> Vec<usize> {
    let Some(adaptive) = rows.iter().find(|row| row.batching == Batching::Adaptive) else { return Vec::new() };
    let fixed = comparable(rows, adaptive);
    let least_us = fixed.iter().map(|(_, row)| row.p99_us).fold(f64::INFINITY, f64::min);
    let is_candidate = |row: &LoadRow| match row.batching {
        Batching::Adaptive => true,
        Batching::Fixed(batch) => {
            row.p99_us <= CANDIDATES_P99_RATIO_MAX * least_us && fixed.iter().any(|(other, _)| *other == batch)
        }
    };
    (0..rows.len()).filter(|at| is_candidate(&rows[*at])).collect()
}

fn p99_us(trial: &Trial) -> Option<f64> {
    undisturbed(trial).map(|times| times.p99_us)
}

/// Returns the latencies of undisturbed packets, if there are enough of them.
fn undisturbed(trial: &Trial) -> Option<Quantiles> {
    Some(trial.undisturbed).filter(|times| times.samples >= SAMPLES_MIN)
}

/// The adaptive policy compared with the best fixed batch at one load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdaptiveRow {
    /// The frame size in bytes.
    pub size_bytes: usize,
    /// The offered load in million packets a second.
    pub load_mpps: f64,
    /// The median latency of the adaptive policy.
    pub p50_us: f64,
    /// The 99th percentile of the latency of the adaptive policy.
    pub p99_us: f64,
    /// The fixed batch with the lowest p99 of those that carry the load.
    pub best_fixed_batch: u8,
    /// Its p99: in each half of the rounds, that of the batch which is the best in the other half.
    pub best_fixed_p99_us: f64,
    /// The adaptive p99 as a multiple of that p99 in the same round, in which both saw the same packets and nearly the
    /// same state of the machine.
    pub p99_ratio: Ratio,
    /// A fixed batch compared with itself in the same rounds: a ratio that differs from one by no more is not
    /// significant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<Control>,
}

/// The difference between two measurements of the same policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Control {
    /// The fixed batch.
    pub fixed_batch: u8,
    /// The p99 of its control as a multiple of its p99 in the same round.
    pub p99_ratio: Ratio,
}

impl Control {
    /// Returns the control among the fixed batches of one load.
    fn among(fixed: &[(u8, &LoadRow)]) -> Option<Control> {
        let (fixed_batch, row) = fixed.iter().find(|(_, row)| !row.control_rounds_p99_us.is_empty())?;
        let rounds = row.control_rounds_p99_us.iter().zip(&row.rounds_p99_us);
        let ratios: Vec<f64> = rounds.filter_map(|(control, own)| Some((*control)? / (*own)?)).collect();
        (!ratios.is_empty()).then(|| Control { fixed_batch: *fixed_batch, p99_ratio: Ratio::of(&ratios) })
    }
}

/// Returns the comparison of the adaptive policy with the best fixed batch, one for each load that [`load`] measured.
/// If no fixed batch carried a load, the comparison is with the one that carried most of it: [`uncarried`] lists those
/// loads.
pub fn adaptive_rows(rows: &[LoadRow]) -> Vec<AdaptiveRow> {
    rows.iter()
        .filter(|row| row.batching == Batching::Adaptive)
        .filter_map(|row| compare_with_fixed(rows, row))
        .collect()
}

fn compare_with_fixed(rows: &[LoadRow], adaptive: &LoadRow) -> Option<AdaptiveRow> {
    let fixed = comparable(rows, adaptive);
    let rounds: Vec<&ByRound> = fixed.iter().map(|(_, row)| &row.rounds_p99_us).collect();
    let comparison = compare_with_best(&adaptive.rounds_p99_us, &rounds, Better::Less);
    // If no round has enough undisturbed packets, the figures of all packets are used.
    let least = fixed.iter().min_by(|(_, one), (_, other)| one.p99_us.total_cmp(&other.p99_us))?;
    let (best_fixed_batch, best_fixed_p99_us, p99_ratio) = match comparison {
        Some(comparison) => (fixed[comparison.best].0, comparison.best_value, comparison.ratio),
        None => (least.0, least.1.p99_us, Ratio::default()),
    };
    Some(AdaptiveRow {
        size_bytes: adaptive.frame_bytes,
        load_mpps: adaptive.load_mpps,
        p50_us: adaptive.p50_us,
        p99_us: adaptive.p99_us,
        best_fixed_batch,
        best_fixed_p99_us,
        p99_ratio,
        control: Control::among(&fixed),
    })
}

/// Returns a remark for each load that no fixed batch carried: its p99 is the length of a queue.
pub fn uncarried(rows: &[LoadRow]) -> Vec<String> {
    let adaptive = rows.iter().filter(|row| row.batching == Batching::Adaptive);
    let most = adaptive.filter_map(|row| comparable(rows, row).first().copied()).filter(|(_, row)| !row.is_carried());
    let remark = |(batch, most): (u8, &LoadRow)| {
        let LoadRow { interconnect, frame_bytes, load_mpps, delivered_mpps, p99_us, .. } = most;
        format!(
            "{interconnect}: no fixed batch carried {load_mpps:.3} Mpps of {frame_bytes} B; {batch} packets a message \
             delivered {delivered_mpps:.3} Mpps, and their p99 of {p99_us:.1} us is due to queueing"
        )
    };
    most.map(remark).collect()
}

/// Returns the fixed batches that carry the load of `row`, or the one that carries most if none does.
fn comparable<'a>(rows: &'a [LoadRow], row: &LoadRow) -> Vec<(u8, &'a LoadRow)> {
    let of = |row: &LoadRow| (row.frame_bytes, row.load_mpps, row.interconnect);
    let fixed = rows.iter().filter(|other| of(other) == of(row)).filter_map(|other| match other.batching {
        Batching::Fixed(batch) => Some((batch, other)),
        Batching::Adaptive => None,
    });
    let carried: Vec<_> = fixed.clone().filter(|(_, other)| other.is_carried()).collect();
    if !carried.is_empty() {
        return carried;
    }
    fixed.max_by(|(_, one), (_, other)| one.delivered_mpps.total_cmp(&other.delivered_mpps)).into_iter().collect()
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
            rounds_p99_us: vec![Some(p99_us)],
            control_rounds_p99_us: Vec::new(),
        }
    }

    #[test]
    fn the_control_compares_the_best_fixed_batch_with_itself() {
        let rounds = |values: &[f64]| values.iter().map(|value| (*value > 0.0).then_some(*value)).collect::<ByRound>();
        let mut rows = [
            row(Batching::Fixed(1), 9.0, 3.0, 4.0),
            row(Batching::Fixed(8), 9.0, 9.0, 7.0),
            row(Batching::Fixed(32), 9.0, 9.0, 5.0),
            row(Batching::Adaptive, 9.0, 9.0, 4.5),
        ];
        assert_eq!((control(&rows), control(&rows[..3])), (Some(2), None));
        assert_eq!(adaptive_rows(&rows)[0].control, None);
        let mut found = PolicyTrials::of(Batching::Fixed(32));
        found.control_p99_us.resize(2, None);
        rows[2].rounds_p99_us = rounds(&[9.0, 9.0, 4.0, 0.0, 5.0, 10.0]);
        rows[2].control_rounds_p99_us = found.control_p99_us.into_iter().chain(rounds(&[5.0, 5.0, 4.0, 0.0])).collect();
        let control = adaptive_rows(&rows)[0].control.unwrap();
        assert_eq!((control.fixed_batch, control.p99_ratio), (32, Ratio::of(&[1.25, 0.8])));
    }

    #[test]
    fn adaptive_is_compared_with_the_best_batch_that_carries_the_load() {
        let rows = [
            row(Batching::Fixed(1), 1.0, 1.0, 2.0),
            row(Batching::Fixed(8), 1.0, 0.99, 9.0),
            row(Batching::Adaptive, 1.0, 1.0, 1.5),
            row(Batching::Fixed(1), 9.0, 3.0, 0.5),
            row(Batching::Fixed(8), 9.0, 9.0, 5.0),
            row(Batching::Adaptive, 9.0, 9.0, 4.0),
        ];
        let found = adaptive_rows(&rows);
        let found: Vec<_> = found.iter().map(|row| (row.p99_us, row.best_fixed_batch, row.p99_ratio.median)).collect();
        assert_eq!((found, uncarried(&rows)), (vec![(1.5, 1, 0.75), (4.0, 8, 0.8)], vec![]));
    }

    #[test]
    fn candidates_for_the_best_batch_continue() {
        let rows = [
            row(Batching::Fixed(1), 9.0, 3.0, 4.0),
            row(Batching::Fixed(8), 9.0, 9.0, 7.6),
            row(Batching::Fixed(16), 9.0, 9.0, 7.4),
            row(Batching::Fixed(32), 9.0, 9.0, 5.0),
            row(Batching::Adaptive, 9.0, 3.0, 99.0),
        ];
        assert_eq!(candidates(&rows), [2, 3, 4]);
        let none_carries = [row(Batching::Fixed(1), 9.0, 3.0, 4.0), row(Batching::Fixed(8), 9.0, 8.0, 900.0)];
        assert_eq!(candidates(&[&none_carries[..], &rows[4..]].concat()), [1, 2]);
    }

    #[test]
    fn a_load_that_no_batch_carries_keeps_its_row_and_gets_a_remark() {
        let rows = [
            row(Batching::Fixed(1), 99.0, 3.0, 0.5),
            row(Batching::Fixed(8), 99.0, 95.0, 70.0),
            row(Batching::Adaptive, 99.0, 97.0, 40.0),
        ];
        let found = adaptive_rows(&rows);
        let found: Vec<_> =
            found.iter().map(|row| (row.load_mpps, row.best_fixed_batch, row.best_fixed_p99_us)).collect();
        assert_eq!(found, [(99.0, 8, 70.0)]);
        let remark = "lanes: no fixed batch carried 99.000 Mpps of 64 B; 8 packets a message delivered 95.000 Mpps, \
                      and their p99 of 70.0 us is due to queueing";
        assert_eq!(uncarried(&rows), [remark]);
    }
}
