//! Parallel runs of many simulations.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs a simulation for each point on up to `threads` threads, and returns the results in the order of the points.
/// `progress` is called after each run with the number of finished runs.
///
/// A point is everything that a run depends on, such as a parameter and a seed. Points with long runs should come
/// first, so that all threads stay busy to the end.
///
/// # Panics
/// If a run panics.
pub fn sweep<Point: Sync, Outcome: Send>(
    points: &[Point],
    threads: usize,
    run: impl Fn(&Point) -> Outcome + Sync,
    progress: impl Fn(usize) + Sync,
) -> Vec<Outcome> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let outcomes: Vec<Mutex<Option<Outcome>>> = points.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(point) = points.get(index) else { return };
            let outcome = run(point);
            if let Ok(mut slot) = outcomes[index].lock() {
                *slot = Some(outcome);
            }
            progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..threads.clamp(1, points.len().max(1))).map(|_| scope.spawn(work)).collect();
        work();
        for worker in workers {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    // Every panic was propagated above, so every slot is filled.
    outcomes.into_iter().filter_map(|slot| slot.into_inner().ok().flatten()).collect()
}

/// Returns every combination of a point and a seed; the seed varies fastest.
pub fn with_seeds<Point: Clone>(points: &[Point], seeds: &[u64]) -> Vec<(Point, u64)> {
    points.iter().flat_map(|point| seeds.iter().map(|seed| (point.clone(), *seed))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;

    #[test]
    fn outcomes_are_in_the_points_order_for_any_number_of_threads() {
        let points = with_seeds(&[10_u64, 20, 30], &[1, 2, 3, 4]);
        let run = |(point, seed): &(u64, u64)| Random::new(*seed, "sweep").below(1000) + point;
        let expected: Vec<u64> = points.iter().map(run).collect();
        for threads in [0, 1, 2, 7, 100] {
            let counts = Mutex::new(Vec::new());
            let outcomes = sweep(&points, threads, run, |done| counts.lock().unwrap().push(done));
            assert_eq!(outcomes, expected);
            let mut counts = counts.into_inner().unwrap();
            counts.sort_unstable();
            assert_eq!(counts, (1..=points.len()).collect::<Vec<_>>());
        }
        assert!(sweep(&[], 3, run, |_| ()).is_empty());
    }

    #[test]
    #[should_panic(expected = "run 3 failed")]
    fn a_run_that_panics_is_not_lost() {
        sweep(&[1, 2, 3, 4], 2, |point| assert!(*point != 3, "run {point} failed"), |_| ());
    }
}
