//! How busy a node is, and with it how many packets are worth a message.

use sim::{Span, Time};

use super::PACKETS_MAX;

/// How often it is decided anew.
const PERIOD: Span = Span::from_ps(100_000_000);
/// A round that takes longer was interrupted: the rest of it says nothing of the work.
const ROUND_MAX: Span = Span::from_ps(20_000_000);
/// Beyond this share of the time, more packets go together.
const GROWS_ABOVE: f64 = 0.85;
const GROWS_BY: f64 = 1.25;
/// Below this share, fewer. In steps that small what has just shrunk does not grow again at once: see the policies in
/// virtual time, which say what these four are worth.
const SHRINKS_BELOW: f64 = 0.75;
const SHRINKS_BY: f64 = 0.9;

/// What share of the time a node works, from round to round of its loop.
///
/// Who sends whatever is there is never idle, and neither is who receives it: the less time passes between two rounds,
/// the fewer packets go together, each message at its full price. Up to four fifths of the time that costs nothing.
/// Beyond, there is no time left in which to make up for an interruption, and the messages that pile up meanwhile are
/// small. So the busier a node is, the more packets are worth a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    looked: Time,
    has_worked: bool,
    since: Time,
    worked: Span,
    least_packets: f64,
}

impl Occupancy {
    /// Of a node that begins, idle.
    pub const fn new() -> Occupancy {
        Occupancy { looked: Time::ZERO, has_worked: false, since: Time::ZERO, worked: Span::ZERO, least_packets: 1.0 }
    }

    /// Fewer packets are not worth a message: 1 to [`PACKETS_MAX`].
    pub fn least_packets(&self) -> usize {
        self.least_packets as usize
    }

    /// There is something to do in the round that begins now, or has begun.
    pub fn note_work(&mut self, now: Time) {
        self.begin_round(now);
        self.has_worked = true;
    }

    /// A round begins, unless it has: who sends first and takes its turn then does both at one time, in one round.
    pub fn begin_round(&mut self, now: Time) {
        if now == self.looked {
            return;
        }
        if self.has_worked {
            self.worked += now.since(self.looked).min(ROUND_MAX);
        }
        (self.looked, self.has_worked) = (now, false);
        let period = now.since(self.since);
        if period >= PERIOD {
            self.decide(self.worked.ns() / period.ns());
            (self.since, self.worked) = (now, Span::ZERO);
        }
    }

    fn decide(&mut self, share: f64) {
        if share > GROWS_ABOVE {
            self.least_packets = (self.least_packets * GROWS_BY).min(PACKETS_MAX as f64);
        } else if share < SHRINKS_BELOW {
            self.least_packets = (self.least_packets * SHRINKS_BY).max(1.0);
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

    /// Rounds of 1 us, of which so many of ten have something to do.
    fn run(occupancy: &mut Occupancy, now_us: &mut u64, rounds: u64, of_ten: u64) {
        for round in 0..rounds {
            occupancy.begin_round(Time::from_ps(*now_us * 1_000_000));
            if round % 10 < of_ten {
                occupancy.note_work(Time::from_ps(*now_us * 1_000_000));
            }
            *now_us += 1;
        }
    }

    #[test]
    fn the_busier_a_node_the_more_packets_are_worth_a_message() {
        let (mut occupancy, mut now_us) = (Occupancy::new(), 0);
        let mut after = |rounds, of_ten| {
            run(&mut occupancy, &mut now_us, rounds, of_ten);
            occupancy.least_packets()
        };
        assert_eq!(after(1000, 7), 1, "what is not nearly busy sends what is there");
        assert_eq!(after(1000, 9), 7, "nine decisions");
        assert_eq!(after(1000, 10), PACKETS_MAX);
        assert_eq!(after(1000, 8), PACKETS_MAX, "neither busy nor idle: as it was");
        assert_eq!(after(4000, 7), 1);
    }

    #[test]
    fn work_belongs_to_the_round_that_it_begins() {
        // A long message is sent before the turn in every other round: nine tenths of the time.
        let (mut occupancy, mut now_ns) = (Occupancy::new(), 0);
        let at = |ns: u64| Time::from_ps(ns * 1000);
        for _ in 0..2000 {
            occupancy.note_work(at(now_ns));
            occupancy.begin_round(at(now_ns));
            occupancy.begin_round(at(now_ns + 900));
            now_ns += 1000;
        }
        assert_eq!(occupancy.least_packets(), PACKETS_MAX);
    }

    #[test]
    fn an_interrupted_round_and_a_sleep_are_no_work() {
        let mut occupancy = Occupancy::new();
        for round in 0..100 {
            occupancy.begin_round(Time::from_ps(round * 90_000_000));
            occupancy.note_work(Time::from_ps(round * 90_000_000));
        }
        assert_eq!(occupancy.least_packets(), 1, "20 us of each 90 count");
        for round in 100..200 {
            occupancy.begin_round(Time::from_ps(round * 90_000_000));
        }
        assert_eq!(occupancy.least_packets(), 1);
    }
}
