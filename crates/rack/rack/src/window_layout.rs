//! Layout of a window: the control partition, the data partitions and, with `trust = "direct"`, spans for connections
//! whose programs write the window. It follows from the rack file, so all nodes compute the same layout.
//!
//! ```text
//!   0        the control partition
//!   64 KiB   data partitions of equal size
//!   ...      spans, one for each connection (trust = "direct")
//! ```

use crate::{CONTROL_PARTITION_BYTES, DATA_PARTITION_BYTES_MIN, MODELLED_PARTITION_BYTES_MIN, PAGE_BYTES, Rack, Trust};

/// Bytes of a window that a direct connection of two programs occupies.
pub const SPAN_BYTES: u64 = 268 << 10;
/// Maximum number of spans of a window.
pub const SPANS_MAX: u64 = 1 << 16;
/// Maximum useful size of a data partition in bytes. A larger partition would only leave less room for spans.
const DATA_PARTITION_BYTES_USED: u64 = 1 << 20;
/// Maximum useful size of a data partition of a modelled link, where each store leaves a record.
const DATA_PARTITION_BYTES_USED_TIMED: u64 = (4 << 20) + (64 << 10);

/// The layout of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLayout {
    /// Bytes of all data partitions, which follow the control partition.
    pub data_bytes: u64,
    /// Spans for direct connections.
    pub spans: Option<Spans>,
}

/// Spans for connections whose programs write windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans {
    /// Offset of the first span in the window.
    pub offset_bytes: u64,
    /// Bytes of a span.
    pub span_bytes: u64,
    /// Number of spans, at least one.
    pub count: u64,
}

impl WindowLayout {
    /// Returns the bytes at the start of a window that belong to monitors and proxies.
    pub fn link_bytes(&self) -> u64 {
        CONTROL_PARTITION_BYTES + self.data_bytes
    }
}

impl Rack {
    /// Returns the layout of windows. Data partitions get half of what follows the control partition, up to their
    /// maximum useful size; spans get the rest.
    pub fn window_layout(&self) -> WindowLayout {
        let rest_bytes = self.device.window_bytes.saturating_sub(CONTROL_PARTITION_BYTES);
        if self.trust != Trust::Direct {
            return WindowLayout { data_bytes: rest_bytes, spans: None };
        }
        let partitions = self.data_partitions().len() as u64;
        let of_each = if self.link.is_some() { DATA_PARTITION_BYTES_USED_TIMED } else { DATA_PARTITION_BYTES_USED };
        let used_bytes = partitions * of_each;
        let half_bytes = (rest_bytes / 2).next_multiple_of(PAGE_BYTES);
        let data_bytes = half_bytes.min(used_bytes).max(partitions * self.partition_bytes_min());
        let count = (rest_bytes.saturating_sub(data_bytes) / SPAN_BYTES).min(SPANS_MAX);
        let spans = Spans { offset_bytes: CONTROL_PARTITION_BYTES + data_bytes, span_bytes: SPAN_BYTES, count };
        WindowLayout { data_bytes, spans: (count > 0).then_some(spans) }
    }

    /// Returns the minimum size of a data partition in bytes.
    pub(crate) fn partition_bytes_min(&self) -> u64 {
        if self.link.is_some() { MODELLED_PARTITION_BYTES_MIN } else { DATA_PARTITION_BYTES_MIN }
    }

    /// Returns the size in bytes of the smallest window that holds the partitions and, with direct trust, one span.
    pub(crate) fn window_bytes_min(&self) -> u64 {
        let data_bytes = self.data_partitions().len() as u64 * self.partition_bytes_min();
        let span_bytes = if self.trust == Trust::Direct { SPAN_BYTES } else { 0 };
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
        fn parts_are_disjoint_page_aligned_and_within_the_window(
            pages in 17..1_000_000_u64,
            count in 1..=PARTITIONS_MAX as u16,
            is_modelled: bool,
        ) {
            let timing = is_modelled.then_some(Timing::Gen3x16);
            let rack = rack_over(timing, pages * PAGE_BYTES, count, Trust::Direct);
            let layout = rack.window_layout();
            prop_assume!(rack.device.window_bytes >= rack.window_bytes_min());
            prop_assert!(layout.data_bytes >= u64::from(count) * DATA_PARTITION_BYTES_MIN);
            let spans = layout.spans.expect("room for one");
            prop_assert!(spans.count >= 1 && spans.offset_bytes == layout.link_bytes());
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
            prop_assert!(rack(least_bytes).window_layout().spans.is_some());
            prop_assert!(rack(least_bytes - 2 * PAGE_BYTES).window_layout().spans.is_none());
        }
    }

    #[test]
    fn without_direct_trust_the_partitions_take_the_whole_window() {
        let layout = rack(4 << 20, 2, Trust::Proxy).window_layout();
        assert_eq!(layout, WindowLayout { data_bytes: (4 << 20) - CONTROL_PARTITION_BYTES, spans: None });
    }
}
