//! How long a message may be: whether long ones cost a node less than short ones is known, or tried while they go.
//!
//! The first packet of a long message waits for all of it to be copied twice. Whether that saves anything depends on
//! the carrier, the processor and its caches. Where system calls carry each message, much, and to try short ones costs
//! a queue. Where both copies have to fit a first cache, nothing or less: there all lengths take their turns
//! under the same load, for a period each, whatever waits: what their costs then differ by is not the load's doing.

use super::FIXED_PACKETS_MAX;
use super::occupancy::WORKS_AT_MOST;

/// A full message: the longest fixed batch of packets of 1500 B.
pub(super) const FULL_BYTES: usize = FIXED_PACKETS_MAX * 1500;
/// No message has more bytes, by length from short to full: eight packets of 1500 B, sixteen, all.
const BYTES_MAX: [usize; LENGTHS] = [12_500, 24_000, FULL_BYTES];
const LENGTHS: usize = 3;
const SHORT: usize = 0;
const LONG: usize = 1;
const FULL: usize = 2;
/// A period says something if a message of it had so many bytes: a little longer, and lengths differ.
const BOUND_BYTES: usize = BYTES_MAX[SHORT] / 4 * 3;
/// A period: so much time, but for interruptions and sleep. One round may take longer where messages are system calls.
const PERIOD_NS: f64 = 100_000.0;
/// Rounds that take longer do not count: they were interrupted.
const ROUND_NS_MAX: f64 = 1_000_000.0;
/// A period that costs more than so many of those before was interrupted, too, and counts for no more.
const COST_MAX: f64 = 2.0;
/// The first periods that would say something do not: nothing is in a cache yet. A byte of the RNIC's messages costs a
/// quarter more in the first few than later, and what comes first in turn is short.
const PERIODS_COLD: u32 = 8;
/// After so many periods of a length it is known what that costs.
const PERIODS_KNOWN: u32 = 8;
/// After so many if it costs more than so many times the cheapest.
const PERIODS_KNOWN_SOON: u32 = 3;
const SOON_COSTS: f64 = 1.25;
/// Of each length the last periods count, so many.
const PERIODS_KEPT: u32 = 32;
/// Then one of so many periods tries another length: too few for the 99th percentile to notice.
const PERIODS_APART: u32 = 1024;
/// Longer messages are worth it if they cost at most this share of what shorter ones do.
const LONGER_COSTS_AT_MOST: f64 = 0.98;
/// The same while a node has no time: they are, unless they cost it more by much. What they save the other node is not
/// seen here, and eight periods differ by some percent from the next eight.
const LONGER_COSTS_AT_MOST_WITHOUT_TIME: f64 = 1.1;

/// By what messages are carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// The process itself copies them, into memory that the peer sees: whether long ones save anything is to be learnt.
    ByCopies,
    /// The kernel is called for each: long ones save much.
    BySystemCalls,
}

/// How long a message may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// No message is to have more bytes, but for a packet that has.
    pub bytes: usize,
    /// So it is only tried: where none but full messages are worth it and packets are late, they go all the same.
    pub is_tried: bool,
}

impl Limit {
    /// As long as can be.
    pub(super) const FULL: Limit = Limit { bytes: FULL_BYTES, is_tried: false };
}

/// How long messages are to be while a node has time for more than full ones, and while it has not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lengths {
    with_time: Choice,
    without_time: Choice,
    /// Whether there has been time since this period began.
    had_time: bool,
    period: Period,
    /// Bytes of messages of this round.
    round_bytes: f64,
}

/// What happened in rounds that were not interrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Period {
    passed_ns: f64,
    worked_ns: f64,
    /// Of messages sent and taken in.
    bytes: f64,
    /// Of the longest message that was sent.
    longest_bytes: usize,
    /// Whether messages were to be full, whatever length was to be tried.
    is_full: bool,
}

impl Period {
    const BEGINS: Period = Period { passed_ns: 0.0, worked_ns: 0.0, bytes: 0.0, longest_bytes: 0, is_full: false };

    /// What a byte cost, if messages were so long that their limit counted. Where rounds with nothing to do take as
    /// long as others, that is not known.
    fn byte_ns(&self) -> Option<f64> {
        let is_known = self.longest_bytes >= BOUND_BYTES && self.bytes > 0.0 && self.worked_ns > 0.0;
        is_known.then(|| self.worked_ns / self.bytes)
    }
}

impl Lengths {
    pub const fn new() -> Lengths {
        Lengths {
            with_time: Choice::WITH_TIME,
            without_time: Choice::WITHOUT_TIME,
            had_time: true,
            period: Period::BEGINS,
            round_bytes: 0.0,
        }
    }

