//! The load of a node, which determines its batch size.

use sim::Time;

use super::lengths::{Lengths, MessageTransfer};
use super::limits::{MESSAGE_BYTES_MAX, PACKETS_MAX, PERIOD_NS, PERIODS_AVERAGED, WORK_SHARE_MAX};

/// Maximum duration of a loop iteration; a longer one was interrupted, and its excess counts neither as work nor as
/// time.
const ITERATION_NS_MAX: f64 = 10_000.0;
/// Ratio to the mean of busy iterations above which one was interrupted, where iterations are long, for instance
/// because each message or port is a system call.
const ITERATION_RATIO_MAX: f64 = 4.0;
/// Maximum duration of an idle iteration; a node that makes a system call for each port needs a few microseconds.
const IDLE_ITERATION_NS_MAX: f64 = 4000.0;
/// Number of idle or busy iterations over which their mean duration is taken.
const ITERATIONS_AVERAGED: f64 = 64.0;
/// Cost of a message without its packets, of a packet and of a byte in nanoseconds, between two cores of one server.
/// Only their ratios matter, and little: three times or a third of the cost of a message changes none of the results in
/// virtual time.
const MESSAGE_NS: f64 = 280.0;
const PACKET_NS: f64 = 15.0;
const BYTE_NS: f64 = 0.13;

/// Measures the fraction of time that a node works, from iteration to iteration of its loop, and its messages.
///
/// A node that always sends what is queued is never idle, and neither is its receiver: the shorter the iterations, the
/// smaller the batches, each at the full cost of a message. Up to three quarters of the time that costs nothing.
/// Beyond, little time is left to make up for an interruption, and the messages that queue up meanwhile are small.
/// Therefore the batch size is chosen so that the node is idle for a fifth of the time.
///
/// The duration of an idle iteration does not count as work: the higher the load, the more a node does in an iteration.
/// Otherwise a node that polls many sources would consider itself loaded at half its capacity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    /// When the current iteration began.
    iteration_began: Time,
    /// Mean duration of an idle iteration.
    idle_iteration_ns: f64,
    /// Mean duration of a busy iteration, without interruptions.
    busy_iteration_ns: f64,
    has_slept: bool,
    /// Work since the last decision.
    period: Work,
    /// Moving average of the work of a period.
    recent: Work,
    batch_packets_min: f64,
    /// Search for the best message length, where long messages are not always cheaper.
    lengths: Option<Lengths>,
}

/// The work of a node in an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Work {
    /// Elapsed time without interruptions.
    passed_ns: f64,
    /// Time of busy iterations beyond that of an idle one.
    worked_ns: f64,
    /// Messages sent and received.
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

    /// Returns the batch size, limited by what a message holds: [`PACKETS_MAX`] if more than a full message is wanted.
    fn batch_packets_min(&self) -> f64 {
        let wanted = self.packets_wanted();
        let is_beyond_full = wanted * self.bytes > MESSAGE_BYTES_MAX as f64 * self.packets;
        if is_beyond_full { PACKETS_MAX as f64 } else { wanted.clamp(1.0, PACKETS_MAX as f64) }
    }

    /// Returns the batch size with which this load takes [`WORK_SHARE_MAX`] of the time.
    ///
    /// If a message costs as much as `r` packets, has `k` of them, and `s` of the time is work, then the packets alone
    /// take `f = s / (1 + r / k)` of the time. With batches of `n` the work is `f (1 + r / n)`.
    fn packets_wanted(&self) -> f64 {
        if self.messages == 0.0 || self.packets == 0.0 {
            return 1.0;
        }
        let message_packets = MESSAGE_NS / (PACKET_NS + BYTE_NS * self.bytes / self.packets);
        let share = self.worked_ns / self.passed_ns;
        let by_packets = share / (1.0 + message_packets * self.messages / self.packets);
        if by_packets < WORK_SHARE_MAX { message_packets / (WORK_SHARE_MAX / by_packets - 1.0) } else { f64::INFINITY }
    }
}

