//! The measurements between two nodes, over each interconnect.

use std::cmp::Ordering;

use router_node::interconnect::TransportKind;
use sim::Span;

use super::{Options, PUBLISHED_KIND, Part, ProgressObserver, Report};
use crate::interconnect::{
    BATCHES, Batching, BenchError, Cores, Effort, FRAME_BYTES, LOAD_FRAME_BYTES, ModelledRow, RateRow, Rounds,
    batch_gain, hops, kinds, load, modelled, name, rates,
};

/// The loads, as shares of the best rate that a fixed batch carries without a loss.
const LOADS: [f64; 6] = [0.05, 0.2, 0.4, 0.6, 0.8, 0.9];
const LOADS_QUICK: [f64; 3] = [0.1, 0.5, 0.8];
/// The load of latency by size, as a share of what the best fixed batch of the longest frames carries: the same packet
/// rate for each size, which all sizes carry.
const SIZE_LOAD: f64 = 0.5;
const SIZES_QUICK: [usize; 3] = [64, 512, 1500];
/// The length of a trial in virtual time.
const MODELLED_TRIAL: Span = Span::from_ps(12_000_000_000);

/// The extent of the measurements.
pub(super) struct Scale {
    pub effort: Effort,
    hop_sizes: &'static [usize],
    hop_batches: &'static [u8],
    /// The frame sizes whose rates and latency by load are measured.
    load_sizes: Vec<usize>,
    shares: Vec<f64>,
    sizes: Vec<usize>,
    /// Whether rates and latency are measured over the adaptive policy's interconnect alone.
    is_short: bool,
}

impl Scale {
    pub fn of(options: &Options) -> Scale {
        let usual = if options.is_quick {
            Scale {
                effort: Effort::quick(),
                hop_sizes: &LOAD_FRAME_BYTES,
                hop_batches: &[1, 16],
                load_sizes: LOAD_FRAME_BYTES.to_vec(),
                shares: LOADS_QUICK.to_vec(),
                sizes: SIZES_QUICK.to_vec(),
                is_short: true,
            }
        } else {
            Scale {
                effort: Effort::full(),
                hop_sizes: &FRAME_BYTES,
                hop_batches: &BATCHES,
                load_sizes: LOAD_FRAME_BYTES.to_vec(),
                shares: LOADS.to_vec(),
                sizes: FRAME_BYTES.to_vec(),
                is_short: false,
            }
        };
        Scale {
            load_sizes: chosen_or(&options.frame_bytes, usual.load_sizes),
            sizes: chosen_or(&options.frame_bytes, usual.sizes),
            shares: chosen_or(&options.load_shares, usual.shares),
            ..usual
        }
    }

    /// Models the same loads in virtual time.
    pub fn model(&self) -> Result<Vec<ModelledRow>, BenchError> {
        modelled(&self.load_sizes, &self.shares, MODELLED_TRIAL, if self.is_short { 1 } else { 3 })
    }
}

/// Returns the chosen values, sorted and each once, because rows are identified by them; the longest size is last,
/// because latency by size refers to its rate.
fn chosen_or<T: Copy + PartialOrd>(chosen: &[T], usual: Vec<T>) -> Vec<T> {
    if chosen.is_empty() {
        return usual;
    }
    let mut chosen = chosen.to_vec();
    chosen.sort_by(|one, other| one.partial_cmp(other).unwrap_or(Ordering::Equal));
    chosen.dedup();
    chosen
}

/// The measurements over one interconnect.
struct Plan {
    has_hops: bool,
    has_rates: bool,
    has_loads: bool,
    has_sizes: bool,
    /// Whether rounds continue until the adaptive policy's ratio to the best fixed batch is known.
    compares: bool,
}

impl Plan {
    fn of(kind: TransportKind, options: &Options, scale: &Scale) -> Plan {
        let has = |part| options.parts.has(part);
        let is_adaptive = name(kind) == options.adaptive_kind();
        let has_all = !scale.is_short || is_adaptive;
        let has_loads = has_all && has(Part::Latency) || is_adaptive && has(Part::Adaptive);
        Plan {
            has_hops: has(Part::Interconnect),
            // Loads are shares of the rates.
            has_rates: has_all && has(Part::Interconnect) || has_loads,
            has_loads,
            has_sizes: has_all && has(Part::Latency),
            compares: is_adaptive && has(Part::Adaptive),
        }
    }

    fn rounds(&self, rounds: Rounds) -> Rounds {
        if self.compares { rounds } else { Rounds::with_all(rounds.all) }
    }

    fn steps(&self, scale: &Scale) -> usize {
        let count = |is_included: bool, steps: usize| if is_included { steps } else { 0 };
        let Rounds { all, most } = self.rounds(scale.effort.rate_rounds);
        let of_size = count(self.has_rates, all + usize::from(most > all)) + count(self.has_loads, scale.shares.len());
        let sizes = count(self.has_sizes, scale.sizes.len());
        count(self.has_hops, scale.hop_batches.len() + 1) + scale.load_sizes.len() * of_size + sizes
    }
}

