//! The first page of a device: what lies behind it, said once and compared ever after.
//!
//! Every node computes the words from its own rack file. One that finds the page empty claims it by compare-and-swap
//! and writes the words, and whoever else comes meanwhile with the same rack file writes the same ones: there is no
//! order to keep, and no node to wait for. A node with another rack file loses the claim and is refused.
//!
//! A node that spoils the page later hurts nobody who is there: those have checked it, take every size from their own
//! rack file, and mend it when they look. A node that comes in between waits for that.

use super::Problem;
use super::layout::{Layout, PAGE_BYTES, WORD_BYTES};
use super::memory::DeviceMemory;
use std::thread;
use std::time::{Duration, Instant};

const WORDS: usize = 7;
const CLAIM_OFFSET: usize = WORDS * WORD_BYTES;

/// How long a page may be half-written, or spoiled until a node mends it.
const PATIENCE: Duration = Duration::from_millis(500);
const NAP: Duration = Duration::from_millis(5);

/// The page and what it must say.
#[derive(Debug)]
pub(super) struct Header {
    page: DeviceMemory,
    words: [u64; WORDS],
    claim: u64,
}

impl Header {
    pub(super) fn new(page: DeviceMemory, layout: &Layout) -> Self {
        let words = layout.words();
        Self { page, words, claim: claim_of(&words) }
    }

    /// Finds the layout on the device, or puts it there where there is none, or whatever there is with `overwrites`.
    ///
    /// # Errors
    /// What is there instead, and stays.
    pub(super) fn settle(&self, overwrites: bool) -> Result<(), Problem> {
        if overwrites {
            self.write_all();
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let problem = match self.look() {
                Ok(()) => return Ok(()),
                Err(problem) => problem,
            };
            if Instant::now() > deadline {
                return Err(problem);
            }
            thread::sleep(NAP);
        }
    }

    /// Writes what somebody has spoiled; whether there was something.
    pub(super) fn mend(&self) -> bool {
        let is_spoiled = self.found() != self.words || self.page.fetch(CLAIM_OFFSET) != self.claim;
        if is_spoiled {
            self.write_all();
        }
        is_spoiled
    }

    fn look(&self) -> Result<(), Problem> {
        if self.found()[0] == 0 {
            self.claim()?;
            self.write();
        }
        self.compare()
    }

    /// Claims an empty page.
    fn claim(&self) -> Result<(), Problem> {
        if self.page.fetch(CLAIM_OFFSET) == 0
            && let Some(found) = self.first_word_used()
        {
            return Err(Problem::Stranger { found });
        }
        let found = self.page.claim(CLAIM_OFFSET, self.claim);
        if found == 0 || found == self.claim { Ok(()) } else { Err(Problem::Claimed) }
    }

    /// A word of the page that is not zero while nobody has claimed it.
    fn first_word_used(&self) -> Option<u64> {
        let used = (0..PAGE_BYTES).step_by(WORD_BYTES).map(|offset| self.page.fetch(offset)).find(|word| *word != 0);
        used.filter(|_| self.page.fetch(CLAIM_OFFSET) != self.claim)
    }

    fn compare(&self) -> Result<(), Problem> {
        let found = self.found();
        let [magic, version, nodes, window_bytes, ..] = found;
        if magic != self.words[0] {
            return Err(Problem::Stranger { found: magic });
        }
        if version != self.words[1] {
            return Err(Problem::Version { found: version });
        }
        let differs = |what, index: usize| Problem::Shape { what, found: found[index], expected: self.words[index] };
        if nodes != self.words[2] {
            return Err(differs("nodes", 2));
        }
        if window_bytes != self.words[3] {
            return Err(differs("windows of bytes", 3));
        }
        match (4..WORDS).find(|&index| found[index] != self.words[index]) {
            Some(index) => Err(differs(["control blocks of bytes", "bells", "bytes in all"][index - 4], index)),
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

    /// The magic last: who sees it sees the rest.
    fn write(&self) {
        for index in (0..WORDS).rev() {
            self.page.publish(index * WORD_BYTES, self.words[index]);
        }
    }
}

/// A number that is the same for the same words, and not zero (FNV-1a).
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
        Header::new(page, &Layout::new(nodes, 4096).expect("a layout"))
    }

    fn page() -> Region {
        Region::heap(PAGE_BYTES)
    }

    #[test]
    fn whoever_comes_first_writes_it_and_whoever_comes_later_finds_it() {
        let page = page();
        header(&page, 2).settle(false).expect("the first");
        let words: Vec<u64> = (0..8).map(|index| page.load_u64(index * 8, Ordering::Relaxed)).collect();
        header(&page, 2).settle(false).expect("the second");
        assert_eq!((0..8).map(|index| page.load_u64(index * 8, Ordering::Relaxed)).collect::<Vec<_>>(), words);
        assert_eq!(words[..3], [u64::from_le_bytes(*b"XLANEWIN"), 1, 2]);
    }

    #[test]
    fn of_nodes_that_come_at_once_with_two_rack_files_those_with_one_get_in() {
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
    fn what_is_not_ours_is_refused_and_named_and_left_alone() {
        let spoilt = |offset: usize, value: u64| {
            let page = page();
            header(&page, 2).settle(false).expect("ours");
            page.store_u64(offset, value.to_le(), Ordering::Relaxed);
            let problem = header(&page, 2).settle(false).expect_err("not ours");
            assert_eq!(page.load_u64(offset, Ordering::Relaxed), value.to_le());
            problem
        };
        assert!(matches!(spoilt(0, 0xbad), Problem::Stranger { found: 0xbad }));
        assert!(matches!(spoilt(8, 2), Problem::Version { found: 2 }));
        assert!(matches!(spoilt(16, 3), Problem::Shape { what: "nodes", found: 3, expected: 2 }));
        assert!(matches!(spoilt(24, 64), Problem::Shape { what: "windows of bytes", found: 64, expected: 4096 }));
        assert!(matches!(spoilt(48, 1), Problem::Shape { what: "bytes in all", found: 1, .. }));
    }

    #[test]
    fn a_page_that_begins_with_zeros_but_is_not_empty_is_a_strangers() {
        let page = page();
        page.store_u64(4088, 5_u64.to_le(), Ordering::Relaxed);
        assert!(matches!(header(&page, 2).settle(false), Err(Problem::Stranger { found: 5 })));
        header(&page, 2).settle(true).expect("told to overwrite");
    }

    #[test]
    fn a_spoiled_header_is_mended_and_who_comes_in_between_waits_for_that() {
        let page = page();
        let resident = header(&page, 2);
        resident.settle(false).expect("ours");
        assert!(!resident.mend());
        page.write(0, &[0xee; PAGE_BYTES]);
        thread::scope(|scope| {
            let newcomer = scope.spawn(|| header(&page, 2).settle(false));
            thread::sleep(4 * NAP); // Most likely it waits by now; nothing depends on it.
            assert!(resident.mend());
            newcomer.join().expect("the newcomer").expect("in");
        });
        assert!(!resident.mend());
    }
}