impl Occupancy {
    /// Creates the state of an idle node whose messages leave in this way.
    pub const fn new(transfer: MessageTransfer) -> Occupancy {
        Occupancy {
            iteration_began: Time::ZERO,
            idle_iteration_ns: 0.0,
            busy_iteration_ns: 0.0,
            has_slept: false,
            period: Work::NONE,
            recent: Work::NONE,
            batch_packets_min: 1.0,
            lengths: match transfer {
                MessageTransfer::Copy => Some(Lengths::new()),
                MessageTransfer::SystemCall => None,
            },
        }
    }

    /// Returns the batch size, 1 to [`PACKETS_MAX`], which means that only full messages are worth sending.
    pub fn batch_packets_min(&self) -> usize {
        self.batch_packets_min as usize
    }

    /// Returns the maximum bytes of a message for the batch size of the more loaded of two nodes.
    pub fn message_bytes_max(&self, batch_packets_min: usize) -> usize {
        let (has_time, is_full_only) = (self.has_time(), batch_packets_min >= PACKETS_MAX);
        self.lengths.as_ref().map_or(MESSAGE_BYTES_MAX, |lengths| lengths.limit(has_time, is_full_only))
    }

    /// Returns whether there is time for other than full messages.
    fn has_time(&self) -> bool {
        self.batch_packets_min() < PACKETS_MAX
    }

    /// Records that the node slept, because it was idle.
    pub fn note_sleep(&mut self) {
        self.has_slept = true;
    }

    /// Records that the node received a message of `packets` packets with a total of `bytes` bytes.
    pub fn note_received(&mut self, packets: usize, bytes: usize) {
        self.note_message(packets, bytes);
    }

    /// Records that the node sent such a message.
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

    /// Records the beginning of a loop iteration; `was_busy` states whether the previous one had work.
    pub fn begin_iteration(&mut self, now: Time, was_busy: bool) {
        let iteration_ns = now.since(self.iteration_began).ns();
        self.iteration_began = now;
        let worked_ns = if was_busy { self.work_of(iteration_ns) } else { 0.0 };
        let has_time = self.has_time();
        if let Some(lengths) = &mut self.lengths {
            lengths.end_iteration(iteration_ns, worked_ns, has_time);
        }
        if was_busy {
            self.note_busy_iteration(iteration_ns);
        } else if self.has_slept {
            self.period.passed_ns += iteration_ns;
        } else {
            self.note_idle_iteration(iteration_ns);
        }
        if self.period.passed_ns >= PERIOD_NS {
            self.decide();
        }
    }

    fn note_busy_iteration(&mut self, iteration_ns: f64) {
        let iteration_ns = iteration_ns.min(ITERATION_NS_MAX.max(ITERATION_RATIO_MAX * self.busy_iteration_ns));
        self.period.passed_ns += iteration_ns;
        self.period.worked_ns += self.work_of(iteration_ns);
        self.busy_iteration_ns += (iteration_ns - self.busy_iteration_ns) / ITERATIONS_AVERAGED;
    }

    /// Returns the work in a busy iteration of this duration.
    fn work_of(&self, iteration_ns: f64) -> f64 {
        (iteration_ns - self.idle_iteration_ns).max(0.0)
    }

    fn note_idle_iteration(&mut self, iteration_ns: f64) {
        let iteration_ns = iteration_ns.min(IDLE_ITERATION_NS_MAX);
        self.period.passed_ns += iteration_ns;
        self.idle_iteration_ns += (iteration_ns - self.idle_iteration_ns) / ITERATIONS_AVERAGED;
    }