    /// How long messages may be, as this node `has_time` for more than full ones or not. Where it has, but the other
    /// node has not (`is_full_only`), they are full: what they cost over there is not known here.
    pub fn limit(&mut self, has_time: bool, is_full_only: bool) -> Limit {
        if has_time && is_full_only {
            self.period.is_full = true;
            return Limit::FULL;
        }
        let choice = self.choice(has_time);
        Limit { bytes: BYTES_MAX[choice.length], is_tried: choice.is_tried }
    }

    fn choice(&self, has_time: bool) -> &Choice {
        if has_time { &self.with_time } else { &self.without_time }
    }

    /// A message was sent or taken in.
    pub fn note_message(&mut self, bytes: usize) {
        self.round_bytes += bytes as f64;
    }

    /// The same, sent.
    pub fn note_sent(&mut self, bytes: usize) {
        self.period.longest_bytes = self.period.longest_bytes.max(bytes);
    }

    /// A round is over, of which so much was work, and in which this node had time or not.
    pub fn end_round(&mut self, round_ns: f64, worked_ns: f64, has_time: bool) {
        let bytes = std::mem::take(&mut self.round_bytes);
        if self.had_time != has_time {
            (self.had_time, self.period) = (has_time, Period::BEGINS);
            return;
        }
        if round_ns > ROUND_NS_MAX {
            return;
        }
        self.period.passed_ns += round_ns;
        self.period.worked_ns += worked_ns;
        self.period.bytes += bytes;
        if self.period.passed_ns >= PERIOD_NS {
            self.end_period();
        }
    }

    fn end_period(&mut self) {
        let period = std::mem::replace(&mut self.period, Period::BEGINS);
        let Some(byte_ns) = period.byte_ns() else { return };
        let length = self.choice(self.had_time).length;
        if period.is_full && length != FULL {
            return;
        }
        if self.had_time {
            self.with_time.learn(length, byte_ns);
        }
        // Who comes to have no time has seen by then what short messages cost.
        if !self.had_time || period.worked_ns > WORKS_AT_MOST * period.passed_ns {
            self.without_time.learn(length, byte_ns);
        }
    }
}

/// The cheapest length, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    /// Among which lengths, from short to long.
    among: &'static [usize],
    /// Which share of what a shorter one costs makes a longer one worth it.
    longer_costs_at_most: f64,
    costs: [Cost; LENGTHS],
    /// Periods to be left out at the beginning.
    cold: u32,
    /// Periods since another length was tried, and which of the others that was.
    since_tried: u32,
    tries: usize,
    /// That of this period, and whether it is only tried.
    length: usize,
    is_tried: bool,
}

impl Choice {
    /// Short before anything is known.
    const WITH_TIME: Choice = Choice::among(&[SHORT, LONG, FULL], LONGER_COSTS_AT_MOST, SHORT);
    /// Full ones, which most who have no time need: others are tried at the price of a queue.
    const WITHOUT_TIME: Choice = Choice::among(&[SHORT, FULL], LONGER_COSTS_AT_MOST_WITHOUT_TIME, FULL);

    const fn among(among: &'static [usize], longer_costs_at_most: f64, length: usize) -> Choice {
        let costs = [Cost::UNKNOWN; LENGTHS];
        let (cold, since_tried, tries, is_tried) = (PERIODS_COLD, 0, 0, true);
        Choice { among, longer_costs_at_most, costs, cold, since_tried, tries, length, is_tried }
    }

    /// What a byte cost in a period of messages of that length.
    fn learn(&mut self, length: usize, byte_ns: f64) {
        if self.cold > 0 {
            self.cold -= 1;
            return;
        }
        self.costs[length].learn(byte_ns);
        self.since_tried += 1;
        let unknown = self.among.iter().copied().filter(|length| !self.is_known(*length));
        if let Some(length) = unknown.min_by_key(|length| self.costs[*length].periods) {
            (self.length, self.is_tried) = (length, true);
            return;
        }
        let cheapest = self.cheapest();
        self.is_tried = self.since_tried >= PERIODS_APART;
        self.length = if self.is_tried { self.next_to_try(cheapest) } else { cheapest };
    }

    fn is_known(&self, length: usize) -> bool {
        let Cost { periods, byte_ns } = self.costs[length];
        let known = self.costs.iter().filter(|cost| cost.periods >= PERIODS_KNOWN_SOON);
        let least_ns = known.map(|cost| cost.byte_ns).fold(f64::INFINITY, f64::min);
        periods >= PERIODS_KNOWN || periods >= PERIODS_KNOWN_SOON && byte_ns > SOON_COSTS * least_ns
    }

