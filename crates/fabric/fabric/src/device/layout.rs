//! Offsets in the memory that all nodes of a rack share.
//!
//! ```text
//!  0      header, one page
//!  4096   control blocks, 256 bytes for each ordered pair of nodes
//!  ...    windows, one for each ordered pair, each on pages of its own
//! ```
//!
//! A pair is (writer, reader). Its window is the writer's outbound window and the reader's inbound window. Only the
//! writer stores in its control block. All words are little endian.

use super::error::DeviceProblem;
use super::format::{BLOCK_BYTES, MAGIC, NODES_MAX, NodeSlot, PAGE_BYTES, VECTORS_MAX, VERSION};
use crate::memory_link::is_window_size;
use std::ops::Range;

/// The layout for a number of nodes and a size of windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLayout {
    nodes: u8,
    window_bytes: usize,
}

impl DeviceLayout {
    /// Returns the layout for `nodes` with windows of `window_bytes`.
    ///
    /// # Errors
    /// [`DeviceProblem::Nodes`] or [`DeviceProblem::WindowSize`].
    pub fn new(nodes: u8, window_bytes: usize) -> Result<Self, DeviceProblem> {
        if !(2..=NODES_MAX).contains(&nodes) {
            return Err(DeviceProblem::Nodes { nodes });
        }
        let total = window_bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|stride| stride.checked_mul(pairs(nodes)))
            .and_then(|windows| windows.checked_add(windows_offset(nodes)));
        match total {
            Some(total) if is_window_size(window_bytes) && isize::try_from(total).is_ok() => {
                Ok(Self { nodes, window_bytes })
            }
            _ => Err(DeviceProblem::WindowSize { window_bytes }),
        }
    }

    /// Returns the layout for `nodes` with the largest windows that a device of `device_bytes` has room for.
    ///
    /// # Errors
    /// [`DeviceProblem::Nodes`] or [`DeviceProblem::TooSmall`].
    pub fn largest(nodes: u8, device_bytes: u64) -> Result<Self, DeviceProblem> {
        let smallest = Self::new(nodes, PAGE_BYTES)?;
        smallest.check_room(device_bytes)?;
        let room_bytes = device_bytes.min(isize::MAX as u64) as usize - windows_offset(nodes);
        Self::new(nodes, room_bytes / pairs(nodes) / PAGE_BYTES * PAGE_BYTES)
    }

    /// Checks that a device of `device_bytes` has room for the layout.
    ///
    /// # Errors
    /// [`DeviceProblem::TooSmall`].
    pub fn check_room(&self, device_bytes: u64) -> Result<(), DeviceProblem> {
        let needed_bytes = self.bytes();
        if device_bytes >= needed_bytes as u64 {
            return Ok(());
        }
        let (nodes, window_bytes) = (self.nodes, self.window_bytes);
        Err(DeviceProblem::TooSmall { found_bytes: device_bytes, nodes, window_bytes, needed_bytes })
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u8 {
        self.nodes
    }

    /// The slots of all nodes.
    pub fn slots(&self) -> impl Iterator<Item = NodeSlot> + use<> {
        (0..self.nodes).map(NodeSlot)
    }

    /// Bytes of each window.
    pub fn window_bytes(&self) -> usize {
        self.window_bytes
    }

    /// Bytes of memory that the layout takes.
    pub fn bytes(&self) -> usize {
        windows_offset(self.nodes) + pairs(self.nodes) * self.window_stride_bytes()
    }

    /// The span of the control block of a pair.
    ///
    /// # Panics
    /// If the rack has no such pair.
    pub fn control(&self, writer: NodeSlot, reader: NodeSlot) -> Range<usize> {
        let begin = PAGE_BYTES + self.pair(writer, reader) * BLOCK_BYTES;
        begin..begin + BLOCK_BYTES
    }

    /// The span of the window of a pair.
    ///
    /// # Panics
    /// If the rack has no such pair.
    pub fn window(&self, writer: NodeSlot, reader: NodeSlot) -> Range<usize> {
        let begin = windows_offset(self.nodes) + self.pair(writer, reader) * self.window_stride_bytes();
        begin..begin + self.window_bytes
    }

    /// The words of the header, without the claim.
    pub(super) fn words(&self) -> [u64; 7] {
        let (block, vectors) = (BLOCK_BYTES as u64, VECTORS_MAX as u64);
        [MAGIC, VERSION, u64::from(self.nodes), self.window_bytes as u64, block, vectors, self.bytes() as u64]
    }

    fn window_stride_bytes(&self) -> usize {
        self.window_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Index of a pair. Pairs are counted writer by writer.
    fn pair(&self, writer: NodeSlot, reader: NodeSlot) -> usize {
        let is_pair = writer != reader && writer.0 < self.nodes && reader.0 < self.nodes;
        assert!(is_pair, "pair {writer} to {reader} of {} nodes", self.nodes);
        let index_of_reader = reader.index() - usize::from(reader > writer);
        writer.index() * (usize::from(self.nodes) - 1) + index_of_reader
    }
}

/// Number of ordered pairs of different nodes.
fn pairs(nodes: u8) -> usize {
    usize::from(nodes) * (usize::from(nodes) - 1)
}

fn windows_offset(nodes: u8) -> usize {
    PAGE_BYTES + (pairs(nodes) * BLOCK_BYTES).next_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use volmem::CACHE_LINE_BYTES;

    fn layouts() -> impl Strategy<Value = DeviceLayout> {
        (2..=NODES_MAX, 1..5_000_usize)
            .prop_map(|(nodes, lines)| DeviceLayout::new(nodes, lines * CACHE_LINE_BYTES).expect("a layout"))
    }

    fn spans(layout: &DeviceLayout) -> Vec<Range<usize>> {
        let pairs = layout.slots().flat_map(|writer| layout.slots().map(move |reader| (writer, reader)));
        let pairs = pairs.filter(|(writer, reader)| writer != reader);
        pairs.flat_map(|(writer, reader)| [layout.control(writer, reader), layout.window(writer, reader)]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_spans_overlap_and_all_lie_behind_the_header_and_inside_the_device(layout in layouts()) {
            let mut spans = spans(&layout);
            spans.sort_by_key(|span| span.start);
            let nodes = usize::from(layout.nodes());
            prop_assert_eq!(spans.len(), 2 * nodes * (nodes - 1));
            prop_assert!(spans[0].start >= PAGE_BYTES);
            prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(spans[spans.len() - 1].end <= layout.bytes());
        }

        #[test]
        fn windows_are_page_aligned_and_control_blocks_are_line_aligned(layout in layouts()) {
            for (writer, reader) in [(NodeSlot(0), NodeSlot(1)), (NodeSlot(layout.nodes() - 1), NodeSlot(0))] {
                let (control, window) = (layout.control(writer, reader), layout.window(writer, reader));
                prop_assert_eq!((control.start % CACHE_LINE_BYTES, control.len()), (0, BLOCK_BYTES));
                prop_assert_eq!((window.start % PAGE_BYTES, window.len()), (0, layout.window_bytes()));
            }
        }

        #[test]
        fn the_largest_layout_fits_and_the_next_one_does_not(nodes in 2..=NODES_MAX, device_bytes in 0..1_u64 << 40) {
            match DeviceLayout::largest(nodes, device_bytes) {
                Ok(layout) => {
                    prop_assert!(layout.bytes() as u64 <= device_bytes);
                    let next = DeviceLayout::new(nodes, layout.window_bytes() + PAGE_BYTES).expect("a layout");
                    prop_assert!(next.check_room(device_bytes).is_err());
                }
                Err(problem) => {
                    let needed = DeviceLayout::new(nodes, PAGE_BYTES).expect("the smallest").bytes() as u64;
                    let is_too_small = matches!(problem, DeviceProblem::TooSmall { .. });
                    prop_assert!(is_too_small && device_bytes < needed);
                }
            }
        }
    }

    #[test]
    fn a_rack_has_2_to_32_nodes_and_windows_of_whole_lines() {
        for nodes in [0, 1, 33, 255] {
            assert!(
                matches!(DeviceLayout::new(nodes, 4096), Err(DeviceProblem::Nodes { nodes: found }) if found == nodes)
            );
        }
        for window_bytes in [0, 1, 63, 65, usize::MAX, usize::MAX & !63, isize::MAX as usize & !63] {
            let problem = DeviceLayout::new(2, window_bytes).expect_err("no window");
            assert!(matches!(problem, DeviceProblem::WindowSize { window_bytes: found } if found == window_bytes));
        }
        assert!(DeviceLayout::largest(2, u64::MAX).is_ok());
    }

    #[test]
    fn a_node_has_no_window_to_itself_nor_to_one_outside_the_rack() {
        let layout = DeviceLayout::new(3, 64).expect("a layout");
        for (writer, reader) in [(0, 0), (0, 3), (3, 0), (255, 1)] {
            let window = std::panic::catch_unwind(|| layout.window(NodeSlot(writer), NodeSlot(reader)));
            assert!(window.is_err(), "{writer} to {reader}");
        }
    }

    #[test]
    fn offsets_of_version_1_do_not_change() {
        let layout = DeviceLayout::new(3, 8192).expect("a layout");
        assert_eq!(layout.control(NodeSlot(0), NodeSlot(1)), 4096..4352);
        assert_eq!(layout.control(NodeSlot(1), NodeSlot(0)), 4608..4864);
        assert_eq!(layout.control(NodeSlot(2), NodeSlot(1)), 5376..5632);
        assert_eq!(layout.window(NodeSlot(0), NodeSlot(1)), 8192..16384);
        assert_eq!(layout.window(NodeSlot(2), NodeSlot(1)), 49152..57344);
        assert_eq!(layout.bytes(), 57344);
        assert_eq!(layout.words(), [0x4e49_5745_4e41_4c58, 1, 3, 8192, 256, 16, 57344]);
    }
}
