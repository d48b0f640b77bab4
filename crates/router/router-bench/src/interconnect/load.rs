//! What latency at what load.

use router_node::interconnect::TransportKind;
use serde::Serialize;
use stats::Ratio;

use super::beside::{Better, ByRound, Rounds, beside_best};
use super::nodes::{Cores, Offered, Trial, TrialSetup, run};
use super::{Batching, BenchError, Effort, name};
use crate::statistics::{Quantiles, median};

/// Who delivers a smaller share does not carry the load: its latency is the length of a queue.
pub(super) const CARRIED_SHARE: f64 = 0.97;
/// A trial with fewer undisturbed packets says nothing of them.
const SAMPLES_MIN: usize = 300;
/// A fixed batch whose p99 is a larger multiple of the least one's, after the rounds of all, is not the best one.
const CONTENDERS_P99_RATIO_MAX: f64 = 1.5;

/// Latency under one load with one policy. *Measured*, medians over rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// The p99 of each round; nothing of a round in which stalls had to do with most packets.
    pub rounds_p99_us: Vec<Option<f64>>,
    /// That of the same policy once more in the same rounds, where it is the control: nothing of rounds in which it was
    /// not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub control_rounds_p99_us: Vec<Option<f64>>,
}

impl LoadRow {
    /// Whether what was offered arrived: beyond that, latency is the length of a queue.
    pub fn is_carried(&self) -> bool {
        self.delivered_mpps >= CARRIED_SHARE * self.load_mpps
    }
}

/// Latencies of all policies under one load, in alternating rounds.
///
/// # Errors
/// When the nodes could not be made.
pub fn load(
    kind: TransportKind,
    frame_bytes: usize,
    load_mpps: f64,
    rounds: Rounds,
    effort: &Effort,
    cores: Cores,
) -> Result<Vec<LoadRow>, BenchError> {
    let mut found: Vec<Found> = Batching::all().map(Found::of).collect();
    let mut taking_part: Vec<(usize, As)> = (0..found.len()).map(|at| (at, As::Policy)).collect();
    for round in 0..rounds.most {
        let rows = || rows_of(kind, frame_bytes, load_mpps, &found);
        if rounds.compares() && round == rounds.all / 3 {
            taking_part.extend(control(&rows()).map(|at| (at, As::Control)));
        }
        if round >= rounds.all {
            let rows = rows();
            if adaptive_rows(&rows).iter().all(|row| row.p99_ratio.is_known()) {
                break;
            }
            if round == rounds.all {
                let contenders = contenders(&rows);
                taking_part.retain(|(at, _)| contenders.contains(at));
            }
        }
        // Nobody is always the first.
        taking_part.rotate_left(1);
        for (at, part) in &taking_part {
            let setup = TrialSetup {
                kind,
                batching: found[*at].batching,
                frame_bytes,
                offered: Offered::Mpps(load_mpps),
                trial: effort.load_trial,
                warm_up: effort.load_warm_up,
                // All policies of a round see the same packets at the same moments.
                seed: round as u64,
            };
            found[*at].note(round, *part, run(&setup, cores)?);
        }
    }
    Ok(rows_of(kind, frame_bytes, load_mpps, &found))
}

/// As what a policy takes part in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum As {
    /// As one of those that are compared.
    Policy,
    /// Beside itself: what then differs is the machine's doing.
    Control,
}

/// The trials of a policy, by round.
#[derive(Debug)]
struct Found {
    batching: Batching,
    trials: Vec<Trial>,
    control_p99_us: ByRound,
}

impl Found {
    fn of(batching: Batching) -> Found {
        Found { batching, trials: Vec::new(), control_p99_us: Vec::new() }
    }

    fn note(&mut self, round: usize, part: As, trial: Trial) {
        match part {
            As::Policy => self.trials.push(trial),
            As::Control => {
                self.control_p99_us.resize(round, None);
                self.control_p99_us.push(p99_us(&trial));
            }
        }
    }
}

