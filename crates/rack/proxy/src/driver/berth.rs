//! The core that a thread runs on.
//!
//! With a core of its own in the rack file a thread stays there. Without one the scheduler chooses, which does well
//! while processors suffice. Where they do not, the parties of a message yield to each other instead of sleeping; the
//! scheduler sees programs that compute, moves them about, and leaves both proxies of a ping-pong on one core for many
//! milliseconds. So as long as it hands on short messages and others take short turns when it yields, a thread keeps to
//! one core: those of the nodes of one machine to different ones. Streams alone fare better by the scheduler.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// For how long nobody must have taken a turn before a thread runs anywhere again.
const ALONE_NS: u64 = 1_000_000_000;

/// Where a thread runs: by default anywhere.
#[derive(Debug, Default)]
pub(super) struct Berth {
    /// Where it may run.
    all: CpuSet,
    /// Where it runs in company, if that is its own to choose.
    home: Option<CpuSet>,
    /// When others last took turns, while it keeps to its home.
    company_ns: Option<u64>,
}

impl Berth {
    /// Binds the calling thread to a core of the rack file. Without one, for when that helps, it has the core of its
    /// node's slot among those that it may run on: a proxy has one such thread at most. Where that cannot be, the
    /// scheduler chooses, which costs speed and nothing else.
    pub(super) fn new(core: Option<u16>, slot: usize) -> Self {
        if let Some(core) = core {
            let _ = sched_setaffinity(None, &only(usize::from(core)));
        }
        let all = sched_getaffinity(None).unwrap_or_default();
        let home = if core.is_none() { nth_of(&all, slot).map(only) } else { None };
        Self { all, home, company_ns: None }
    }

    /// Whether this thread hands on short messages, and others take short turns when it yields.
    pub(super) fn note(&mut self, has_company: bool, now_ns: u64) {
        let Some(home) = &self.home else { return };
        let is_home = self.company_ns.is_some();
        let had_company = self.company_ns.is_some_and(|then_ns| now_ns.saturating_sub(then_ns) < ALONE_NS);
        let stays_home = has_company || had_company;
        if stays_home != is_home {
            let _ = sched_setaffinity(None, if stays_home { home } else { &self.all });
        }
        if has_company {
            self.company_ns = Some(now_ns);
        } else if !had_company {
            self.company_ns = None;
        }
    }
}

fn only(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

/// The core of a slot, over and over; none where there is but one.
fn nth_of(all: &CpuSet, slot: usize) -> Option<usize> {
    let count = all.count() as usize;
    if count < 2 {
        return None;
    }
    (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).nth(slot % count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores() -> Vec<usize> {
        let all = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).collect()
    }

    #[test]
    fn slots_go_round_the_cores_that_there_are() {
        let mut all = CpuSet::new();
        [1, 4, 9].into_iter().for_each(|core| all.set(core));
        assert_eq!([0, 1, 2, 3, 7].map(|slot| nth_of(&all, slot)), [1, 4, 9, 1, 4].map(Some));
        assert_eq!(nth_of(&only(3), 0), None);
    }

    #[test]
    fn a_thread_keeps_to_its_core_in_company_and_for_a_while_after() {
        let all = cores();
        if all.len() < 2 {
            return;
        }
        let (mut berth, home) = (Berth::new(None, 1), vec![all[1]]);
        for (has_company, now_ns, expected) in [
            (false, 1, &all),
            (true, 2, &home),
            (false, 3, &home),
            (true, 4, &home),
            (false, 3 + ALONE_NS, &home),
            (false, 4 + ALONE_NS, &all),
        ] {
            berth.note(has_company, now_ns);
            assert_eq!(&cores(), expected, "{has_company} at {now_ns}");
        }
    }

    #[test]
    fn a_thread_with_a_core_of_the_rack_file_stays_there() {
        let all = cores();
        let mut berth = Berth::new(Some(all[0] as u16), 1);
        for has_company in [false, true, false] {
            berth.note(has_company, 1);
            assert_eq!(cores(), [all[0]]);
        }
    }
}