/// Returns the interconnects that are measured.
fn chosen(options: &Options) -> Vec<TransportKind> {
    options.kind.map_or_else(|| kinds().to_vec(), |kind| vec![kind])
}

/// Returns the number of steps that [`measure`] reports.
pub(super) fn steps(options: &Options, scale: &Scale) -> usize {
    chosen(options).into_iter().map(|kind| Plan::of(kind, options, scale).steps(scale)).sum()
}

/// Measures, and adds the results to the report.
pub(super) fn measure(
    options: &Options,
    scale: &Scale,
    report: &mut Report,
    observer: &mut dyn ProgressObserver,
) -> Result<(), BenchError> {
    let cores = Cores::find()?;
    for kind in chosen(options) {
        InterconnectRun { kind, plan: Plan::of(kind, options, scale), scale, cores }.measure(report, observer)?;
    }
    Ok(())
}

struct InterconnectRun<'a> {
    kind: TransportKind,
    plan: Plan,
    scale: &'a Scale,
    cores: Cores,
}

impl InterconnectRun<'_> {
    fn measure(&self, report: &mut Report, observer: &mut dyn ProgressObserver) -> Result<(), BenchError> {
        let InterconnectRun { kind, plan, scale: Scale { effort, hop_sizes, hop_batches, load_sizes, .. }, cores } =
            self;
        if plan.has_hops {
            let mut step = |what: &str| observer.step_begins(name(*kind), what);
            report.hops.extend(hops(*kind, hop_sizes, hop_batches, effort, *cores, &mut step)?);
            step("gain of batches");
            let gain = batch_gain(*kind, LOAD_FRAME_BYTES[0], effort, *cores)?;
            if name(*kind) == PUBLISHED_KIND {
                report.rnic_batch_gain_64b = Some(gain.gain);
            }
            report.gains.push(gain);
            observer.report_grew(report);
        }
        let mut carried_mpps = 0.0;
        for frame_bytes in load_sizes {
            if plan.has_rates {
                carried_mpps = self.rates(*frame_bytes, report, observer)?;
            }
            if plan.has_loads {
                self.loads(*frame_bytes, carried_mpps, report, observer)?;
            }
        }
        if plan.has_sizes { self.sizes(SIZE_LOAD * carried_mpps, report, observer) } else { Ok(()) }
    }

    /// Measures rates, and returns the full load, of which loads are shares.
    fn rates(
        &self,
        frame_bytes: usize,
        report: &mut Report,
        observer: &mut dyn ProgressObserver,
    ) -> Result<f64, BenchError> {
        let mut step = |what: &str| observer.step_begins(name(self.kind), what);
        let InterconnectRun { kind, plan, scale: Scale { effort, .. }, cores } = self;
        let rows = rates(*kind, frame_bytes, plan.rounds(effort.rate_rounds), effort, *cores, &mut step)?;
        let (mpps, remark) = full_load(&rows);
        report.remarks.extend(remark);
        report.rates.extend(rows);
        Ok(mpps)
    }

    fn loads(
        &self,
        frame_bytes: usize,
        carried_mpps: f64,
        report: &mut Report,
        observer: &mut dyn ProgressObserver,
    ) -> Result<(), BenchError> {
        let InterconnectRun { kind, plan, scale: Scale { effort, shares, .. }, cores } = self;
        let rounds = plan.rounds(effort.load_rounds);
        let mut rows = Vec::new();
        for share in shares {
            let percent = 100.0 * share;
            observer.step_begins(name(*kind), &format!("latency by load, {frame_bytes} B, {percent:.0}% of the rate"));
            rows.extend(load(*kind, frame_bytes, share * carried_mpps, rounds, effort, *cores)?);
        }
        report.loads.extend(rows);
        observer.report_grew(report);
        Ok(())
    }

    fn sizes(&self, mpps: f64, report: &mut Report, observer: &mut dyn ProgressObserver) -> Result<(), BenchError> {
        let InterconnectRun { kind, scale: Scale { effort, sizes, .. }, cores, .. } = self;
        let mut rows = Vec::new();
        for frame_bytes in sizes {
            observer.step_begins(name(*kind), &format!("latency by size, {frame_bytes} B"));
            rows.extend(load(*kind, *frame_bytes, mpps, effort.size_rounds, effort, *cores)?);
        }
        report.loads_by_size.extend(rows);
        observer.report_grew(report);
        Ok(())
    }
}

