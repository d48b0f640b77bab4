//! How long a message may be: whether long ones cost a node less than short ones is tried while they go.
//!
//! The first packet of a long message waits for all of it to be copied twice. Whether that saves anything depends on
//! the carrier, the processor and its caches: where a system call is made for each message, much; where both copies
//! have to fit a first cache, nothing or less. So both lengths take their turns under the same load, for a period each,
//! whatever waits: what their costs then differ by is not the load's doing.

/// Short: eight packets of 1500 B.
pub(super) const SHORT_BYTES: usize = 12_500;
/// Long, while there is time for more than full messages.
const LONG_BYTES: usize = 24_000;
/// A period says something if a message of it had more bytes: both lengths may be so long, and then differ.
const BOUND_BYTES: usize = SHORT_BYTES / 4 * 3;
/// Rounds that take longer do not count: they were interrupted.
const ROUND_NS_MAX: f64 = 100_000.0;
/// The first periods that would say something do not: nothing is in a cache yet.
const PERIODS_COLD: u32 = 2;
/// After so many periods of each length it is known what costs less.
const PERIODS_KNOWN: u32 = 8;
/// Of each length the last periods count, so many.
const PERIODS_KEPT: u32 = 32;
/// Then one of so many periods tries what costs more: too few for the 99th percentile to notice.
const PERIODS_APART: u32 = 1024;
/// Long messages are worth it if they cost at most this share of what short ones do.
const LONG_COSTS_AT_MOST: f64 = 0.98;

/// How long a message may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// No message is to have more bytes, but for a packet that has.
    pub bytes: usize,
    /// So it is only tried: where none but full messages are worth it and packets are late, they go all the same.
    pub is_tried: bool,
}

/// How long messages are to be while a node has time for more than full ones, and while it has not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lengths {
    with_time: Choice,
    without_time: Choice,
    /// Of rounds of this period that were not interrupted: their work, and the bytes of their messages.
    worked_ns: f64,
    bytes: f64,
    /// Of messages of this round.
    round_bytes: f64,
    /// Of the longest message that was sent in this period.
    longest_bytes: usize,
}

impl Lengths {
    pub const fn new() -> Lengths {
        Lengths {
            with_time: Choice::new(false),
            without_time: Choice::new(true),
            worked_ns: 0.0,
            bytes: 0.0,
            round_bytes: 0.0,
            longest_bytes: 0,
        }
    }

    /// How long messages may be, as this node `has_time` for more than full ones or not. Where it has, but the other
    /// node has not (`is_full_only`), they are full: what they cost over there is not known here.
    pub fn limit(&self, has_time: bool, is_full_only: bool) -> Limit {
        let choice = if has_time { self.with_time } else { self.without_time };
        let bytes = match (choice.is_long, is_full_only) {
            (_, true) if has_time => usize::MAX,
            (true, true) => usize::MAX,
            (true, false) => LONG_BYTES,
            (false, _) => SHORT_BYTES,
        };
        Limit { bytes, is_tried: choice.is_tried }
    }

    /// A message was sent or taken in.
    pub fn note_message(&mut self, bytes: usize) {
        self.round_bytes += bytes as f64;
    }

    /// The same, sent.
    pub fn note_sent(&mut self, bytes: usize) {
        self.longest_bytes = self.longest_bytes.max(bytes);
    }

    /// A round is over in which there was something to do.
    pub fn end_round(&mut self, round_ns: f64, worked_ns: f64) {
        let bytes = std::mem::take(&mut self.round_bytes);
        if round_ns <= ROUND_NS_MAX {
            self.worked_ns += worked_ns;
            self.bytes += bytes;
        }
    }

    /// A period is over, in which this node had time or not, and in which it worked for more of the time than it is to.
    pub fn end_period(&mut self, had_time: bool, was_busy: bool) {
        let [worked_ns, bytes] = [&mut self.worked_ns, &mut self.bytes].map(std::mem::take);
        if std::mem::take(&mut self.longest_bytes) < BOUND_BYTES || bytes == 0.0 {
            return;
        }
        let byte_ns = worked_ns / bytes;
        let was_long = if had_time { self.with_time.is_long } else { self.without_time.is_long };
        if had_time {
            self.with_time.learn(was_long, byte_ns);
        }
        // Who comes to have no time has seen by then what short messages cost.
        if !had_time || was_busy {
            self.without_time.learn(was_long, byte_ns);
        }
    }
}

/// The cheaper of two lengths, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    short: Cost,
    long: Cost,
    /// Periods to be left out at the beginning.
    cold: u32,
    /// Periods since what costs more was tried.
    since_tried: u32,
    /// What this period is.
    is_long: bool,
    is_tried: bool,
}

impl Choice {
    const fn new(is_long: bool) -> Choice {
        Choice {
            short: Cost::UNKNOWN,
            long: Cost::UNKNOWN,
            cold: PERIODS_COLD,
            since_tried: 0,
            is_long,
            is_tried: true,
        }
    }

    /// What a byte cost in a period of long or short messages.
    fn learn(&mut self, was_long: bool, byte_ns: f64) {
        if self.cold > 0 {
            self.cold -= 1;
            return;
        }
        let cost = if was_long { &mut self.long } else { &mut self.short };
        cost.learn(byte_ns);
        self.since_tried += 1;
        self.choose();
    }

