//! How every window of a rack is cut: the monitors' partition, the data partitions, and, where programs are trusted
//! with windows, spans for connections of theirs. All nodes cut alike, because the rack file says it all.
//!
//! ```text
//!   0        the monitors' partition
//!   64 KiB   data partitions, equal shares
//!   ...      a page with the link's pace, where it is slowed down to a model (trust = "direct")
//!   ...      spans, one a connection (trust = "direct")
//! ```

use crate::{CONTROL_PARTITION_BYTES, DATA_PARTITION_BYTES_MIN, MODELLED_PARTITION_BYTES_MIN, PAGE_BYTES, Rack, Trust};

/// Bytes of a window that a connection of two programs takes.
pub const SPAN_BYTES: u64 = 268 << 10;
/// The same where the link is slowed down to a model: with the times at which what is stored arrives.
pub const TIMED_SPAN_BYTES: u64 = 316 << 10;
/// Spans of a window at most.
pub const SPANS_MAX: u64 = 1 << 16;
/// What a data partition has use for: more would only keep spans away.
const DATA_PARTITION_BYTES_USED: u64 = 1 << 20;
/// The same where a link is slowed down to a model, and each store leaves a record.
const DATA_PARTITION_BYTES_USED_TIMED: u64 = (4 << 20) + (64 << 10);

/// How a window is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes that the data partitions share, behind the monitors'.
    pub data_bytes: u64,
    /// What programs get.
    pub spans: Option<Spans>,
}

/// Spans for connections whose programs write windows themselves. Where the link is slowed down to a model, the page
/// before the first of them is the link's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans {
    /// Where in the window the first begins.
    pub offset_bytes: u64,
    /// Bytes of each.
    pub span_bytes: u64,
    /// How many there are, at least one.
    pub count: u64,
}

impl Cut {
    /// Bytes at the start of a window that belong to monitors and proxies.
    pub fn link_bytes(&self) -> u64 {
        CONTROL_PARTITION_BYTES + self.data_bytes
    }
}

impl Rack {
    /// How windows are cut: data partitions get half of what the monitors leave, but no more than they have use for,
    /// and spans the rest.
    pub fn cut(&self) -> Cut {
        let rest_bytes = self.device.window_bytes.saturating_sub(CONTROL_PARTITION_BYTES);
        if self.trust != Trust::Direct {
            return Cut { data_bytes: rest_bytes, spans: None };
        }
        let partitions = self.data_partitions().len() as u64;
        let of_each = if self.link.is_some() { DATA_PARTITION_BYTES_USED_TIMED } else { DATA_PARTITION_BYTES_USED };
        let used_bytes = partitions * of_each;
        let half_bytes = (rest_bytes / 2).next_multiple_of(PAGE_BYTES);
        let data_bytes = half_bytes.min(used_bytes).max(partitions * self.partition_bytes_min());
        let (span_bytes, pace_bytes) = (self.span_bytes(), self.pace_bytes());
        let count = (rest_bytes.saturating_sub(data_bytes + pace_bytes) / span_bytes).min(SPANS_MAX);
        let end_bytes = CONTROL_PARTITION_BYTES + data_bytes;
        let spans = Spans { offset_bytes: end_bytes + pace_bytes, span_bytes, count };
        Cut { data_bytes, spans: (count > 0).then_some(spans) }
    }

    fn span_bytes(&self) -> u64 {
        if self.link.is_some() { TIMED_SPAN_BYTES } else { SPAN_BYTES }
    }

    fn pace_bytes(&self) -> u64 {
        if self.link.is_some() { PAGE_BYTES } else { 0 }
    }

    /// Bytes that a data partition has at least.
    pub(crate) fn partition_bytes_min(&self) -> u64 {
        if self.link.is_some() { MODELLED_PARTITION_BYTES_MIN } else { DATA_PARTITION_BYTES_MIN }
    }

    /// Bytes of the smallest window that holds the partitions, and a span where there are any.
    pub(crate) fn window_bytes_min(&self) -> u64 {
        let data_bytes = self.data_partitions().len() as u64 * self.partition_bytes_min();
        let span_bytes = if self.trust == Trust::Direct { self.span_bytes() + self.pace_bytes() } else { 0 };
        let rest_bytes = if span_bytes > data_bytes { 2 * span_bytes } else { data_bytes + span_bytes };
        (CONTROL_PARTITION_BYTES + rest_bytes).next_multiple_of(2 * PAGE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, PARTITIONS_MAX, Timing};
    use proptest::prelude::*;

    fn rack(window_bytes: u64, count: u16, trust: Trust) -> Rack {
        rack_over(None, window_bytes, count, trust)
    }

    fn rack_over(timing: Option<Timing>, window_bytes: u64, count: u16, trust: Trust) -> Rack {
        let mut rack = Rack::example(2, Backend::Shm, timing, trust);
        rack.partitions.truncate(1);
        rack.partitions[0].count = count;
        rack.device.window_bytes = window_bytes;
        rack
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parts_lie_apart_on_pages_and_within_the_window(
            pages in 17..1_000_000_u64,
            count in 1..=PARTITIONS_MAX as u16,
            is_modelled: bool,
        ) {
            let timing = is_modelled.then_some(Timing::Gen3x16);
            let rack = rack_over(timing, pages * PAGE_BYTES, count, Trust::Direct);
            let cut = rack.cut();
            prop_assume!(rack.device.window_bytes >= rack.window_bytes_min());
            prop_assert!(cut.data_bytes >= u64::from(count) * DATA_PARTITION_BYTES_MIN);
            let spans = cut.spans.expect("room for one");
            let pace_bytes = if is_modelled { PAGE_BYTES } else { 0 };
            prop_assert!(spans.count >= 1 && spans.offset_bytes == cut.link_bytes() + pace_bytes);
            prop_assert_eq!((spans.offset_bytes % PAGE_BYTES, spans.span_bytes % PAGE_BYTES), (0, 0));
            prop_assert!(spans.offset_bytes + spans.count * spans.span_bytes <= rack.device.window_bytes);
        }

        #[test]
        fn the_smallest_window_holds_a_span_and_a_smaller_one_does_not(
            count in 1..=PARTITIONS_MAX as u16,
            is_modelled: bool,
        ) {
            let rack = |bytes| rack_over(is_modelled.then_some(Timing::Gen3x16), bytes, count, Trust::Direct);
            let least_bytes = rack(0).window_bytes_min();
            prop_assert!(rack(least_bytes).cut().spans.is_some());
            prop_assert!(rack(least_bytes - 2 * PAGE_BYTES).cut().spans.is_none());
        }
    }

    #[test]
    fn without_trust_the_partitions_have_it_all() {
        let cut = rack(4 << 20, 2, Trust::Proxy).cut();
        assert_eq!(cut, Cut { data_bytes: (4 << 20) - CONTROL_PARTITION_BYTES, spans: None });
    }
}
