//! Translation of the device's addresses: an IOTLB, and page table walkers for its misses.
//!
//! Requests are accepted in the order of arrival. A hit adds no time, because the time of the root complex includes the
//! lookup. A miss waits for a walker and then for the walk; requests for a page with a walk in progress wait for that
//! walk. Only the oldest few requests are considered: one more enters when one leaves. All lines of a request share one
//! translation, because no request crosses a page. After the walk a read keeps its walker while its lines are looked up
//! again one by one, which the published curves of reads longer than a line require.

use sim::{Random, Span, Time};

use super::parameters::IommuParameters;
use super::tlb::Tlb;

/// The IOMMU: its IOTLB and its walkers.
#[derive(Clone, Debug)]
pub struct Iommu {
    page_shift: u32,
    iotlb: Tlb,
    is_in_order: bool,
    walk: Span,
    read_hold: Span,
    line_replay: Span,
    walkers_free_at: Vec<Time>,
    reads: TranslationQueue,
    writes: TranslationQueue,
    retired: Time,
    /// Number of lookups that missed.
    pub misses: u64,
    /// Number of lookups.
    pub lookups: u64,
}

/// The requests under consideration, as the times at which the last few leave.
#[derive(Clone, Debug)]
struct TranslationQueue {
    departures: Vec<Time>,
    oldest: usize,
}

impl TranslationQueue {
    fn new(requests: u32) -> Self {
        Self { departures: vec![Time::ZERO; requests as usize], oldest: 0 }
    }

    /// Returns the time at which one more request can enter.
    fn room_at(&self) -> Time {
        self.departures[self.oldest]
    }

    /// Enters a request that leaves at `leaves`, in place of the oldest.
    fn enter(&mut self, leaves: Time) {
        self.departures[self.oldest] = leaves;
        self.oldest = (self.oldest + 1) % self.departures.len();
    }
}

/// A request for translation.
#[derive(Clone, Copy, Debug)]
pub struct Lookup {
    /// Time of arrival.
    pub arrived: Time,
    /// Address in the window.
    pub address: u64,
    /// Number of lines that it touches.
    pub lines: u32,
    /// Whether it is a read.
    pub is_read: bool,
}

impl Iommu {
    /// Returns an IOMMU with an empty IOTLB for a window of this many bytes in pages of `1 << page_shift` bytes.
    pub fn new(parameters: &IommuParameters, page_shift: u32, window_bytes: u64, random: Random) -> Self {
        let pages = (window_bytes >> page_shift) as usize + 1;
        let (entries, ways) = (parameters.entries, parameters.ways);
        Self {
            page_shift,
            iotlb: Tlb::new(entries, ways, parameters.replacement, pages, random),
            is_in_order: parameters.in_order,
            walk: Span::from_ns(parameters.walk_ns),
            read_hold: Span::from_ns(parameters.read_hold_ns),
            line_replay: Span::from_ns(parameters.line_replay_ns),
            walkers_free_at: vec![Time::ZERO; parameters.walkers as usize],
            reads: TranslationQueue::new(parameters.read_queue),
            writes: TranslationQueue::new(parameters.write_queue),
            retired: Time::ZERO,
            misses: 0,
            lookups: 0,
        }
    }

    /// Returns the time at which the request is translated and continues. `page_table_wait` returns the time that a
    /// walk that begins at the given time waits for memory.
    pub fn translate(&mut self, lookup: Lookup, page_table_wait: impl FnOnce(Time) -> Span) -> Time {
        let page = (lookup.address >> self.page_shift) as u32;
        self.lookups += 1;
        let begun = lookup.arrived.max(self.queue(lookup.is_read).room_at());
        let known = self.iotlb.lookup(page).unwrap_or_else(|| self.walk(page, begun, lookup, page_table_wait));
        let translated = begun.max(known);
        self.retired = self.retired.max(translated);
        let leaves = if self.is_in_order { self.retired } else { translated };
        self.queue(lookup.is_read).enter(leaves);
        leaves
    }

    fn queue(&mut self, is_read: bool) -> &mut TranslationQueue {
        if is_read { &mut self.reads } else { &mut self.writes }
    }