/// Returns the full load: [`best_fixed_mpps`]. If the machine was so busy that every search found no rate, the full
/// load is half of the best rate of a flood, and a remark says so.
fn full_load(rows: &[RateRow]) -> (f64, Option<String>) {
    let carried_mpps = best_fixed_mpps(rows);
    if carried_mpps > 0.0 {
        return (carried_mpps, None);
    }
    let fixed = rows.iter().filter(|row| row.batching != Batching::Adaptive);
    let best = fixed.max_by(|one, other| one.flood_mpps.total_cmp(&other.flood_mpps));
    let Some(row) = best else { return (carried_mpps, None) };
    let mpps = row.flood_mpps / 2.0;
    let remark = format!(
        "{}: no fixed batch carried {} B without a loss; loads are shares of half of the best flood, \
         {mpps:.3} Mpps",
        row.interconnect, row.frame_bytes
    );
    (mpps, Some(remark))
}

/// Returns the best rate that a fixed batch carries without a loss.
fn best_fixed_mpps(rows: &[RateRow]) -> f64 {
    let fixed = rows.iter().filter(|row| row.batching != Batching::Adaptive);
    fixed.map(|row| row.zero_loss_mpps).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::super::tests::ProgressRecorder;
    use super::super::{Parts, kind};
    use super::*;

    #[test]
    fn loads_are_shares_of_the_carried_rate_or_else_of_half_a_flood() {
        let row = |batching, zero_loss_mpps, flood_mpps| RateRow {
            interconnect: "lanes",
            frame_bytes: 64,
            batching,
            zero_loss_mpps,
            flood_mpps,
            packets_per_message: 1.0,
            rounds_zero_loss_mpps: vec![zero_loss_mpps],
        };
        let of = |zero_loss: [f64; 2]| {
            [
                row(Batching::Fixed(1), zero_loss[0], 2.0),
                row(Batching::Fixed(8), zero_loss[1], 6.0),
                row(Batching::Adaptive, 9.0, 9.0),
            ]
        };
        assert_eq!(full_load(&of([1.5, 5.0])), (5.0, None));
        let (mpps, remark) = full_load(&of([0.0, 0.0]));
        let expected = "lanes: no fixed batch carried 64 B without a loss; loads are shares of half of the best \
                    flood, 3.000 Mpps";
        assert_eq!((mpps, remark.as_deref()), (3.0, Some(expected)));
    }

    #[test]
    fn chosen_sizes_and_loads_replace_the_default_ones() {
        let usual = Scale::of(&Options::new(false, 1));
        assert_eq!((usual.load_sizes, usual.shares), (LOAD_FRAME_BYTES.to_vec(), LOADS.to_vec()));
        let (frame_bytes, load_shares) = (vec![1500, 512, 1500], vec![0.9, 0.5, 0.9]);
        let options = Options { frame_bytes, load_shares, ..Options::new(false, 1) };
        let scale = Scale::of(&options);
        assert_eq!((scale.load_sizes, scale.sizes, scale.shares), (vec![512, 1500], vec![512, 1500], vec![0.5, 0.9]));
    }

    #[test]
    fn each_part_is_measured_over_the_chosen_interconnect_and_reports_its_steps() {
        if let Err(error) = Cores::find() {
            println!("skipped: {error}");
            return;
        }
        let short = |ns: f64| Effort {
            trial: Span::from_ns(ns),
            warm_up: Span::ZERO,
            rounds: 1,
            rate_rounds: Rounds { all: 1, most: 2 },
            round_trips: 5,
            load_trial: Span::from_ns(ns),
            load_warm_up: Span::ZERO,
            load_rounds: Rounds { all: 1, most: 2 },
            size_rounds: Rounds::with_all(1),
            search_precision: 0.5,
        };
        let expected = [
            (Part::Interconnect, [true, true, false, false]),
            (Part::Latency, [false, true, true, true]),
            (Part::Adaptive, [false, true, true, false]),
            (Part::Fib, [false; 4]),
        ];
        for (part, has) in expected {
            let kind = Some(kind("lanes").expect("an interconnect"));
            let parts = Parts::only(&[part]);
            let options = Options { parts, kind, ..Options::new(true, 1) };
            let scale = Scale { effort: short(1e6), ..Scale::of(&options) };
            let (mut report, mut recorder) = (Report::new(&options), ProgressRecorder::default());
            measure(&options, &scale, &mut report, &mut recorder).expect("two nodes");
            let Report { hops, rates, loads, loads_by_size, .. } = &report;
            assert_eq!(
                [hops.is_empty(), rates.is_empty(), loads.is_empty(), loads_by_size.is_empty()],
                has.map(|has| !has)
            );
            assert_eq!(recorder.begun.len(), steps(&options, &scale), "{part}: {:?}", recorder.begun);
            assert!(recorder.begun.iter().all(|line| line.starts_with("lanes: ")), "{:?}", recorder.begun);
            let only_lanes = rates.iter().map(|row| row.interconnect).all(|name| name == "lanes");
            assert!(only_lanes && report.rnic_batch_gain_64b.is_none(), "{report:?}");
        }
    }
}
