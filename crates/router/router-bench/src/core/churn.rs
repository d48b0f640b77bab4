//! Forwarding on one core while another one changes routes. No packet may be lost, because every route leads to some
//! next hop at all times.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::router::port::memory::Destinations;
use serde::Serialize;
use sim::Random;

use super::router::Routes;
use super::{Error, Options, Router};
use crate::statistics::Rounds;

/// Rates of route changes: none; about what an Internet router sees in an ordinary second; what it sees in a bad
/// second; and as many as possible.
pub(super) const RATES_PER_S: [Option<f64>; 4] = [Some(0.0), Some(100.0), Some(10_000.0), None];

/// Forwarding while routes change.
#[derive(Clone, Debug, Serialize)]
pub struct Churn {
    /// Route changes a second.
    pub changes_per_s: f64,
    /// Millions of packets of 64 B forwarded a second during the changes.
    pub mpps: Rounds,
}

/// Forwards packets of 64 B while another thread changes `changes_per_s` routes a second, or as many as it can for
/// `None`.
///
/// # Errors
/// Fails if a packet was not forwarded or a route could not be changed.
pub fn churn(
    router: &mut Router,
    options: &Options,
    destinations: &Destinations,
    changes_per_s: Option<f64>,
) -> Result<Churn, Error> {
    let (mut traffic, routes) = router.traffic_and_routes(&[64], destinations.clone());
    let is_over = AtomicBool::new(false);
    let mut rates = Vec::with_capacity(options.rounds);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| change(routes, options.seed, changes_per_s, &is_over));
        let forwarded: Result<(), Error> = (0..options.rounds).try_for_each(|_| {
            let begin = Instant::now();
            traffic.forward(options.packets, &mut ())?;
            rates.push(options.packets as f64 / begin.elapsed().as_secs_f64() / 1e6);
            Ok(())
        });
        is_over.store(true, Ordering::Relaxed);
        let changed = changer.join().expect("the thread that changes routes does not panic");
        forwarded?;
        Ok(Churn { changes_per_s: changed?, mpps: Rounds::of_rates(rates) })
    })
}

/// Changes routes until `is_over` is set, and returns the changes a second.
fn change(routes: &mut Routes, seed: u64, changes_per_s: Option<f64>, is_over: &AtomicBool) -> Result<f64, Error> {
    let mut random = Random::new(seed, "changes");
    let begin = Instant::now();
    let mut changes = 0_u64;
    loop {
        let due = changes_per_s.map(|rate| (begin.elapsed().as_secs_f64() * rate) as u64);
        if due.is_some_and(|due| changes >= due) {
            std::thread::sleep(Duration::from_micros(100));
        } else {
            routes.change(&mut random)?;
            changes += 1;
        }
        if is_over.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(changes as f64 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_forwarded_while_routes_change() {
        let options = Options { rounds: 5, packets: 20_000, ..Options::quick() };
        let mut router = Router::new(3, 2_000, 10).expect("tables");
        let destinations = router.destinations_v4(1, 100);
        let quiet = churn(&mut router, &options, &destinations, Some(0.0)).expect("all are forwarded");
        assert_eq!(quiet.changes_per_s, 0.0);
        let busy = churn(&mut router, &options, &destinations, None).expect("all are forwarded");
        assert!(busy.changes_per_s > 0.0 && busy.mpps.best > 0.0, "{busy:?}");
    }
}
