//! Every interleaving of readers and a writer that uses things again, by the loom model checker, of the code in `epoch`
//! itself. Readers look into a table of one entry, the number of a block; the writer takes a block out, and spoils it
//! as soon as it may.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
    pub(crate) use loom::sync::{Arc, Mutex};
}

#[allow(dead_code, reason = "what only the tables use")]
#[path = "../src/epoch.rs"]
mod epoch;

use epoch::{Domain, Participant, Retired};
use loom::thread;
use sync::{Arc, AtomicU64, Ordering};

/// What a block holds once nobody may look at it.
const SPOILT: u64 = 99;

struct Table {
    entry: AtomicU64,
    blocks: [AtomicU64; 3],
}

impl Table {
    fn new() -> Table {
        Table { entry: AtomicU64::new(0), blocks: [AtomicU64::new(10), AtomicU64::new(11), AtomicU64::new(12)] }
    }

    fn look(&self, reader: &mut Participant) -> u64 {
        let inside = reader.pin();
        let block = self.entry.load(Ordering::Relaxed);
        loom::sync::atomic::fence(Ordering::Acquire);
        let found = self.blocks[block as usize].load(Ordering::Relaxed);
        assert_eq!(found, 10 + block, "the block that the entry led to");
        drop(inside);
        block
    }

    /// Puts another block in the place of one, which waits.
    fn replace(&self, domain: &Domain, retired: &mut Retired<u64>, new: u64) {
        let old = self.entry.load(Ordering::Relaxed);
        self.entry.store(new, Ordering::Release);
        retired.push(domain, old);
    }

    fn spoil(&self, domain: &Domain, retired: &mut Retired<u64>) {
        retired.collect(domain, |block| self.blocks[block as usize].store(SPOILT, Ordering::Relaxed));
    }
}

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

#[test]
fn nothing_is_used_again_while_a_reader_may_hold_it() {
    model(|| {
        let (table, domain) = (Arc::new(Table::new()), Arc::new(Domain::new()));
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (table, mut reader) = (table.clone(), Domain::register(&domain));
                thread::spawn(move || table.look(&mut reader))
            })
            .collect();
        let mut retired = Retired::new();
        table.replace(&domain, &mut retired, 1);
        table.spoil(&domain, &mut retired);
        readers.into_iter().for_each(|reader| {
            reader.join().expect("a reader");
        });
        // With nobody inside, nothing waits any longer.
        table.spoil(&domain, &mut retired);
        assert!(retired.is_empty());
        assert_eq!(table.blocks[0].load(Ordering::Relaxed), SPOILT);
    });
}

#[test]
fn a_reader_that_comes_again_sees_what_was_replaced_before_or_holds_it_up() {
    model(|| {
        let (table, domain) = (Arc::new(Table::new()), Arc::new(Domain::new()));
        let reading = {
            let (table, mut reader) = (table.clone(), Domain::register(&domain));
            thread::spawn(move || {
                let first = table.look(&mut reader);
                let second = table.look(&mut reader);
                assert!(first <= second, "block {second} after {first}");
            })
        };
        let mut retired = Retired::new();
        for block in [1, 2] {
            table.replace(&domain, &mut retired, block);
            table.spoil(&domain, &mut retired);
        }
        reading.join().expect("a reader");
    });
}

#[test]
fn a_reader_that_stays_inside_keeps_what_was_there_and_one_outside_nothing() {
    model(|| {
        let (table, domain) = (Arc::new(Table::new()), Arc::new(Domain::new()));
        let (mut inside, outside) = (Domain::register(&domain), Domain::register(&domain));
        let mut retired = Retired::new();
        let batch = inside.pin();
        table.replace(&domain, &mut retired, 1);
        table.spoil(&domain, &mut retired);
        assert_eq!(retired.len(), 1, "a reader is inside");
        drop(batch);
        // Who enters later does not hold up what was taken out before.
        table.spoil(&domain, &mut retired);
        assert!(retired.is_empty());
        let batch = inside.pin();
        table.replace(&domain, &mut retired, 2);
        drop(batch);
        drop((inside, outside));
        table.spoil(&domain, &mut retired);
        assert!(retired.is_empty());
    });
}