    /// Walks the page table for `page`, enters the translation, and returns the time at which the walk is complete.
    fn walk(&mut self, page: u32, at: Time, lookup: Lookup, page_table_wait: impl FnOnce(Time) -> Span) -> Time {
        self.misses += 1;
        let walker = self.first_free_walker();
        let begun = at.max(self.walkers_free_at[walker]);
        let complete = begun + self.walk + page_table_wait(begun);
        let lines = self.line_replay * u64::from(lookup.lines);
        let hold = if lookup.is_read { self.read_hold + lines } else { Span::ZERO };
        self.walkers_free_at[walker] = complete + hold;
        self.iotlb.insert(page, complete);
        complete
    }

    fn first_free_walker(&self) -> usize {
        let times = self.walkers_free_at.iter().enumerate();
        times.min_by_key(|&(_, free_at)| *free_at).map_or(0, |(walker, _)| walker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::parameters::Replacement;

    fn parameters() -> IommuParameters {
        IommuParameters {
            entries: 16,
            ways: 0,
            replacement: Replacement::Random,
            read_queue: 8,
            write_queue: 8,
            walkers: 2,
            walk_ns: 300.0,
            read_hold_ns: 0.0,
            line_replay_ns: 0.0,
            in_order: true,
        }
    }

    fn iommu(parameters: &IommuParameters) -> Iommu {
        Iommu::new(parameters, 12, 1 << 20, Random::new(3, "iommu"))
    }

    fn look(iommu: &mut Iommu, arrived_ns: u64, page: u64) -> u64 {
        let arrived = Time::from_ps(arrived_ns * 1000);
        let lookup = Lookup { arrived, address: page << 12, lines: 1, is_read: true };
        iommu.translate(lookup, |_| Span::ZERO).ps() / 1000
    }

    #[test]
    fn a_miss_costs_a_walk_and_a_hit_nothing() {
        let mut iommu = iommu(&parameters());
        assert_eq!(look(&mut iommu, 0, 5), 300);
        assert_eq!(look(&mut iommu, 1000, 5), 1000);
        assert_eq!((iommu.misses, iommu.lookups), (1, 2));
    }

    #[test]
    fn requests_for_one_page_share_a_walk() {
        let mut iommu = iommu(&parameters());
        assert_eq!(look(&mut iommu, 0, 5), 300);
        assert_eq!(look(&mut iommu, 10, 5), 300);
        assert_eq!(iommu.misses, 1);
    }

    #[test]
    fn walks_wait_for_walkers() {
        let mut iommu = iommu(&parameters());
        let done: Vec<u64> = (0..5).map(|page| look(&mut iommu, 0, page)).collect();
        assert_eq!(done, [300, 300, 600, 600, 900]);
    }

    #[test]
    fn hits_wait_behind_misses_only_in_order() {
        for (in_order, expected) in [(true, 800), (false, 510)] {
            let mut iommu = iommu(&IommuParameters { in_order, ..parameters() });
            look(&mut iommu, 0, 1);
            assert_eq!(look(&mut iommu, 500, 2), 800);
            assert_eq!(look(&mut iommu, 510, 1), expected);
        }
    }

    #[test]
    fn a_request_is_considered_when_the_queue_has_room() {
        let mut iommu = iommu(&IommuParameters { read_queue: 2, walkers: 8, ..parameters() });
        let done: Vec<u64> = (0..6).map(|page| look(&mut iommu, 0, page)).collect();
        assert_eq!(done, [300, 300, 600, 600, 900, 900]);
    }

    #[test]
    fn the_lines_of_a_read_occupy_the_walker() {
        let mut iommu = iommu(&IommuParameters { walkers: 1, line_replay_ns: 20.0, ..parameters() });
        let wide = Lookup { arrived: Time::ZERO, address: 0, lines: 4, is_read: true };
        assert_eq!(iommu.translate(wide, |_| Span::ZERO).ps(), 300_000, "the read itself continues");
        assert_eq!(look(&mut iommu, 0, 1), 680);
    }

    #[test]
    fn the_hit_rate_is_entries_divided_by_pages() {
        for replacement in [Replacement::Random, Replacement::Lru] {
            let mut iommu = iommu(&IommuParameters { replacement, ..parameters() });
            let mut random = Random::new(9, "test");
            for request in 0..100_000 {
                look(&mut iommu, request * 1000, random.below(64));
            }
            let hits = 1.0 - iommu.misses as f64 / iommu.lookups as f64;
            assert!((hits - 16.0 / 64.0).abs() < 0.01, "{hits}");
        }
    }
}
