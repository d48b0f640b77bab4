//! How busy a node is, and with it how many packets are worth a message.

use sim::Time;

use super::lengths::{FULL_BYTES, Lengths};
use super::{Carried, Limit, PACKETS_MAX};

/// How often it is decided anew: after so much time without interruptions.
const PERIOD_NS: f64 = 100_000.0;
/// A round that takes longer was interrupted: the rest of it says nothing of the work, nor of what time there is.
const ROUND_NS_MAX: f64 = 10_000.0;
/// But where rounds with something to do take long, as where each message or port is a system call, only one that takes
/// more than so many times what those do was.
const ROUNDS_MAX: f64 = 4.0;
/// One of so many counts for that: a message may have eight times the bytes of those before.
const BUSY_ROUNDS: f64 = 16.0;
/// The same of a round in which there was nothing to do: a node that has to ask the kernel at each port needs a few
/// microseconds.
const IDLE_ROUND_NS_MAX: f64 = 4000.0;
/// One of so many counts for what such a round takes.
const IDLE_ROUNDS: f64 = 64.0;
/// One of so many periods counts for what a node does: packets come at random.
const PERIODS: f64 = 8.0;
/// A node is to work for this share of the time at most: what is left makes up for interruptions.
pub(super) const WORKS_AT_MOST: f64 = 0.8;
/// What a message costs, besides its packets, and what those and their bytes do: nanoseconds, as between two cores of
/// one server. Only their proportion counts, and not much: messages three times as dear, or a third, change nothing
/// that the policies in virtual time show.
const MESSAGE_NS: f64 = 280.0;
const PACKET_NS: f64 = 15.0;
const BYTE_NS: f64 = 0.13;

/// What share of the time a node works, from round to round of its loop, and on what messages.
///
/// Who sends whatever is there is never idle, and neither is who receives it: the less time passes between two rounds,
/// the fewer packets go together, each message at its full price. Up to three quarters of the time that costs nothing.
/// Beyond, there is little time left in which to make up for an interruption, and the messages that pile up meanwhile
/// are small. So as many packets are worth a message as leave the node idle for a fifth of the time.
///
/// What a round takes when there is nothing to do is no work: the busier a node, the more it does in a round. Else one
/// that looks at many places would think itself busy at half of what it can carry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    looked: Time,
    /// What a round takes in which there is nothing to do.
    idle_round_ns: f64,
    /// The same where there is, but for interruptions.
    busy_round_ns: f64,
    has_slept: bool,
    /// Since it was decided last.
    period: Work,
    /// As much as one period has of it, lately.
    recent: Work,
    least_packets: f64,
    /// Where long messages need not be cheaper.
    lengths: Option<Lengths>,
}

/// What a node did in some time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Work {
    /// All time, but for what interruptions took.
    passed_ns: f64,
    /// Of that, what rounds in which there was something to do took beyond one with nothing to do.
    worked_ns: f64,
    /// Sent and taken in.
    messages: f64,
    packets: f64,
    bytes: f64,
}

impl Work {
    const NONE: Work = Work { passed_ns: 0.0, worked_ns: 0.0, messages: 0.0, packets: 0.0, bytes: 0.0 };

    fn with(self, other: Work, both: impl Fn(f64, f64) -> f64) -> Work {
        Work {
            passed_ns: both(self.passed_ns, other.passed_ns),
            worked_ns: both(self.worked_ns, other.worked_ns),
            messages: both(self.messages, other.messages),
            packets: both(self.packets, other.packets),
            bytes: both(self.bytes, other.bytes),
        }
    }

    /// The same, as far as a message holds as many: where only more than a full one would do, [`PACKETS_MAX`].
    fn least_packets(&self) -> f64 {
        let wanted = self.packets_wanted();
        let is_beyond_full = wanted * self.bytes > FULL_BYTES as f64 * self.packets;
        if is_beyond_full { PACKETS_MAX as f64 } else { wanted.clamp(1.0, PACKETS_MAX as f64) }
    }

