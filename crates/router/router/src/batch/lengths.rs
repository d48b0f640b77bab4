//! The maximum length of a message, by what messages of each length cost this node.
//!
//! The first packet of a long message waits until all of it has been copied twice. What that saves depends on how
//! messages leave the process, on the processor and on its caches. Where each message is a system call it saves much,
//! and trying short ones builds a queue, so messages may always be full. Where the process copies messages, and both
//! copies have to fit a first-level cache, it saves nothing or less. There the cost of a byte is measured for each
//! length in turn, for a period each under the same load, whatever is queued. So costs differ by the length alone.

use super::limits::{ENOUGH_BYTES, MESSAGE_BYTES_MAX, PERIOD_NS, PERIODS_AVERAGED};

/// Maximum bytes of a message of each length: short (eight packets of 1500 B), long (sixteen) and full (32).
const BYTES_MAX: [usize; 3] = [12_500, 24_000, MESSAGE_BYTES_MAX];
const LENGTHS: usize = BYTES_MAX.len();
const SHORT: usize = 0;
const LONG: usize = 1;
const FULL: usize = 2;
/// Iterations that take longer do not count: they were interrupted.
const ITERATION_NS_MAX: f64 = 1_000_000.0;
/// A period that costs more than this multiple of the average was interrupted, and counts as this multiple.
const COST_RATIO_MAX: f64 = 2.0;
/// Number of periods at the beginning that do not count, because caches are cold: a byte of the RNIC's first messages
/// costs a quarter more than later, and short ones come first.
const PERIODS_COLD: u32 = 8;
/// Once all costs are known, one period in this number tries another length: too few to change the 99th percentile.
const PERIODS_BETWEEN_TRIALS: u32 = 1024;
/// Longer messages are used if a byte costs at most this multiple of what it costs in shorter ones.
const LONGER_COST_RATIO_MAX: f64 = 0.98;
/// The same while the node has no time for shorter ones. What long ones save the peer is not visible here, and costs of
/// eight periods differ from those of the next eight by some percent.
const LONGER_COST_RATIO_MAX_WITHOUT_TIME: f64 = 1.1;

/// How messages leave the process, which determines what a message costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageTransfer {
    /// The process copies each message into memory that the peer reads. What long messages save is measured.
    Copy,
    /// Each message is a system call. Long messages save much.
    SystemCall,
}

/// The best length of messages while a node has time for shorter than full ones, and while it has not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lengths {
    with_time: Choice,
    without_time: Choice,
    /// Whether the node has had time since this period began.
    had_time: bool,
    period: Period,
    /// Bytes of messages in this iteration.
    iteration_bytes: f64,
}

/// The iterations of a period that were not interrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Period {
    passed_ns: f64,
    worked_ns: f64,
    /// Bytes of messages sent and received.
    bytes: f64,
    /// Bytes of the longest message that was sent.
    longest_bytes: usize,
}

impl Period {
    const EMPTY: Period = Period { passed_ns: 0.0, worked_ns: 0.0, bytes: 0.0, longest_bytes: 0 };

    /// Returns the cost of a byte if a message was so long that its maximum length mattered. It is not known where
    /// iterations without work take as long as others.
    fn byte_ns(&self) -> Option<f64> {
        let is_known = self.longest_bytes >= ENOUGH_BYTES && self.bytes > 0.0 && self.worked_ns > 0.0;
        is_known.then(|| self.worked_ns / self.bytes)
    }
}

impl Lengths {
    pub const fn new() -> Lengths {
        Lengths {
            with_time: Choice::WITH_TIME,
            without_time: Choice::WITHOUT_TIME,
            had_time: true,
            period: Period::EMPTY,
            iteration_bytes: 0.0,
        }
    }

