//! How busy a node is, and with it how many packets are worth a message.

use sim::{Span, Time};

use super::PACKETS_MAX;

/// How often it is decided anew.
const PERIOD: Span = Span::from_ps(100_000_000);
/// A round that takes longer was interrupted: the rest of it says nothing of the work.
const ROUND_MAX: Span = Span::from_ps(20_000_000);
/// A round in which there was nothing to do takes no longer: what does was interrupted.
const IDLE_ROUND_NS_MAX: f64 = 1000.0;
/// One of so many counts for what such a round takes.
const IDLE_ROUNDS: f64 = 16.0;
/// Beyond this share of the time, more packets go together.
const GROWS_ABOVE: f64 = 0.8;
const GROWS_BY: f64 = 1.25;
/// Below this share, fewer. In steps that small what has just shrunk does not grow again at once: see the policies in
/// virtual time, which say what these four are worth.
const SHRINKS_BELOW: f64 = 0.7;
const SHRINKS_BY: f64 = 0.9;

/// What share of the time a node works, from round to round of its loop.
///
/// Who sends whatever is there is never idle, and neither is who receives it: the less time passes between two rounds,
/// the fewer packets go together, each message at its full price. Up to three quarters of the time that costs nothing.
/// Beyond, there is no time left in which to make up for an interruption, and the messages that pile up meanwhile are
/// small. So the busier a node is, the more packets are worth a message.
///
/// What a round takes when there is nothing to do is no work: the busier a node, the more it does in a round. Else one
/// that looks at many places would think itself busy at half of what it can carry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    looked: Time,
    has_slept: bool,
    /// What a round takes in which there is nothing to do.
    idle_round_ns: f64,
    since: Time,
    worked_ns: f64,
    least_packets: f64,
}

impl Occupancy {
    /// Of a node that begins, idle.
    pub const fn new() -> Occupancy {
        Occupancy {
            looked: Time::ZERO,
            has_slept: false,
            idle_round_ns: 0.0,
            since: Time::ZERO,
            worked_ns: 0.0,
            least_packets: 1.0,
        }
    }

    /// Fewer packets are not worth a message: 1 to [`PACKETS_MAX`].
    pub fn least_packets(&self) -> usize {
        self.least_packets as usize
    }

    /// The node slept, for there was nothing to do.
    pub fn note_sleep(&mut self) {
        self.has_slept = true;
    }

    /// A round of the node's loop begins; whether there was something to do in the one that ends.
    pub fn begin_round(&mut self, now: Time, was_busy: bool) {
        let round_ns = now.since(self.looked).min(ROUND_MAX).ns();
        if was_busy {
            self.worked_ns += (round_ns - self.idle_round_ns).max(0.0);
        } else if !self.has_slept {
            self.idle_round_ns += (round_ns.min(IDLE_ROUND_NS_MAX) - self.idle_round_ns) / IDLE_ROUNDS;
        }
        self.looked = now;
        let period = now.since(self.since);
        if period >= PERIOD {
            // A node that was not let run for so long had no less to do than before; one that slept had.
            let periods = if self.has_slept { period.ns() / PERIOD.ns() } else { 1.0 };
            self.decide(self.worked_ns / period.ns(), periods);
            (self.since, self.worked_ns, self.has_slept) = (now, 0.0, false);
        }
    }

    fn decide(&mut self, share: f64, periods: f64) {
        if share > GROWS_ABOVE {
            self.least_packets = (self.least_packets * GROWS_BY).min(PACKETS_MAX as f64);
        } else if share < SHRINKS_BELOW {
            self.least_packets = (self.least_packets * SHRINKS_BY.powf(periods)).max(1.0);
        }
    }
}

impl Default for Occupancy {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of 1 us, of which so many of ten have something to do; in the others 20 looks find nothing.
    fn run(occupancy: &mut Occupancy, now: &mut Time, rounds: u64, of_ten: u64) {
        for round in 0..rounds {
            let is_busy = round % 10 < of_ten;
            let looks = if is_busy { 1 } else { 20 };
            for _ in 0..looks {
                *now += Span::from_ps(1_000_000 / looks);
                occupancy.begin_round(*now, is_busy);
            }
        }
    }

    #[test]
    fn the_busier_a_node_the_more_packets_are_worth_a_message() {
        let (mut occupancy, mut now) = (Occupancy::new(), Time::ZERO);
        let mut after = |rounds, of_ten| {
            run(&mut occupancy, &mut now, rounds, of_ten);
            occupancy.least_packets()
        };
        assert_eq!(after(1000, 7), 1, "what is not nearly busy sends what is there");
        assert_eq!(after(1000, 9), 9, "ten decisions");
        assert_eq!(after(1000, 10), PACKETS_MAX);
        assert_eq!(after(1000, 8), PACKETS_MAX, "neither busy nor idle: as it was");
        assert_eq!(after(4000, 7), 1);
    }

    #[test]
    fn what_a_round_takes_with_nothing_to_do_is_no_work() {
        // Nine of ten rounds find something, which takes a fifth more: a loop that looks at much, with little to do.
        let (mut occupancy, mut now) = (Occupancy::new(), Time::ZERO);
        for round in 0..10_000 {
            let is_busy = round % 10 != 0;
            now += Span::from_ps(if is_busy { 600_000 } else { 500_000 });
            occupancy.begin_round(now, is_busy);
        }
        assert_eq!(occupancy.least_packets(), 1);
    }

    #[test]
    fn who_wakes_after_long_forgets_that_it_was_busy_and_who_was_held_up_does_not() {
        for (sleeps, left) in [(true, 1), (false, 28)] {
            let (mut occupancy, mut now) = (Occupancy::new(), Time::ZERO);
            run(&mut occupancy, &mut now, 3000, 10);
            assert_eq!(occupancy.least_packets(), PACKETS_MAX);
            if sleeps {
                occupancy.note_sleep();
            }
            run(&mut occupancy, &mut now, 1, 0);
            now += Span::from_ps(5_000_000_000);
            run(&mut occupancy, &mut now, 1, 10);
            assert_eq!(occupancy.least_packets(), left);
        }
    }

    #[test]
    fn an_interrupted_round_and_a_sleep_are_no_work() {
        let mut occupancy = Occupancy::new();
        for round in 1..100 {
            occupancy.begin_round(Time::from_ps(round * 90_000_000), true);
        }
        assert_eq!(occupancy.least_packets(), 1, "20 us of each 90 count");
        for round in 100..200 {
            occupancy.begin_round(Time::from_ps(round * 90_000_000), false);
        }
        assert_eq!(occupancy.least_packets(), 1);
    }
}