    fn decide(&mut self) {
        let period = std::mem::replace(&mut self.period, Work::NONE);
        // A long sleep ages the recent work by many periods, but new work has the same weight as always.
        let periods = if std::mem::take(&mut self.has_slept) { period.passed_ns / PERIOD_NS } else { 1.0 };
        let retained = (1.0 - 1.0 / f64::from(PERIODS_AVERAGED)).powf(periods);
        let average = |recent: f64, period: f64| recent * retained + period / periods * (1.0 - retained);
        self.recent = self.recent.with(period, average);
        self.batch_packets_min = self.recent.batch_packets_min();
    }
}

#[cfg(test)]
mod tests {
    use sim::Span;

    use super::*;

    /// Length of the packets in tests; a message costs as much as 13 of them.
    const BYTES: usize = 46;

    /// Runs intervals of 1 us, of which `of_hundred` percent consist of a busy iteration with one message, and the
    /// others of 20 idle iterations.
    fn run(occupancy: &mut Occupancy, now: &mut Time, rounds: u64, of_hundred: u64, packets: usize) {
        for round in 0..rounds {
            let is_busy = round * 37 % 100 < of_hundred;
            let iterations = if is_busy { 1 } else { 20 };
            for _ in 0..iterations {
                *now += Span::from_ps(1_000_000 / iterations);
                occupancy.begin_iteration(*now, is_busy);
            }
            if is_busy {
                occupancy.note_received(packets, packets * BYTES);
            }
        }
    }

    fn least_after(of_hundred: u64, packets: usize) -> usize {
        let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
        run(&mut occupancy, &mut now, 2000, 0, 1);
        run(&mut occupancy, &mut now, 10_000, of_hundred, packets);
        occupancy.batch_packets_min()
    }

    #[test]
    fn the_batch_size_leaves_a_fifth_of_the_time_idle() {
        // 5% of a busy iteration are the cost of an idle one, so that 76 of 80% of the time are work.
        assert_eq!([20, 60, 80].map(|of_hundred| least_after(of_hundred, 1)), [1, 1, 1], "there is enough time");
        assert_eq!(least_after(80, 20), 17, "nearly as many as there are: fewer would leave less time");
        assert_eq!(least_after(95, 10), 12, "0.90 = f (1 + 13.3 / 10), and 0.8 = f (1 + 13.3 / 12.4)");
        assert_eq!(least_after(95, 32), 52, "0.90 = f (1 + 13.3 / 32), and 0.8 = f (1 + 13.3 / 51.7)");
        assert_eq!(least_after(100, 40), PACKETS_MAX, "0.95 = f (1 + 13.3 / 40): no message is long enough");
    }

    #[test]
    fn only_full_messages_are_worth_sending_if_the_batch_size_exceeds_their_bytes() {
        // A message costs as much as 1.33 packets of 1500 B: 0.8 / 0.769 is 1 + 1.33 / 33, and 0.8 / 0.768 is 1 + 1.33
        // / 31.8.
        for (by_packets, least) in [(0.760, 25), (0.768, 31), (0.769, PACKETS_MAX), (0.9, PACKETS_MAX)] {
            let worked_ns = by_packets * (1.0 + 280.0 / 210.0 / 8.0);
            let work = Work { passed_ns: 1.0, worked_ns, messages: 1.0, packets: 8.0, bytes: 12_000.0 };
            assert_eq!(work.batch_packets_min() as usize, least, "{by_packets} of the time are packets");
        }
        assert_eq!((Work { passed_ns: 1.0, ..Work::NONE }).batch_packets_min(), 1.0, "idle");
    }

    #[test]
    fn a_node_that_is_never_idle_soon_sends_only_full_messages() {
        let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
        for _ in 0..40 {
            // Packets queue up, so that there is always one more than the batch size.
            let packets = occupancy.batch_packets_min() + 1;
            run(&mut occupancy, &mut now, 100, 100, packets);
        }
        assert_eq!(occupancy.batch_packets_min(), PACKETS_MAX, "after 4 ms");
    }