    /// Returns the maximum bytes of a message; `has_time` states whether this node has time for shorter than full ones.
    /// If it has, but the peer has not (`is_full_only`), messages are full: their cost there is not known here.
    pub fn limit(&self, has_time: bool, is_full_only: bool) -> usize {
        if has_time && is_full_only { MESSAGE_BYTES_MAX } else { BYTES_MAX[self.choice(has_time).length] }
    }

    fn choice(&self, has_time: bool) -> &Choice {
        if has_time { &self.with_time } else { &self.without_time }
    }

    /// Records a message that was sent or received.
    pub fn note_message(&mut self, bytes: usize) {
        self.iteration_bytes += bytes as f64;
    }

    /// Records that the message was sent.
    pub fn note_sent(&mut self, bytes: usize) {
        self.period.longest_bytes = self.period.longest_bytes.max(bytes);
    }

    /// Records the end of a loop iteration: its time, the part of it that was work, and whether the node has time.
    pub fn end_iteration(&mut self, iteration_ns: f64, worked_ns: f64, has_time: bool) {
        let bytes = std::mem::take(&mut self.iteration_bytes);
        if self.had_time != has_time {
            (self.had_time, self.period) = (has_time, Period::EMPTY);
            return;
        }
        if iteration_ns > ITERATION_NS_MAX {
            return;
        }
        self.period.passed_ns += iteration_ns;
        self.period.worked_ns += worked_ns;
        self.period.bytes += bytes;
        if self.period.passed_ns >= PERIOD_NS {
            self.end_period();
        }
    }

    fn end_period(&mut self) {
        let period = std::mem::replace(&mut self.period, Period::EMPTY);
        let Some(byte_ns) = period.byte_ns() else { return };
        let choice = if self.had_time { &mut self.with_time } else { &mut self.without_time };
        choice.learn(byte_ns);
    }
}

/// The cheapest length, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    /// The lengths to choose from, from short to long.
    lengths: &'static [usize],
    /// Maximum cost of a byte in longer messages as a multiple of that in shorter ones.
    longer_cost_ratio_max: f64,
    costs: [Cost; LENGTHS],
    /// Periods at the beginning that still do not count.
    cold_periods: u32,
    /// Periods since a length other than the cheapest was tried.
    periods_since_trial: u32,
    /// Index of the length that was tried last among those that are not the cheapest.
    trial_index: usize,
    /// The length of this period.
    length: usize,
}

impl Choice {
    /// Messages are short until costs are known.
    const WITH_TIME: Choice = Choice::new(&[SHORT, LONG, FULL], LONGER_COST_RATIO_MAX, SHORT);
    /// Messages are full until costs are known, because most nodes without time need that, and trying others builds a
    /// queue.
    const WITHOUT_TIME: Choice = Choice::new(&[SHORT, FULL], LONGER_COST_RATIO_MAX_WITHOUT_TIME, FULL);

    const fn new(lengths: &'static [usize], longer_cost_ratio_max: f64, length: usize) -> Choice {
        Choice {
            lengths,
            longer_cost_ratio_max,
            costs: [Cost::UNKNOWN; LENGTHS],
            cold_periods: PERIODS_COLD,
            periods_since_trial: 0,
            trial_index: 0,
            length,
        }
    }

    /// Records the cost of a byte in this period, and chooses the length of the next one.
    fn learn(&mut self, byte_ns: f64) {
        if self.cold_periods > 0 {
            self.cold_periods -= 1;
            return;
        }
        self.costs[self.length].learn(byte_ns);
        self.periods_since_trial += 1;
        let unknown = self.lengths.iter().copied().filter(|length| self.costs[*length].periods < PERIODS_AVERAGED);
        self.length = unknown.min_by_key(|length| self.costs[*length].periods).unwrap_or_else(|| self.known());
    }

    /// Returns the length of the next period once all costs are known.
    fn known(&mut self) -> usize {
        let cheapest = self.cheapest();
        if self.periods_since_trial < PERIODS_BETWEEN_TRIALS { cheapest } else { self.next_trial(cheapest) }
    }