    /// How many packets a message is to have so that this load is carried in [`WORKS_AT_MOST`] of the time.
    ///
    /// Where a message costs as much as `r` packets, and has `k` of them, the packets alone take `f = s / (1 + r / k)`
    /// of the time, of which `s` is work. With `n` a message it is `f (1 + r / n)`.
    fn packets_wanted(&self) -> f64 {
        if self.messages == 0.0 || self.packets == 0.0 {
            return 1.0;
        }
        let message_packets = MESSAGE_NS / (PACKET_NS + BYTE_NS * self.bytes / self.packets);
        let share = self.worked_ns / self.passed_ns;
        let by_packets = share / (1.0 + message_packets * self.messages / self.packets);
        if by_packets < WORKS_AT_MOST { message_packets / (WORKS_AT_MOST / by_packets - 1.0) } else { f64::INFINITY }
    }
}

impl Occupancy {
    /// Of a node that begins, idle, whose messages are carried so.
    pub const fn new(carried: Carried) -> Occupancy {
        Occupancy {
            looked: Time::ZERO,
            idle_round_ns: 0.0,
            busy_round_ns: 0.0,
            has_slept: false,
            period: Work::NONE,
            recent: Work::NONE,
            least_packets: 1.0,
            lengths: match carried {
                Carried::ByCopies => Some(Lengths::new()),
                Carried::BySystemCalls => None,
            },
        }
    }

    /// Fewer packets are not worth a message: 1 to [`PACKETS_MAX`], which says that none but full ones are.
    pub fn least_packets(&self) -> usize {
        self.least_packets as usize
    }

    /// How long a message may be where so many packets are worth one to the busier of two nodes.
    pub fn limit(&mut self, least_packets: usize) -> Limit {
        let (has_time, is_full_only) = (self.has_time(), least_packets >= PACKETS_MAX);
        self.lengths.as_mut().map_or(Limit::FULL, |lengths| lengths.limit(has_time, is_full_only))
    }

    /// For more than full messages.
    fn has_time(&self) -> bool {
        self.least_packets() < PACKETS_MAX
    }

    /// The node slept, for there was nothing to do.
    pub fn note_sleep(&mut self) {
        self.has_slept = true;
    }

    /// The node took in a message of so many packets, with so many bytes all together.
    pub fn note_received(&mut self, packets: usize, bytes: usize) {
        self.note_message(packets, bytes);
    }

    /// It sent one.
    pub fn note_sent(&mut self, packets: usize, bytes: usize) {
        self.note_message(packets, bytes);
        if let Some(lengths) = &mut self.lengths {
            lengths.note_sent(bytes);
        }
    }

    fn note_message(&mut self, packets: usize, bytes: usize) {
        self.period.messages += 1.0;
        self.period.packets += packets as f64;
        self.period.bytes += bytes as f64;
        if let Some(lengths) = &mut self.lengths {
            lengths.note_message(bytes);
        }
    }

    /// A round of the node's loop begins; whether there was something to do in the one that ends.
    pub fn begin_round(&mut self, now: Time, was_busy: bool) {
        let round_ns = now.since(self.looked).ns();
        self.looked = now;
        let worked_ns = if was_busy { self.work_of(round_ns) } else { 0.0 };
        let has_time = self.has_time();
        if let Some(lengths) = &mut self.lengths {
            lengths.end_round(round_ns, worked_ns, has_time);
        }
        if was_busy {
            self.note_busy_round(round_ns.min(ROUND_NS_MAX.max(ROUNDS_MAX * self.busy_round_ns)));
        } else if self.has_slept {
            self.period.passed_ns += round_ns;
        } else {
            self.note_idle_round(round_ns.min(IDLE_ROUND_NS_MAX));
        }
        if self.period.passed_ns >= PERIOD_NS {
            self.decide();
        }
    }

    fn note_busy_round(&mut self, round_ns: f64) {
        self.period.passed_ns += round_ns;
        self.period.worked_ns += self.work_of(round_ns);
        self.busy_round_ns += (round_ns - self.busy_round_ns) / BUSY_ROUNDS;
    }

    /// What of a round is work, if there was something to do in it.
    fn work_of(&self, round_ns: f64) -> f64 {
        (round_ns - self.idle_round_ns).max(0.0)
    }

