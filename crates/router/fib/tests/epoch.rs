//! The loom model checker explores every interleaving of readers and a writer that reuses memory, with the code of
//! `epoch.rs` itself. Readers read a table of one entry, the number of a block; the writer unlinks a block, and poisons
//! it as soon as it is free.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
    pub(crate) use loom::sync::{Arc, Mutex};
}

#[allow(dead_code, reason = "some items are used only by the tables")]
#[path = "../src/epoch.rs"]
mod epoch;

use epoch::{Domain, Participant, Retired};
use loom::thread;
use sync::{Arc, AtomicU64, Ordering};

/// Content of a block after its grace period.
const POISON: u64 = 99;

struct Table {
    entry: AtomicU64,
    blocks: [AtomicU64; 3],
}

impl Table {
    fn new() -> Table {
        Table { entry: AtomicU64::new(0), blocks: [AtomicU64::new(10), AtomicU64::new(11), AtomicU64::new(12)] }
    }

    fn read(&self, reader: &mut Participant) -> u64 {
        let guard = reader.pin();
        let block = self.entry.load(Ordering::Relaxed);
        loom::sync::atomic::fence(Ordering::Acquire);
        let found = self.blocks[block as usize].load(Ordering::Relaxed);
        assert_eq!(found, 10 + block, "the block of the entry is intact");
        drop(guard);
        block
    }

    /// Replaces the block, and retires the former one.
    fn replace(&self, domain: &Domain, retired: &mut Retired<u64>, new: u64) {
        let old = self.entry.load(Ordering::Relaxed);
        self.entry.store(new, Ordering::Release);
        retired.push(domain, old);
    }

    fn reclaim(&self, domain: &Domain, retired: &mut Retired<u64>) {
        retired.collect(domain, |block| self.blocks[block as usize].store(POISON, Ordering::Relaxed));
    }
}

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

#[test]
fn nothing_is_reused_while_a_reader_may_hold_it() {
    model(|| {
        let (table, domain) = (Arc::new(Table::new()), Arc::new(Domain::new()));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (table, mut reader) = (table.clone(), Domain::register(&domain));
                thread::spawn(move || table.read(&mut reader))
            })
            .collect();
        let mut retired = Retired::new();
        table.replace(&domain, &mut retired, 1);
        table.reclaim(&domain, &mut retired);
        readers.into_iter().for_each(|reader| {
            reader.join().expect("a reader");
        });
        // Without a pinned reader, everything is reclaimed.
        table.reclaim(&domain, &mut retired);
        assert!(retired.is_empty());
        assert_eq!(table.blocks[0].load(Ordering::Relaxed), POISON);
    });
}

#[test]
fn a_reader_that_is_pinned_again_sees_earlier_replacements_or_delays_their_reclamation() {
    model(|| {
        let (table, domain) = (Arc::new(Table::new()), Arc::new(Domain::new()));
        let reading = {
            let (table, mut reader) = (table.clone(), Domain::register(&domain));
            thread::spawn(move || {
                let first = table.read(&mut reader);
                let second = table.read(&mut reader);
                assert!(first <= second, "block {second} after {first}");
            })
        };
        let mut retired = Retired::new();
        for block in [1, 2] {
            table.replace(&domain, &mut retired, block);
            table.reclaim(&domain, &mut retired);
        }
        reading.join().expect("a reader");
    });
}

#[test]
fn a_pinned_reader_delays_reclamation_and_a_quiescent_one_does_not() {
    model(|| {
        let (table, domain) = (Arc::new(Table::new()), Arc::new(Domain::new()));
        let (mut pinned, quiescent) = (Domain::register(&domain), Domain::register(&domain));
        let mut retired = Retired::new();
        let batch = pinned.pin();
        table.replace(&domain, &mut retired, 1);
        table.reclaim(&domain, &mut retired);
        assert_eq!(retired.len(), 1, "a reader is pinned");
        drop(batch);
        // A reader that enters later does not delay the reclamation of what was unlinked before.
        table.reclaim(&domain, &mut retired);
        assert!(retired.is_empty());
        let batch = pinned.pin();
        table.replace(&domain, &mut retired, 2);
        drop(batch);
        drop((pinned, quiescent));
        table.reclaim(&domain, &mut retired);
        assert!(retired.is_empty());
    });
}