    /// Returns the shortest length for which no longer one is cheaper by enough.
    fn cheapest(&self) -> usize {
        let is_cheaper = |longer: usize, than: usize| {
            self.costs[longer].byte_ns <= self.longer_cost_ratio_max * self.costs[than].byte_ns
        };
        let longer = self.lengths[1..].iter().copied();
        longer.fold(self.lengths[0], |cheapest, longer| if is_cheaper(longer, cheapest) { longer } else { cheapest })
    }

    fn next_trial(&mut self, cheapest: usize) -> usize {
        self.periods_since_trial = 0;
        self.trial_index = (self.trial_index + 1) % (self.lengths.len() - 1);
        let mut others = self.lengths.iter().copied().filter(|length| *length != cheapest);
        others.nth(self.trial_index).unwrap_or(cheapest)
    }
}

/// The cost of a byte, averaged over the last periods.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    byte_ns: f64,
    periods: u32,
}

impl Cost {
    const UNKNOWN: Cost = Cost { byte_ns: 0.0, periods: 0 };

    fn learn(&mut self, byte_ns: f64) {
        let byte_ns = if self.periods > 0 { byte_ns.min(COST_RATIO_MAX * self.byte_ns) } else { byte_ns };
        self.periods = (self.periods + 1).min(PERIODS_AVERAGED);
        self.byte_ns += (byte_ns - self.byte_ns) / f64::from(self.periods);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLD: usize = PERIODS_COLD as usize;

    /// A node whose periods each have one long message and others, and a cost of a byte by their length.
    struct Node {
        lengths: Lengths,
        has_time: bool,
        /// The share of the time that is work.
        share: f64,
    }

    impl Node {
        fn new(has_time: bool) -> Node {
            let mut node = Node { lengths: Lengths::new(), has_time, share: 0.5 };
            node.lengths.end_iteration(0.0, 0.0, has_time);
            node
        }

        /// Returns a node that knows the costs of all lengths.
        fn warm(has_time: bool, bytes_ns: [f64; LENGTHS]) -> Node {
            let mut node = Node::new(has_time);
            node.run(COLD + 28, bytes_ns);
            node
        }

        fn length(&self) -> usize {
            let bytes = self.lengths.limit(self.has_time, !self.has_time);
            BYTES_MAX.iter().position(|max| *max == bytes).unwrap()
        }

        /// Returns the number of periods that had each length.
        fn run(&mut self, periods: usize, bytes_ns: [f64; LENGTHS]) -> [usize; LENGTHS] {
            let mut had = [0; LENGTHS];
            (0..periods).for_each(|_| had[self.period(ENOUGH_BYTES, bytes_ns)] += 1);
            had
        }

        fn period(&mut self, longest_bytes: usize, bytes_ns: [f64; LENGTHS]) -> usize {
            let length = self.length();
            let worked_ns = self.share * PERIOD_NS;
            self.lengths.note_message(longest_bytes);
            self.lengths.note_sent(longest_bytes);
            self.lengths.note_message((worked_ns / bytes_ns[length]) as usize - longest_bytes);
            self.lengths.end_iteration(worked_ns, worked_ns, self.has_time);
            self.lengths.end_iteration(PERIOD_NS - worked_ns, 0.0, self.has_time);
            length
        }
    }

    #[test]
    fn each_length_is_tried_until_the_cheapest_is_known() {
        for (has_time, first) in [(true, SHORT), (false, FULL)] {
            let mut node = Node::new(has_time);
            assert_eq!(node.length(), first, "before any cost is known");
            assert_eq!(node.run(COLD, [1.0, 0.1, 0.1])[first], COLD, "cold");
            let in_turn = if has_time { [8, 8, 8] } else { [8, 0, 8] };
            assert_eq!(node.run(in_turn.iter().sum(), [0.2, 0.18, 0.19]), in_turn);
            assert_eq!(node.run(500, [0.2, 0.18, 0.19]), if has_time { [0, 500, 0] } else { [0, 0, 500] });
            let by_costs = [([0.2, 0.2, 0.23], 0), ([0.2, 0.19, 0.18], 2), ([0.2, 0.21, 0.18], 2)];
            let where_equal = [[0.2, 0.2, 0.2], [0.2, 0.2, 0.21]].map(|bytes_ns| (bytes_ns, first));
            for (bytes_ns, length) in by_costs.into_iter().chain(where_equal) {
                assert_eq!(Node::warm(has_time, bytes_ns).length(), length, "{bytes_ns:?}");
            }
        }
    }

    #[test]
    fn a_more_costly_length_is_tried_rarely_and_used_once_it_costs_less() {
        let mut node = Node::warm(true, [0.2, 0.21, 0.22]);
        let apart = PERIODS_BETWEEN_TRIALS as usize;
        assert_eq!(node.run(10 * apart, [0.2, 0.21, 0.22]), [10 * apart - 10, 5, 5]);
        // Short ones become costly, for example by another program on the processor: the node notices at once.
        let had = node.run(100, [0.3, 0.21, 0.22]);
        assert!(had[1] > 80, "{had:?}");
        assert_eq!(node.run(10 * apart, [0.3, 0.21, 0.22])[1], 10 * apart - 10);
    }

    #[test]
    fn periods_without_long_messages_and_interrupted_ones_do_not_count() {
        let mut node = Node::new(true);
        for _ in 0..1000 {
            assert_eq!(node.period(ENOUGH_BYTES - 1, [0.2, 0.1, 0.1]), SHORT);
        }
        for _ in 0..100 {
            node.lengths.note_message(ENOUGH_BYTES);
            node.lengths.note_sent(ENOUGH_BYTES);
            node.lengths.end_iteration(PERIOD_NS, 0.0, true);
        }
        assert_eq!(node.lengths, Lengths::new(), "nor do iterations that take no longer than those without work");
        for _ in 0..100 {
            if node.length() == SHORT {
                node.lengths.note_message(ENOUGH_BYTES);
                node.lengths.note_sent(ENOUGH_BYTES);
                node.lengths.end_iteration(ITERATION_NS_MAX + 1.0, ITERATION_NS_MAX + 1.0, true);
            }
            node.period(ENOUGH_BYTES, [0.2; LENGTHS]);
        }
        assert_eq!(node.length(), SHORT, "interruptions do not make short ones costly");
        let mut node = Node::new(true);
        node.run(COLD + 10, [0.2, 0.16, 0.2]);
        node.period(ENOUGH_BYTES, [2.0; LENGTHS]);
        node.run(20, [0.2, 0.16, 0.2]);
        assert_eq!(node.length(), 1, "nor does one make others costly");
    }

    #[test]
    fn a_period_in_which_a_node_becomes_busy_does_not_count() {
        let mut node = Node::new(true);
        for has_time in [true, false].into_iter().cycle().take(1000) {
            node.lengths.end_iteration(0.0, 0.0, has_time);
            node.lengths.note_message(ENOUGH_BYTES);
            node.lengths.note_sent(ENOUGH_BYTES);
            node.lengths.end_iteration(PERIOD_NS / 2.0, PERIOD_NS / 4.0, has_time);
        }
        assert_eq!((node.lengths.with_time, node.lengths.without_time), (Choice::WITH_TIME, Choice::WITHOUT_TIME));
    }

    #[test]
    fn full_messages_are_short_where_that_costs_this_node_less_and_it_is_the_busy_one() {
        let node = Node::warm(false, [0.2, 0.21, 0.23]);
        let limit = |has_time, is_full_only| node.lengths.limit(has_time, is_full_only);
        assert_eq!((limit(false, true), limit(true, true)), (BYTES_MAX[SHORT], BYTES_MAX[FULL]));
        assert_eq!(limit(true, false), BYTES_MAX[SHORT], "costs with time are not known");
    }
}
