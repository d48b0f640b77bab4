//! How busy a node is, and with it how many packets are worth a message.

use sim::Time;

use super::PACKETS_MAX;

/// How often it is decided anew: after so much time without interruptions.
const PERIOD_NS: f64 = 100_000.0;
/// A round that takes longer was interrupted: the rest of it says nothing of the work, nor of what time there is.
const ROUND_NS_MAX: f64 = 10_000.0;
/// The same of a round in which there was nothing to do: a node that has to ask the kernel at each port needs a few
/// microseconds.
const IDLE_ROUND_NS_MAX: f64 = 4000.0;
/// One of so many counts for what such a round takes.
const IDLE_ROUNDS: f64 = 64.0;
/// One of so many periods counts for the share of the time that a node works: packets come at random.
const PERIODS: f64 = 2.0;
/// Beyond this share of the time, more packets go together. See the policies in virtual time, which say what these are
/// worth.
const GROWS_ABOVE: f64 = 0.8;
const GROWS_BY: f64 = 1.25;
/// Below this share, fewer, but slowly: a machine that was slow for a millisecond soon is again, and each time small
/// messages would pile up first.
const SHRINKS_BELOW: f64 = 0.7;
const SHRINKS_BY: f64 = 0.98;
/// Below this share they are fewer soon: the load is another one.
const SHRINKS_SOON_BELOW: f64 = 0.4;
const SHRINKS_SOON_BY: f64 = 0.9;
/// A node that finds something to do in rounds of this share of the time has no time left.
const SATURATED_ABOVE: f64 = 0.97;
const SATURATED_GROWS_BY: f64 = 2.0;

/// What share of the time a node works, from round to round of its loop.
///
/// Who sends whatever is there is never idle, and neither is who receives it: the less time passes between two rounds,
/// the fewer packets go together, each message at its full price. Up to three quarters of the time that costs nothing.
/// Beyond, there is little time left in which to make up for an interruption, and the messages that pile up meanwhile
/// are small. So the busier a node is, the more packets are worth a message.
///
/// What a round takes when there is nothing to do is no work: the busier a node, the more it does in a round. Else one
/// that looks at many places would think itself busy at half of what it can carry. A node that finds something in
/// nearly every round is busy whatever that share is, and many packets wait for each of its rounds anyhow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    looked: Time,
    /// What a round takes in which there is nothing to do.
    idle_round_ns: f64,
    period: Period,
    share: f64,
    least_packets: f64,
}

/// What a node did since it was decided last.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Period {
    has_slept: bool,
    /// All time, but for what interruptions took.
    passed_ns: f64,
    /// Of that, rounds in which there was something to do.
    busy_ns: f64,
    /// Of those, what they took beyond a round with nothing to do.
    worked_ns: f64,
}

impl Period {
    const NEW: Period = Period { has_slept: false, passed_ns: 0.0, busy_ns: 0.0, worked_ns: 0.0 };
}

impl Occupancy {
    /// Of a node that begins, idle.
    pub const fn new() -> Occupancy {
        Occupancy { looked: Time::ZERO, idle_round_ns: 0.0, period: Period::NEW, share: 0.0, least_packets: 1.0 }
    }

    /// Fewer packets are not worth a message: 1 to [`PACKETS_MAX`].
    pub fn least_packets(&self) -> usize {
        self.least_packets as usize
    }

    /// The node slept, for there was nothing to do.
    pub fn note_sleep(&mut self) {
        self.period.has_slept = true;
    }

    /// A round of the node's loop begins; whether there was something to do in the one that ends.
    pub fn begin_round(&mut self, now: Time, was_busy: bool) {
        let round_ns = now.since(self.looked).ns();
        self.looked = now;
        if was_busy {
            self.note_work(round_ns.min(ROUND_NS_MAX));
        } else if self.period.has_slept {
            self.period.passed_ns += round_ns;
        } else {
            self.note_idle_round(round_ns.min(IDLE_ROUND_NS_MAX));
        }
        if self.period.passed_ns >= PERIOD_NS {
            self.decide();
        }
    }