    fn note_idle_round(&mut self, round_ns: f64) {
        self.period.passed_ns += round_ns;
        self.idle_round_ns += (round_ns - self.idle_round_ns) / IDLE_ROUNDS;
    }

    fn decide(&mut self) {
        let period = std::mem::replace(&mut self.period, Work::NONE);
        // Who slept for long forgets what was before, as in many periods; but what comes now counts as it did.
        let periods = if std::mem::take(&mut self.has_slept) { period.passed_ns / PERIOD_NS } else { 1.0 };
        let kept = (1.0 - 1.0 / PERIODS).powf(periods);
        self.recent = self.recent.with(period, |recent, period| recent * kept + period / periods * (1.0 - kept));
        self.least_packets = self.recent.least_packets();
    }
}

#[cfg(test)]
mod tests {
    use sim::Span;

    use super::*;

    /// Each message has so many packets of 46 bytes: one costs as much as 13 of those.
    const BYTES: usize = 46;

    /// Rounds of 1 us, of which so many of a hundred have something to do, a message; in the others 20 looks find
    /// nothing.
    fn run(occupancy: &mut Occupancy, now: &mut Time, rounds: u64, of_hundred: u64, packets: usize) {
        for round in 0..rounds {
            let is_busy = round * 37 % 100 < of_hundred;
            let looks = if is_busy { 1 } else { 20 };
            for _ in 0..looks {
                *now += Span::from_ps(1_000_000 / looks);
                occupancy.begin_round(*now, is_busy);
            }
            if is_busy {
                occupancy.note_received(packets, packets * BYTES);
            }
        }
    }

    fn least_after(of_hundred: u64, packets: usize) -> usize {
        let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
        run(&mut occupancy, &mut now, 2000, 0, 1);
        run(&mut occupancy, &mut now, 10_000, of_hundred, packets);
        occupancy.least_packets()
    }

    #[test]
    fn as_many_packets_are_worth_a_message_as_leave_a_fifth_of_the_time() {
        // 5% of a busy round are what one takes with nothing to do, so of 80% of the time 76 are work.
        assert_eq!([20, 60, 80].map(|of_hundred| least_after(of_hundred, 1)), [1, 1, 1], "there is time enough");
        assert_eq!(least_after(80, 20), 17, "as many as there are, nearly: fewer would leave less");
        assert_eq!(least_after(95, 10), 12, "0.90 = f (1 + 13.3 / 10), and 0.8 = f (1 + 13.3 / 12.4)");
        assert_eq!(least_after(95, 32), 52, "0.90 = f (1 + 13.3 / 32), and 0.8 = f (1 + 13.3 / 51.7)");
        assert_eq!(least_after(100, 40), PACKETS_MAX, "0.95 = f (1 + 13.3 / 40): no message is long enough");
    }

    #[test]
    fn where_more_bytes_than_a_full_message_has_would_be_worth_one_none_but_full_ones_are() {
        // One costs as much as 1.33 packets of 1500 B: 0.8 / 0.769 is 1 + 1.33 / 33, 0.8 / 0.768 is 1 + 1.33 / 31.8.
        for (by_packets, least) in [(0.760, 25), (0.768, 31), (0.769, PACKETS_MAX), (0.9, PACKETS_MAX)] {
            let worked_ns = by_packets * (1.0 + 280.0 / 210.0 / 8.0);
            let work = Work { passed_ns: 1.0, worked_ns, messages: 1.0, packets: 8.0, bytes: 12_000.0 };
            assert_eq!(work.least_packets() as usize, least, "{by_packets} of the time are packets");
        }
        assert_eq!((Work { passed_ns: 1.0, ..Work::NONE }).least_packets(), 1.0, "nothing to do");
    }

    #[test]
    fn who_works_all_the_time_soon_sends_none_but_full_messages() {
        let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
        for _ in 0..40 {
            // Packets pile up, so there is always one more than are worth a message.
            let packets = occupancy.least_packets() + 1;
            run(&mut occupancy, &mut now, 100, 100, packets);
        }
        assert_eq!(occupancy.least_packets(), PACKETS_MAX, "after 4 ms");
    }

