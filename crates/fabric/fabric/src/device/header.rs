//! The first page of a device: the header, which is written once and then only compared.
//!
//! Every node computes the header from its own rack file. A node that finds the page empty claims it by
//! compare-and-swap and writes the header. Other nodes with the same rack file write the same words at the same time,
//! so no node waits for another. A node with another rack file loses the claim and is refused.
//!
//! A node that overwrites the page later does not harm the others: they have checked it, take every size from their own
//! rack files, and repair it when they poll. A node that opens the device in between waits for the repair.

use super::error::DeviceProblem;
use super::format::{PAGE_BYTES, WORD_BYTES};
use super::layout::DeviceLayout;
use super::memory::DeviceMemory;
use std::thread;
use std::time::{Duration, Instant};

const WORDS: usize = 7;
const CLAIM_OFFSET: usize = WORDS * WORD_BYTES;

/// Longest time that a page may be half-written, or damaged until a node repairs it.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(500);
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The page, and the words that it must hold.
#[derive(Debug)]
pub(super) struct Header {
    page: DeviceMemory,
    words: [u64; WORDS],
    claim: u64,
}

impl Header {
    pub(super) fn new(page: DeviceMemory, layout: &DeviceLayout) -> Self {
        let words = layout.words();
        Self { page, words, claim: claim_of(&words) }
    }