    fn note_work(&mut self, round_ns: f64) {
        self.period.passed_ns += round_ns;
        self.period.busy_ns += round_ns;
        self.period.worked_ns += (round_ns - self.idle_round_ns).max(0.0);
    }

    fn note_idle_round(&mut self, round_ns: f64) {
        self.period.passed_ns += round_ns;
        self.idle_round_ns += (round_ns - self.idle_round_ns) / IDLE_ROUNDS;
    }

    fn decide(&mut self) {
        let Period { has_slept, passed_ns, busy_ns, worked_ns } = std::mem::replace(&mut self.period, Period::NEW);
        let periods = if has_slept { passed_ns / PERIOD_NS } else { 1.0 };
        let forgotten = 1.0 - (1.0 - 1.0 / PERIODS).powf(periods);
        self.share += (worked_ns / passed_ns - self.share) * forgotten;
        let factor = if busy_ns > SATURATED_ABOVE * passed_ns {
            SATURATED_GROWS_BY
        } else if self.share > GROWS_ABOVE {
            GROWS_BY
        } else if self.share < SHRINKS_SOON_BELOW {
            SHRINKS_SOON_BY.powf(periods)
        } else if self.share < SHRINKS_BELOW {
            SHRINKS_BY.powf(periods)
        } else {
            1.0
        };
        self.least_packets = (self.least_packets * factor).clamp(1.0, PACKETS_MAX as f64);
    }
}

impl Default for Occupancy {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use sim::Span;

    use super::*;

    /// Rounds of 1 us, of which so many of a hundred have something to do; in the others 20 looks find nothing.
    fn run(occupancy: &mut Occupancy, now: &mut Time, rounds: u64, of_hundred: u64) {
        for round in 0..rounds {
            let is_busy = round * 37 % 100 < of_hundred;
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
        let mut after = |rounds, of_hundred| {
            run(&mut occupancy, &mut now, rounds, of_hundred);
            occupancy.least_packets()
        };
        assert_eq!(after(1000, 70), 1, "what is not nearly busy sends what is there");
        assert_eq!(after(1000, 95), 7, "ten decisions, of which the first takes another one like it");
        assert_eq!(after(1000, 95), PACKETS_MAX);
        assert_eq!(after(1000, 80), PACKETS_MAX, "neither busy nor idle: as it was");
        assert_eq!(after(1000, 60), 26, "that may have been a moment");
        assert_eq!(after(4000, 20), 1, "and that is another load");
    }

    #[test]
    fn who_finds_something_in_every_round_has_no_time_left_whatever_its_rounds_take() {
        let (mut occupancy, mut now) = (Occupancy::new(), Time::ZERO);
        run(&mut occupancy, &mut now, 1000, 0);
        // A round with nothing to do takes 50 ns, one with something twice that: half the time is work.
        for _ in 0..6000 {
            now += Span::from_ps(100_000);
            occupancy.begin_round(now, true);
        }
        assert_eq!(occupancy.least_packets(), PACKETS_MAX, "five decisions and one");
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
        for (sleeps, left) in [(true, 1), (false, PACKETS_MAX)] {
            let (mut occupancy, mut now) = (Occupancy::new(), Time::ZERO);
            run(&mut occupancy, &mut now, 3000, 95);
            assert_eq!(occupancy.least_packets(), PACKETS_MAX);
            if sleeps {
                occupancy.note_sleep();
            }
            now += Span::from_ps(5_000_000_000);
            occupancy.begin_round(now, false);
            assert_eq!(occupancy.least_packets(), left);
        }
    }

    #[test]
    fn an_interruption_is_neither_work_nor_time() {
        for (interrupts_busy, of_hundred, least) in [(true, 50, 1), (false, 50, 1), (false, 95, PACKETS_MAX)] {
            let (mut occupancy, mut now) = (Occupancy::new(), Time::ZERO);
            for _ in 0..100 {
                // Every 100 us, for 30.
                run(&mut occupancy, &mut now, 70, of_hundred);
                now += Span::from_ps(30_000_000);
                occupancy.begin_round(now, interrupts_busy);
            }
            assert_eq!(occupancy.least_packets(), least, "{interrupts_busy} {of_hundred}");
        }
    }
}