fn rows_of(kind: TransportKind, frame_bytes: usize, load_mpps: f64, found: &[Found]) -> Vec<LoadRow> {
    let row = |Found { batching, trials, control_p99_us }: &Found| {
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
            rounds_p99_us: trials.iter().map(p99_us).collect(),
            control_rounds_p99_us: control_p99_us.clone(),
        }
    };
    found.iter().map(row).collect()
}

/// Which of the rows of one load is the control's: the fixed batch that looks like the best one after a few rounds.
fn control(rows: &[LoadRow]) -> Option<usize> {
    let adaptive = rows.iter().find(|row| row.batching == Batching::Adaptive)?;
    let fixed = comparable(rows, adaptive);
    let (batch, _) = fixed.iter().min_by(|(_, one), (_, other)| one.p99_us.total_cmp(&other.p99_us))?;
    rows.iter().position(|row| row.batching == Batching::Fixed(*batch))
}

/// Of the rows of one load, those of the adaptive policy and of the fixed batches that may be the best.
fn contenders(rows: &[LoadRow]) -> Vec<usize> {
    let Some(adaptive) = rows.iter().find(|row| row.batching == Batching::Adaptive) else { return Vec::new() };
    let fixed = comparable(rows, adaptive);
    let least_us = fixed.iter().map(|(_, row)| row.p99_us).fold(f64::INFINITY, f64::min);
    let is_one = |row: &LoadRow| match row.batching {
        Batching::Adaptive => true,
        Batching::Fixed(batch) => {
            row.p99_us <= CONTENDERS_P99_RATIO_MAX * least_us && fixed.iter().any(|(other, _)| *other == batch)
        }
    };
    (0..rows.len()).filter(|at| is_one(&rows[*at])).collect()
}

fn p99_us(trial: &Trial) -> Option<f64> {
    quiet(trial).map(|quiet| quiet.p99_us)
}

/// What a trial says of packets that no stall had anything to do with, where those are enough to say something.
fn quiet(trial: &Trial) -> Option<Quantiles> {
    Some(trial.undisturbed).filter(|quiet| quiet.samples >= SAMPLES_MIN)
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
    /// Its p99: in each half of the rounds, that of the batch which is the best in the other half.
    pub best_fixed_p99_us: f64,
    /// The adaptive p99 as a multiple of that in the same round, in which both saw the same packets and nearly the same
    /// machine.
    pub p99_ratio: Ratio,
    /// A fixed batch beside itself, in the same rounds: a ratio that differs from one by no more says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<Control>,
}

/// What two policies differ by that are the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Control {
    /// Which fixed batch.
    pub fixed_batch: u8,
    /// Its p99 as a multiple of its own in the same round.
    pub p99_ratio: Ratio,
}

impl Control {
    /// By the rows of one load.
    fn among(fixed: &[(u8, &LoadRow)]) -> Option<Control> {
        let (fixed_batch, row) = fixed.iter().find(|(_, row)| !row.control_rounds_p99_us.is_empty())?;
        let rounds = row.control_rounds_p99_us.iter().zip(&row.rounds_p99_us);
        let ratios: Vec<f64> = rounds.filter_map(|(control, own)| Some((*control)? / (*own)?)).collect();
        (!ratios.is_empty()).then(|| Control { fixed_batch: *fixed_batch, p99_ratio: Ratio::of(&ratios) })
    }
}

/// The adaptive rows of what [`load`] found, one for each load. Where the machine was so busy that no fixed batch
/// carried a load, it stands beside the one that carried the most of it: [`uncarried`] says which loads those are.
pub fn adaptive_rows(rows: &[LoadRow]) -> Vec<AdaptiveRow> {
    rows.iter().filter(|row| row.batching == Batching::Adaptive).filter_map(|row| beside_fixed(rows, row)).collect()
}