    fn choose(&mut self) {
        let Choice { short, long, .. } = *self;
        if short.periods.min(long.periods) < PERIODS_KNOWN {
            (self.is_long, self.is_tried) = (long.periods < short.periods, true);
            return;
        }
        self.is_tried = self.since_tried >= PERIODS_APART;
        if self.is_tried {
            self.since_tried = 0;
        }
        let is_worth_it = long.byte_ns <= LONG_COSTS_AT_MOST * short.byte_ns;
        self.is_long = is_worth_it != self.is_tried;
    }
}

/// What a byte costs, on average over the last periods.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    byte_ns: f64,
    periods: u32,
}

impl Cost {
    const UNKNOWN: Cost = Cost { byte_ns: 0.0, periods: 0 };

    fn learn(&mut self, byte_ns: f64) {
        self.periods = (self.periods + 1).min(PERIODS_KEPT);
        self.byte_ns += (byte_ns - self.byte_ns) / f64::from(self.periods);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each period sends its longest message with all that it may have, and each byte costs as much as is said of it.
    struct Node {
        lengths: Lengths,
        has_time: bool,
        was_busy: bool,
    }

    impl Node {
        fn new(has_time: bool) -> Node {
            Node { lengths: Lengths::new(), has_time, was_busy: false }
        }

        fn is_long(&self) -> bool {
            self.lengths.limit(self.has_time, false).bytes > SHORT_BYTES
        }

        /// How many of so many periods were long.
        fn run(&mut self, periods: usize, short_ns: f64, long_ns: f64) -> usize {
            (0..periods).filter(|_| self.period(10_000, short_ns, long_ns)).count()
        }

        fn period(&mut self, longest_bytes: usize, short_ns: f64, long_ns: f64) -> bool {
            let is_long = self.is_long();
            self.lengths.note_message(longest_bytes);
            self.lengths.note_sent(longest_bytes);
            self.lengths.note_message(40_000);
            let byte_ns = if is_long { long_ns } else { short_ns };
            let worked_ns = byte_ns * (longest_bytes + 40_000) as f64;
            self.lengths.end_round(worked_ns, worked_ns);
            self.lengths.end_period(self.has_time, self.was_busy);
            is_long
        }
    }

    #[test]
    fn both_lengths_take_their_turns_until_it_is_known_what_costs_less() {
        for has_time in [true, false] {
            let mut node = Node::new(has_time);
            assert_eq!(node.is_long(), !has_time, "as long as it was found to be best before anything is known");
            assert!(node.lengths.limit(has_time, true).is_tried);
            let cold = node.run(2, 1.9, 0.1);
            assert_eq!((cold, node.run(16, 0.2, 0.17)), (if has_time { 0 } else { 2 }, 8));
            assert!(node.run(500, 0.2, 0.17) == 500 && !node.lengths.limit(has_time, true).is_tried);
            let mut node = Node::new(has_time);
            node.run(20, 0.2, 0.2);
            assert_eq!(node.run(500, 0.2, 0.2), 0, "what saves nothing is not worth it");
        }
    }

    #[test]
    fn what_costs_more_is_tried_now_and_then_and_taken_once_it_costs_less() {
        let mut node = Node::new(true);
        node.run(20, 0.2, 0.21);
        assert_eq!(node.run(10 * PERIODS_APART as usize, 0.2, 0.21), 10);
        // The short ones become dear, as with another carrier: that is seen at once.
        let long = node.run(100, 0.3, 0.21);
        assert!(long > 80, "{long} of 100");
        assert_eq!(node.run(10 * PERIODS_APART as usize, 0.3, 0.21), 10 * (PERIODS_APART as usize - 1));
    }

    #[test]
    fn periods_without_long_messages_and_rounds_that_were_interrupted_say_nothing() {
        let mut node = Node::new(true);
        for _ in 0..1000 {
            assert!(!node.period(BOUND_BYTES - 1, 0.2, 0.1));
            node.lengths.end_period(true, true);
        }
        assert_eq!(node.lengths, Lengths::new());
        for _ in 0..100 {
            if !node.is_long() {
                node.lengths.end_round(ROUND_NS_MAX + 1.0, ROUND_NS_MAX + 1.0);
            }
            node.period(10_000, 0.2, 0.2);
        }
        assert!(!node.is_long(), "what interrupts short ones does not make them dear");
    }

    #[test]
    fn what_short_messages_cost_before_a_node_had_no_time_need_not_be_tried() {
        let mut node = Node::new(true);
        node.was_busy = true;
        let long = node.run(20, 0.2, 0.17);
        node.has_time = false;
        assert!(long > 0 && node.run(20, 0.2, 0.17) == 20, "nothing is tried any more");
        node.lengths = Lengths::new();
        (node.has_time, node.was_busy) = (true, false);
        node.run(20, 0.2, 0.17);
        node.has_time = false;
        assert!(node.run(20, 0.2, 0.17) < 20, "what they cost with time to spare is another matter");
    }

    #[test]
    fn full_messages_are_short_where_that_costs_this_node_less_and_it_is_the_busy_one() {
        let mut node = Node::new(false);
        node.run(20, 0.2, 0.22);
        let limit = |has_time, is_full_only| node.lengths.limit(has_time, is_full_only).bytes;
        assert_eq!((limit(false, true), limit(false, false)), (SHORT_BYTES, SHORT_BYTES));
        assert_eq!((limit(true, true), limit(true, false)), (usize::MAX, SHORT_BYTES));
        node.run(100, 0.3, 0.22);
        let limit = |is_full_only| node.lengths.limit(false, is_full_only).bytes;
        assert_eq!((limit(true), limit(false)), (usize::MAX, LONG_BYTES));
    }
}