    /// The shortest that no longer one is worth more than.
    fn cheapest(&self) -> usize {
        let is_worth = |longer: usize, than: usize| {
            self.costs[longer].byte_ns <= self.longer_costs_at_most * self.costs[than].byte_ns
        };
        let longer = self.among[1..].iter().copied();
        longer.fold(self.among[0], |cheapest, longer| if is_worth(longer, cheapest) { longer } else { cheapest })
    }

    fn next_to_try(&mut self, cheapest: usize) -> usize {
        self.since_tried = 0;
        self.tries = (self.tries + 1) % (self.among.len() - 1);
        let mut others = self.among.iter().copied().filter(|length| *length != cheapest);
        others.nth(self.tries).unwrap_or(cheapest)
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
        let byte_ns = if self.periods > 0 { byte_ns.min(COST_MAX * self.byte_ns) } else { byte_ns };
        self.periods = (self.periods + 1).min(PERIODS_KEPT);
        self.byte_ns += (byte_ns - self.byte_ns) / f64::from(self.periods);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLD: usize = PERIODS_COLD as usize;

    /// Each period sends a message of so many bytes and others, and each byte costs what it does by the length.
    struct Node {
        lengths: Lengths,
        has_time: bool,
        /// What share of the time is work.
        share: f64,
    }

    impl Node {
        fn new(has_time: bool) -> Node {
            let mut node = Node { lengths: Lengths::new(), has_time, share: 0.5 };
            node.lengths.end_round(0.0, 0.0, has_time);
            node
        }

        /// As it has seen enough.
        fn warm(has_time: bool, bytes_ns: [f64; LENGTHS]) -> Node {
            let mut node = Node::new(has_time);
            node.run(COLD + 28, bytes_ns);
            node
        }

        fn length(&mut self) -> usize {
            let bytes = self.lengths.limit(self.has_time, !self.has_time).bytes;
            BYTES_MAX.iter().position(|max| *max == bytes).unwrap()
        }

        /// How many of so many periods had each length.
        fn run(&mut self, periods: usize, bytes_ns: [f64; LENGTHS]) -> [usize; LENGTHS] {
            let mut had = [0; LENGTHS];
            (0..periods).for_each(|_| had[self.period(BOUND_BYTES, bytes_ns)] += 1);
            had
        }

        fn period(&mut self, longest_bytes: usize, bytes_ns: [f64; LENGTHS]) -> usize {
            let length = self.length();
            let worked_ns = self.share * PERIOD_NS;
            self.lengths.note_message(longest_bytes);
            self.lengths.note_sent(longest_bytes);
            self.lengths.note_message((worked_ns / bytes_ns[length]) as usize - longest_bytes);
            self.lengths.end_round(worked_ns, worked_ns, self.has_time);
            self.lengths.end_round(PERIOD_NS - worked_ns, 0.0, self.has_time);
            length
        }
    }

    #[test]
    fn all_lengths_take_their_turns_until_it_is_known_what_costs_least() {
        for (has_time, first) in [(true, SHORT), (false, FULL)] {
            let mut node = Node::new(has_time);
            assert_eq!(node.length(), first, "what was found to be best, before anything is known");
            assert!(node.lengths.limit(has_time, !has_time).is_tried);
            assert_eq!(node.run(COLD, [1.0, 0.1, 0.1])[first], COLD, "cold");
            let in_turn = if has_time { [8, 8, 8] } else { [8, 0, 8] };
            assert_eq!(node.run(in_turn.iter().sum(), [0.2, 0.18, 0.19]), in_turn);
            assert_eq!(node.run(500, [0.2, 0.18, 0.19]), if has_time { [0, 500, 0] } else { [0, 0, 500] });
            assert!(!node.lengths.limit(has_time, !has_time).is_tried);
            let by_costs = [([0.2, 0.2, 0.23], 0), ([0.2, 0.19, 0.18], 2), ([0.2, 0.21, 0.18], 2)];
            let where_equal = [[0.2, 0.2, 0.2], [0.2, 0.2, 0.21]].map(|bytes_ns| (bytes_ns, first));
            for (bytes_ns, length) in by_costs.into_iter().chain(where_equal) {
                assert_eq!(Node::warm(has_time, bytes_ns).length(), length, "{bytes_ns:?}");
            }
        }
    }

    #[test]
    fn what_is_dear_is_not_tried_for_long() {
        let mut node = Node::new(true);
        node.run(COLD, [0.2; LENGTHS]);
        assert_eq!(node.run(100, [0.2, 0.15, 0.14]), [3, 8, 89]);
    }

    #[test]
    fn what_costs_more_is_tried_now_and_then_and_taken_once_it_costs_less() {
        let mut node = Node::warm(true, [0.2, 0.21, 0.22]);
        let apart = PERIODS_APART as usize;
        assert_eq!(node.run(10 * apart, [0.2, 0.21, 0.22]), [10 * apart - 10, 5, 5]);
        // Short ones become dear, as by another neighbour on the processor: that is seen at once.
        let had = node.run(100, [0.3, 0.21, 0.22]);
        assert!(had[1] > 80, "{had:?}");
        assert_eq!(node.run(10 * apart, [0.3, 0.21, 0.22])[1], 10 * apart - 10);
    }

    #[test]
    fn periods_without_long_messages_and_what_interrupts_say_nothing() {
        let mut node = Node::new(true);
        for _ in 0..1000 {
            assert_eq!(node.period(BOUND_BYTES - 1, [0.2, 0.1, 0.1]), SHORT);
        }
        for _ in 0..100 {
            node.lengths.note_message(BOUND_BYTES);
            node.lengths.note_sent(BOUND_BYTES);
            node.lengths.end_round(PERIOD_NS, 0.0, true);
        }
        assert_eq!(node.lengths, Lengths::new(), "nor what takes no longer than nothing does");
        for _ in 0..100 {
            if node.length() == SHORT {
                node.lengths.note_message(BOUND_BYTES);
                node.lengths.note_sent(BOUND_BYTES);
                node.lengths.end_round(ROUND_NS_MAX + 1.0, ROUND_NS_MAX + 1.0, true);
            }
            node.period(BOUND_BYTES, [0.2; LENGTHS]);
        }
        assert_eq!(node.length(), SHORT, "what interrupts short ones does not make them dear");
        let mut node = Node::new(true);
        node.run(COLD + 10, [0.2, 0.16, 0.2]);
        node.period(BOUND_BYTES, [2.0; LENGTHS]);
        node.run(20, [0.2, 0.16, 0.2]);
        assert_eq!(node.length(), 1, "nor does it others, once");
    }

    #[test]
    fn what_short_messages_cost_before_a_node_had_no_time_need_not_be_tried() {
        for (share, tried) in [(0.9, 0), (0.5, 8)] {
            let mut node = Node::new(true);
            node.share = share;
            node.run(COLD + 28, [0.2, 0.19, 0.17]);
            node.has_time = false;
            node.lengths.end_round(0.0, 0.0, false);
            node.lengths.without_time.cold = 0;
            assert_eq!(node.run(30, [0.2, 0.19, 0.17])[SHORT], tried, "{share} of the time was work before");
        }
    }

    #[test]
    fn a_period_in_which_a_node_comes_to_have_no_time_says_nothing() {
        let mut node = Node::new(true);
        for has_time in [true, false].into_iter().cycle().take(1000) {
            node.lengths.end_round(0.0, 0.0, has_time);
            node.lengths.note_message(BOUND_BYTES);
            node.lengths.note_sent(BOUND_BYTES);
            node.lengths.end_round(PERIOD_NS / 2.0, PERIOD_NS / 4.0, has_time);
        }
        assert_eq!((node.lengths.with_time, node.lengths.without_time), (Choice::WITH_TIME, Choice::WITHOUT_TIME));
    }

    #[test]
    fn a_period_in_which_messages_are_full_for_the_other_node_says_nothing_of_shorter_ones() {
        let mut node = Node::new(true);
        for _ in 0..100 {
            assert_eq!(node.lengths.limit(true, true), Limit::FULL);
            node.lengths.note_message(FULL_BYTES);
            node.lengths.note_sent(FULL_BYTES);
            node.lengths.end_round(PERIOD_NS, PERIOD_NS / 2.0, true);
        }
        assert_eq!(node.lengths, Lengths::new(), "which is the one to be tried");
        let mut node = Node::warm(true, [0.2, 0.19, 0.18]);
        assert_eq!(node.length(), FULL);
        let before = node.lengths;
        node.lengths.limit(true, true);
        node.period(FULL_BYTES, [0.1; LENGTHS]);
        assert_ne!(node.lengths, before, "of full ones it does");
    }

    #[test]
    fn full_messages_are_short_where_that_costs_this_node_less_and_it_is_the_busy_one() {
        let mut node = Node::warm(false, [0.2, 0.21, 0.23]);
        let mut limit = |has_time, is_full_only| node.lengths.limit(has_time, is_full_only).bytes;
        assert_eq!((limit(false, true), limit(true, true)), (BYTES_MAX[SHORT], BYTES_MAX[FULL]));
        assert_eq!(limit(true, false), BYTES_MAX[SHORT], "as nothing is known of when it has time");
    }
}