    #[test]
    fn who_has_less_to_do_sends_shorter_messages_again() {
        let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
        run(&mut occupancy, &mut now, 5000, 95, 50);
        assert_eq!(occupancy.least_packets(), PACKETS_MAX);
        run(&mut occupancy, &mut now, 5000, 40, 4);
        assert_eq!(occupancy.least_packets(), 1);
        run(&mut occupancy, &mut now, 5000, 95, 50);
        run(&mut occupancy, &mut now, 3000, 0, 1);
        assert_eq!(occupancy.least_packets(), 1, "nothing to do any more");
    }

    #[test]
    fn what_a_round_takes_with_nothing_to_do_is_no_work() {
        // Nine of ten rounds find something, which takes a fifth more: a loop that looks at much, with little to do.
        let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
        for round in 0..10_000 {
            let is_busy = round % 10 != 0;
            now += Span::from_ps(if is_busy { 600_000 } else { 500_000 });
            occupancy.begin_round(now, is_busy);
            occupancy.note_received(8, 8 * BYTES);
        }
        assert_eq!(occupancy.least_packets(), 1);
    }

    #[test]
    fn who_wakes_after_long_forgets_that_it_was_busy_and_who_was_held_up_does_not() {
        for (sleeps, left) in [(true, 1), (false, 46)] {
            let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
            run(&mut occupancy, &mut now, 3000, 95, 50);
            assert_eq!(occupancy.least_packets(), PACKETS_MAX);
            if sleeps {
                occupancy.note_sleep();
            }
            now += Span::from_ps(5_000_000_000);
            occupancy.begin_round(now, false);
            run(&mut occupancy, &mut now, 100, 0, 1);
            assert_eq!(occupancy.least_packets(), left);
            run(&mut occupancy, &mut now, 3000, 95, 50);
            assert_eq!(occupancy.least_packets(), PACKETS_MAX, "a long sleep weighs no more than a period");
        }
    }

    #[test]
    fn where_each_round_takes_long_all_of_it_is_work() {
        // A look at ports that are system calls takes 4 us, a round with something to do 60.
        let busy_of = |hundred: u64| {
            let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
            for round in 0..10_000 {
                let is_busy = round * 37 % 100 < hundred;
                now += Span::from_ps(if is_busy { 60_000_000 } else { 4_000_000 });
                occupancy.begin_round(now, is_busy);
                if is_busy {
                    occupancy.note_received(50, 50 * BYTES);
                }
            }
            occupancy.least_packets()
        };
        assert_eq!([3, 20, 90].map(busy_of), [5, 36, PACKETS_MAX]);
    }

    #[test]
    fn where_messages_are_system_calls_short_ones_are_not_even_tried() {
        let mut occupancy = Occupancy::new(Carried::BySystemCalls);
        let mut now = Time::ZERO;
        for round in 0..10_000 {
            now += Span::from_ps(60_000_000);
            assert_eq!(occupancy.limit(1 + round % PACKETS_MAX), Limit::FULL);
            occupancy.begin_round(now, true);
            occupancy.note_sent(8, 12_000);
        }
        assert_eq!(Occupancy::new(Carried::ByCopies).limit(1), Lengths::new().limit(true, false));
    }

    #[test]
    fn an_interruption_is_neither_work_nor_time() {
        let cases = [(true, 50, 1, 1), (false, 50, 1, 1), (false, 95, 64, PACKETS_MAX)];
        for (interrupts_busy, of_hundred, packets, least) in cases {
            let (mut occupancy, mut now) = (Occupancy::new(Carried::ByCopies), Time::ZERO);
            for _ in 0..100 {
                // Every 100 us, for 30.
                run(&mut occupancy, &mut now, 70, of_hundred, packets);
                now += Span::from_ps(30_000_000);
                occupancy.begin_round(now, interrupts_busy);
            }
            assert_eq!(occupancy.least_packets(), least, "{interrupts_busy} {of_hundred}");
        }
    }
}