    /// Checks that the device has this header. Writes it where there is none, or in any case with `overwrite`.
    ///
    /// # Errors
    /// The page holds something else. It is left unchanged.
    pub(super) fn settle(&self, overwrite: bool) -> Result<(), DeviceProblem> {
        if overwrite {
            self.write_all();
        }
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let problem = match self.claim_and_compare() {
                Ok(()) => return Ok(()),
                Err(problem) => problem,
            };
            if Instant::now() > deadline {
                return Err(problem);
            }
            thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Writes the header again if it was damaged. Returns whether it was.
    pub(super) fn repair(&self) -> bool {
        let is_damaged = self.found() != self.words || self.page.fetch(CLAIM_OFFSET) != self.claim;
        if is_damaged {
            self.write_all();
        }
        is_damaged
    }

    fn claim_and_compare(&self) -> Result<(), DeviceProblem> {
        if self.found()[0] == 0 {
            self.claim()?;
            self.write();
        }
        self.compare()
    }

    /// Claims an empty page.
    fn claim(&self) -> Result<(), DeviceProblem> {
        if self.page.fetch(CLAIM_OFFSET) == 0
            && let Some(found) = self.first_word_used()
        {
            return Err(DeviceProblem::UnknownContents { found });
        }
        let found = self.page.claim(CLAIM_OFFSET, self.claim);
        if found == 0 || found == self.claim { Ok(()) } else { Err(DeviceProblem::ClaimLost) }
    }

    /// The first word of the page that is not zero, unless a node with the same claim has written it.
    fn first_word_used(&self) -> Option<u64> {
        let used = (0..PAGE_BYTES).step_by(WORD_BYTES).map(|offset| self.page.fetch(offset)).find(|word| *word != 0);
        used.filter(|_| self.page.fetch(CLAIM_OFFSET) != self.claim)
    }

    fn compare(&self) -> Result<(), DeviceProblem> {
        let found = self.found();
        let [magic, version, nodes, window_bytes, ..] = found;
        if magic != self.words[0] {
            return Err(DeviceProblem::UnknownContents { found: magic });
        }
        if version != self.words[1] {
            return Err(DeviceProblem::Version { found: version });
        }
        let differs = |what, index: usize| DeviceProblem::LayoutMismatch {
            what,
            found: found[index],
            expected: self.words[index],
        };
        if nodes != self.words[2] {
            return Err(differs("nodes", 2));
        }
        if window_bytes != self.words[3] {
            return Err(differs("bytes per window", 3));
        }
        match (4..WORDS).find(|&index| found[index] != self.words[index]) {
            Some(index) => {
                Err(differs(["bytes per control block", "doorbells per direction", "bytes in all"][index - 4], index))
            }
            None => Ok(()),
        }
    }

    fn found(&self) -> [u64; WORDS] {
        std::array::from_fn(|index| self.page.fetch(index * WORD_BYTES))
    }

    fn write_all(&self) {
        self.page.publish(CLAIM_OFFSET, self.claim);
        self.write();
    }

    /// Writes the magic word last: a node that sees it sees the other words.
    fn write(&self) {
        for index in (0..WORDS).rev() {
            self.page.publish(index * WORD_BYTES, self.words[index]);
        }
    }
}

/// A hash of the words (FNV-1a), never zero.
fn claim_of(words: &[u64; WORDS]) -> u64 {
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Caching;
    use volmem::Region;
    use volmem::sync::Ordering;

    fn header(page: &Region, nodes: u8) -> Header {
        let page = DeviceMemory::new(page.clone(), Caching::Cached).expect("memory");
        Header::new(page, &DeviceLayout::new(nodes, 4096).expect("a layout"))
    }

    fn page() -> Region {
        Region::heap(PAGE_BYTES)
    }

    #[test]
    fn the_first_node_writes_the_header_and_later_ones_find_it() {
        let page = page();
        header(&page, 2).settle(false).expect("the first");
        let words: Vec<u64> = (0..8).map(|index| page.load_u64(index * 8, Ordering::Relaxed)).collect();
        header(&page, 2).settle(false).expect("the second");
        assert_eq!((0..8).map(|index| page.load_u64(index * 8, Ordering::Relaxed)).collect::<Vec<_>>(), words);
        assert_eq!(words[..3], [u64::from_le_bytes(*b"XLANEWIN"), 1, 2]);
    }

    #[test]
    fn of_nodes_with_two_rack_files_only_those_with_one_of_them_are_accepted() {
        for _ in 0..4 {
            let page = page();
            let settled: Vec<bool> = thread::scope(|scope| {
                let nodes = (0..8).map(|index| {
                    let page = &page;
                    scope.spawn(move || header(page, 2 + index % 2).settle(false).is_ok())
                });
                let nodes: Vec<_> = nodes.collect();
                nodes.into_iter().map(|node| node.join().expect("a node")).collect()
            });
            let winners = settled[0];
            assert!((0..8).all(|index| settled[index] == (winners == (index % 2 == 0))), "{settled:?}");
        }
    }

    #[test]
    fn an_unknown_header_is_refused_and_left_unchanged() {
        let with_word = |offset: usize, value: u64| {
            let page = page();
            header(&page, 2).settle(false).expect("a header");
            page.store_u64(offset, value.to_le(), Ordering::Relaxed);
            let problem = header(&page, 2).settle(false).expect_err("refused");
            assert_eq!(page.load_u64(offset, Ordering::Relaxed), value.to_le());
            problem
        };
        assert!(matches!(with_word(0, 0xbad), DeviceProblem::UnknownContents { found: 0xbad }));
        assert!(matches!(with_word(8, 2), DeviceProblem::Version { found: 2 }));
        assert!(matches!(with_word(16, 3), DeviceProblem::LayoutMismatch { what: "nodes", found: 3, expected: 2 }));
        assert!(matches!(
            with_word(24, 64),
            DeviceProblem::LayoutMismatch { what: "bytes per window", found: 64, expected: 4096 }
        ));
        assert!(matches!(with_word(48, 1), DeviceProblem::LayoutMismatch { what: "bytes in all", found: 1, .. }));
    }

    #[test]
    fn a_page_that_begins_with_zeros_but_is_not_empty_is_unknown() {
        let page = page();
        page.store_u64(4088, 5_u64.to_le(), Ordering::Relaxed);
        assert!(matches!(header(&page, 2).settle(false), Err(DeviceProblem::UnknownContents { found: 5 })));
        header(&page, 2).settle(true).expect("told to overwrite");
    }

    #[test]
    fn a_damaged_header_is_repaired_and_a_node_that_opens_meanwhile_waits() {
        let page = page();
        let resident = header(&page, 2);
        resident.settle(false).expect("a header");
        assert!(!resident.repair());
        page.write(0, &[0xee; PAGE_BYTES]);
        thread::scope(|scope| {
            let newcomer = scope.spawn(|| header(&page, 2).settle(false));
            thread::sleep(4 * RETRY_INTERVAL); // It probably waits by now; the result does not depend on it.
            assert!(resident.repair());
            newcomer.join().expect("the newcomer").expect("accepted");
        });
        assert!(!resident.repair());
    }
}