    #[test]
    fn a_node_with_less_load_sends_shorter_messages_again() {
        let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
        run(&mut occupancy, &mut now, 5000, 95, 50);
        assert_eq!(occupancy.batch_packets_min(), PACKETS_MAX);
        run(&mut occupancy, &mut now, 5000, 40, 4);
        assert_eq!(occupancy.batch_packets_min(), 1);
        run(&mut occupancy, &mut now, 5000, 95, 50);
        run(&mut occupancy, &mut now, 3000, 0, 1);
        assert_eq!(occupancy.batch_packets_min(), 1, "idle again");
    }

    #[test]
    fn the_duration_of_an_idle_iteration_is_not_work() {
        // Nine of ten iterations are busy and take a fifth more: a loop that polls many sources under low load.
        let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
        for round in 0..10_000 {
            let is_busy = round % 10 != 0;
            now += Span::from_ps(if is_busy { 600_000 } else { 500_000 });
            occupancy.begin_iteration(now, is_busy);
            occupancy.note_received(8, 8 * BYTES);
        }
        assert_eq!(occupancy.batch_packets_min(), 1);
    }

    #[test]
    fn a_long_sleep_resets_the_load_and_an_interruption_does_not() {
        for (sleeps, left) in [(true, 1), (false, 46)] {
            let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
            run(&mut occupancy, &mut now, 3000, 95, 50);
            assert_eq!(occupancy.batch_packets_min(), PACKETS_MAX);
            if sleeps {
                occupancy.note_sleep();
            }
            now += Span::from_ps(5_000_000_000);
            occupancy.begin_iteration(now, false);
            run(&mut occupancy, &mut now, 100, 0, 1);
            assert_eq!(occupancy.batch_packets_min(), left);
            run(&mut occupancy, &mut now, 3000, 95, 50);
            assert_eq!(occupancy.batch_packets_min(), PACKETS_MAX, "a long sleep has the weight of one period");
        }
    }

    #[test]
    fn long_iterations_count_as_work_completely() {
        // Polling ports by system calls takes 4 us, a busy iteration 60 us.
        let busy_of = |hundred: u64| {
            let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
            for round in 0..10_000 {
                let is_busy = round * 37 % 100 < hundred;
                now += Span::from_ps(if is_busy { 60_000_000 } else { 4_000_000 });
                occupancy.begin_iteration(now, is_busy);
                if is_busy {
                    occupancy.note_received(50, 50 * BYTES);
                }
            }
            occupancy.batch_packets_min()
        };
        assert_eq!([3, 20, 90].map(busy_of), [5, 36, PACKETS_MAX]);
    }

    #[test]
    fn short_messages_are_not_tried_where_messages_are_system_calls() {
        let mut occupancy = Occupancy::new(MessageTransfer::SystemCall);
        let mut now = Time::ZERO;
        for round in 0..10_000 {
            now += Span::from_ps(60_000_000);
            assert_eq!(occupancy.message_bytes_max(1 + round % PACKETS_MAX), MESSAGE_BYTES_MAX);
            occupancy.begin_iteration(now, true);
            occupancy.note_sent(8, 12_000);
        }
        assert_eq!(Occupancy::new(MessageTransfer::Copy).message_bytes_max(1), Lengths::new().limit(true, false));
    }

    #[test]
    fn an_interruption_counts_neither_as_work_nor_as_time() {
        let cases = [(true, 50, 1, 1), (false, 50, 1, 1), (false, 95, 64, PACKETS_MAX)];
        for (interrupts_busy, of_hundred, packets, least) in cases {
            let (mut occupancy, mut now) = (Occupancy::new(MessageTransfer::Copy), Time::ZERO);
            for _ in 0..100 {
                // Every 100 us, for 30.
                run(&mut occupancy, &mut now, 70, of_hundred, packets);
                now += Span::from_ps(30_000_000);
                occupancy.begin_iteration(now, interrupts_busy);
            }
            assert_eq!(occupancy.batch_packets_min(), least, "{interrupts_busy} {of_hundred}");
        }
    }
}