fn beside_fixed(rows: &[LoadRow], adaptive: &LoadRow) -> Option<AdaptiveRow> {
    let fixed = comparable(rows, adaptive);
    let rounds: Vec<&ByRound> = fixed.iter().map(|(_, row)| &row.rounds_p99_us).collect();
    let beside = beside_best(&adaptive.rounds_p99_us, &rounds, Better::Less);
    // Where no round says anything there are still the figures of all packets.
    let least = fixed.iter().min_by(|(_, one), (_, other)| one.p99_us.total_cmp(&other.p99_us))?;
    let (best_fixed_batch, best_fixed_p99_us, p99_ratio) = match beside {
        Some(beside) => (fixed[beside.best].0, beside.best_value, beside.ratio),
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

/// A remark for each load that no fixed batch carried: the p99 that stands for it is the length of a queue.
pub fn uncarried(rows: &[LoadRow]) -> Vec<String> {
    let adaptive = rows.iter().filter(|row| row.batching == Batching::Adaptive);
    let most = adaptive.filter_map(|row| comparable(rows, row).first().copied()).filter(|(_, row)| !row.is_carried());
    let remark = |(batch, most): (u8, &LoadRow)| {
        let LoadRow { interconnect, frame_bytes, load_mpps, delivered_mpps, p99_us, .. } = most;
        format!(
            "{interconnect}: no fixed batch carried {load_mpps:.3} Mpps of {frame_bytes} B; {batch} packets a message \
             came to {delivered_mpps:.3} Mpps, and their p99 of {p99_us:.1} us is a queue's"
        )
    };
    most.map(remark).collect()
}

/// The fixed batches that carry what `row` was offered; where none does, the one that carries the most.
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
    fn the_control_is_the_best_fixed_batch_beside_itself() {
        let rounds = |values: &[f64]| values.iter().map(|value| (*value > 0.0).then_some(*value)).collect::<ByRound>();
        let mut rows = [
            row(Batching::Fixed(1), 9.0, 3.0, 4.0),
            row(Batching::Fixed(8), 9.0, 9.0, 7.0),
            row(Batching::Fixed(32), 9.0, 9.0, 5.0),
            row(Batching::Adaptive, 9.0, 9.0, 4.5),
        ];
        assert_eq!((control(&rows), control(&rows[..3])), (Some(2), None));
        assert_eq!(adaptive_rows(&rows)[0].control, None);
        let mut found = Found::of(Batching::Fixed(32));
        found.control_p99_us.resize(2, None);
        rows[2].rounds_p99_us = rounds(&[9.0, 9.0, 4.0, 0.0, 5.0, 10.0]);
        rows[2].control_rounds_p99_us = found.control_p99_us.into_iter().chain(rounds(&[5.0, 5.0, 4.0, 0.0])).collect();
        let control = adaptive_rows(&rows)[0].control.unwrap();
        assert_eq!((control.fixed_batch, control.p99_ratio), (32, Ratio::of(&[1.25, 0.8])));
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
        let found: Vec<_> = found.iter().map(|row| (row.p99_us, row.best_fixed_batch, row.p99_ratio.median)).collect();
        assert_eq!((found, uncarried(&rows)), (vec![(1.5, 1, 0.75), (4.0, 8, 0.8)], vec![]));
    }

    #[test]
    fn who_may_be_the_best_goes_on() {
        let rows = [
            row(Batching::Fixed(1), 9.0, 3.0, 4.0),
            row(Batching::Fixed(8), 9.0, 9.0, 7.6),
            row(Batching::Fixed(16), 9.0, 9.0, 7.4),
            row(Batching::Fixed(32), 9.0, 9.0, 5.0),
            row(Batching::Adaptive, 9.0, 3.0, 99.0),
        ];
        assert_eq!(contenders(&rows), [2, 3, 4]);
        let nobody_carries = [row(Batching::Fixed(1), 9.0, 3.0, 4.0), row(Batching::Fixed(8), 9.0, 8.0, 900.0)];
        assert_eq!(contenders(&[&nobody_carries[..], &rows[4..]].concat()), [1, 2]);
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
