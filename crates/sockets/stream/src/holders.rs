//! Counts of the processes that hold a connection since a fork.
//!
//! A connection that is held at a fork gets a slot in memory that the parent and its children share. The slot counts
//! the processes that may use the connection; while there are several, the connection stays on TCP. A slot has one
//! word, so that each transition is one compare-exchange:
//!
//! | event | condition | holders |
//! |---|---|---|
//! | the first fork of a connection | the slot is free | 2 |
//! | another fork, before it; undone if it fails | somebody holds the connection | one more |
//! | a close of the last descriptor, an end of the process, an `exec` that closes it | | one less; free at 0 |
//! | that `exec` has failed | somebody holds the connection | one more |
//! | the sole holder takes over | 1 | the slot is free |
//!
//! A slot that becomes free gets another generation, by which a process that comes back from a failed `exec` notices
//! that the connection was taken over meanwhile: it never uses lanes then.
//!
//! A process that is killed, or that leaves the descriptor to somebody whom the library does not know, stays counted.
//! The others then stay on TCP, and the slot stays in use until none of them is left.

use rustix::mm::{MapFlags, ProtFlags};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Number of connections that can be shared at once in a family of processes. Others stay on TCP for good.
const SLOTS: usize = 1 << INDEX_BITS;
const INDEX_BITS: u32 = 14;
const GENERATION_BITS: u32 = 10;
/// Slots that are examined in the search for a free one.
const PROBES_MAX: usize = 64;
const GENERATION_SHIFT: u32 = 32;
const HOLDERS: u64 = (1 << GENERATION_SHIFT) - 1;
/// More processes than a system has.
const HOLDERS_MAX: u64 = 1 << 24;

/// A connection that several processes hold, or have held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hold {
    index: u16,
    generation: u16,
}

/// The slots; those of this family of processes are created at the first fork with a connection.
#[derive(Clone, Copy)]
struct Slots<'a>(&'a [AtomicU64]);

static FIRST: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
/// Where this process looks for a free slot next.
static NEXT: AtomicU32 = AtomicU32::new(0);

fn slots() -> Option<Slots<'static>> {
    let first = FIRST.load(Ordering::Acquire);
    // SAFETY: `slots_for_fork` has stored the address of a mapping of this length, which is never unmapped. Its zeros
    // are valid words, and all processes access them by atomic operations only.
    (!first.is_null()).then(|| Slots(unsafe { std::slice::from_raw_parts(first, SLOTS) }))
}

fn slots_for_fork() -> Option<Slots<'static>> {
    if FIRST.load(Ordering::Acquire).is_null() {
        let (anywhere, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses the address, so that the new mapping replaces no existing memory.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(anywhere, SLOTS * size_of::<AtomicU64>(), access, MapFlags::SHARED) };
        FIRST.store(mapped.ok()?.cast(), Ordering::Release);
    }
    slots()
}

/// Returns whether a connection of this process was ever held at a fork.
pub fn is_any() -> bool {
    !FIRST.load(Ordering::Relaxed).is_null()
}

/// Counts this process and the child that it is about to create as holders of a connection. `None` if there is no
/// memory or no free slot. The caller excludes other forks.
pub fn share() -> Option<Hold> {
    let first = NEXT.load(Ordering::Relaxed) as usize;
    let hold = slots_for_fork()?.share(first)?;
    NEXT.store(u32::from(hold.index) + 1, Ordering::Relaxed);
    Some(hold)
}

impl Hold {
    /// The bits of [`Hold::to_bits`].
    pub const BITS: u32 = INDEX_BITS + GENERATION_BITS;

    /// Returns the hold as a number.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << INDEX_BITS | u64::from(self.index)
    }

    /// Decodes a number that [`Hold::to_bits`] has returned.
    pub fn from_bits(bits: u64) -> Self {
        let generation = bits >> INDEX_BITS & ((1 << GENERATION_BITS) - 1);
        Self { index: (bits & (SLOTS as u64 - 1)) as u16, generation: generation as u16 }
    }

    /// Counts one more holder. Returns `false` if the connection was taken over, or nobody holds it any more.
    pub fn add(self) -> bool {
        slots().is_some_and(|slots| slots.add(self))
    }

    /// Counts one holder less.
    pub fn release(self) {
        if let Some(slots) = slots() {
            slots.release(self);
        }
    }

    /// Returns whether there is one holder, in one load.
    #[inline]
    pub fn is_sole(self) -> bool {
        slots().is_some_and(|slots| slots.is_sole(self))
    }

    /// Ends the sharing, for the sole holder. Returns whether it was that.
    pub fn take_over(self) -> bool {
        slots().is_some_and(|slots| slots.take_over(self))
    }
}

impl Slots<'_> {
    fn share(self, first: usize) -> Option<Hold> {
        (first..first + PROBES_MAX.min(self.0.len())).find_map(|index| {
            let index = index % self.0.len();
            let word = self.0[index].load(Ordering::Relaxed);
            let is_mine = word & HOLDERS == 0
                && self.0[index].compare_exchange(word, word + 2, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            is_mine.then_some(Hold { index: index as u16, generation: (word >> GENERATION_SHIFT) as u16 })
        })
    }

    /// Replaces the number of holders, if it is not 0 and `change` returns another one. Returns whether it did.
    fn change(self, hold: Hold, change: impl Fn(u64) -> Option<u64>) -> bool {
        let changed = self.0[usize::from(hold.index)].fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            let (generation, holders) = (word >> GENERATION_SHIFT, word & HOLDERS);
            if generation != u64::from(hold.generation) || holders == 0 {
                return None;
            }
            let generation =
                |holders| if holders == 0 { (generation + 1) % (1 << GENERATION_BITS) } else { generation };
            change(holders).map(|holders| generation(holders) << GENERATION_SHIFT | holders)
        });
        changed.is_ok()
    }

    fn add(self, hold: Hold) -> bool {
        self.change(hold, |holders| (holders < HOLDERS_MAX).then_some(holders + 1))
    }

    fn release(self, hold: Hold) {
        self.change(hold, |holders| Some(holders - 1));
    }

    fn is_sole(self, hold: Hold) -> bool {
        let word = self.0[usize::from(hold.index)].load(Ordering::Relaxed);
        word == u64::from(hold.generation) << GENERATION_SHIFT | 1
    }

    fn take_over(self, hold: Hold) -> bool {
        self.change(hold, |holders| (holders == 1).then_some(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_hold_survives_its_encoding() {
        for hold in [Hold { index: 0, generation: 0 }, Hold { index: (SLOTS - 1) as u16, generation: 1023 }] {
            assert_eq!(Hold::from_bits(hold.to_bits()), hold);
            assert!(hold.to_bits() < 1 << Hold::BITS);
        }
    }

    #[test]
    fn the_last_of_several_holders_takes_over() {
        let words = words(4);
        let slots = Slots(&words);
        let hold = slots.share(0).unwrap();
        assert!(slots.add(hold));
        assert!(!slots.is_sole(hold) && !slots.take_over(hold));
        slots.release(hold);
        assert!(!slots.is_sole(hold) && !slots.take_over(hold));
        slots.release(hold);
        assert!(slots.is_sole(hold) && slots.take_over(hold));
        assert!(!slots.is_sole(hold) && !slots.take_over(hold) && !slots.add(hold));
    }

    #[test]
    fn a_slot_is_reused_and_its_old_holds_are_void() {
        let words = words(1);
        let slots = Slots(&words);
        let old = slots.share(0).unwrap();
        assert_eq!(slots.share(0), None);
        slots.release(old);
        slots.release(old);
        let new = slots.share(5).unwrap();
        assert_ne!(new, old);
        slots.release(old);
        assert!(!slots.add(old) && !slots.take_over(old));
        slots.release(new);
        assert!(slots.take_over(new));
    }

    #[test]
    fn generations_wrap() {
        let words = words(1);
        let slots = Slots(&words);
        let holds = (0..2 << GENERATION_BITS).map(|_| {
            let hold = slots.share(0).expect("a free slot");
            slots.release(hold);
            slots.release(hold);
            hold
        });
        assert_eq!(holds.collect::<HashSet<_>>().len(), 1 << GENERATION_BITS);
    }

    #[test]
    fn a_search_ends_after_some_probes() {
        let words = words(2 * PROBES_MAX);
        let slots = Slots(&words);
        (0..PROBES_MAX).for_each(|_| assert!(slots.share(0).is_some()));
        assert_eq!(slots.share(0), None);
        assert!(slots.share(PROBES_MAX).is_some());
    }

    #[test]
    fn holds_of_this_process_are_in_shared_memory() {
        let hold = share().unwrap();
        assert!(is_any() && hold.add() && !hold.is_sole());
        hold.release();
        hold.release();
        assert!(hold.take_over());
    }

    /// What a process knows of a connection, in the model.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Process {
        /// It does not exist yet.
        Unborn,
        /// It counts as a holder, and uses TCP.
        Holds(Hold),
        /// It has found itself to be the sole holder, and is about to take over.
        TakesOver(Hold),
        /// It is about to run another program, and has released its hold. The program may be run or not.
        Runs(Hold),
        /// It uses lanes.
        Alone,
        /// It is back from a failed `exec`, and uses TCP, uncounted.
        StaysOnTcp,
        /// It does not have the connection any more.
        Gone,
    }

    const PROCESSES: usize = 3;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    struct Model {
        /// One slot, so that it is reused soon.
        words: [u64; 1],
        processes: [Process; PROCESSES],
        /// Another connection, which has a slot now.
        other: Option<Hold>,
        /// Forks and other connections that are left, which bounds the search.
        steps: u8,
    }

    impl Model {
        /// Calls `step` with slots that have this state, and returns the next state.
        fn with(self, index: usize, step: impl FnOnce(Slots<'_>) -> Process) -> Self {
            let words = self.words.map(AtomicU64::new);
            let mut next = self;
            next.processes[index] = step(Slots(&words));
            next.words = words.map(AtomicU64::into_inner);
            next
        }

        fn forked(self, parent: usize, child: usize) -> Option<Self> {
            let words = self.words.map(AtomicU64::new);
            let slots = Slots(&words);
            let hold = match self.processes[parent] {
                Process::Alone => slots.share(0)?,
                Process::Holds(hold) | Process::TakesOver(hold) if slots.add(hold) => hold,
                _ => return None,
            };
            let mut next = self;
            next.processes[parent] = Process::Holds(hold);
            next.processes[child] = Process::Holds(hold);
            next.steps -= 1;
            next.words = words.map(AtomicU64::into_inner);
            Some(next)
        }

        /// Returns the state after another connection of the family has got a slot, or has ended.
        fn other_connection(self) -> Option<Self> {
            let words = self.words.map(AtomicU64::new);
            let slots = Slots(&words);
            let (other, steps) = match self.other {
                Some(hold) => {
                    slots.release(hold);
                    slots.release(hold);
                    (None, self.steps)
                }
                None => (Some(slots.share(0)?), self.steps.checked_sub(1)?),
            };
            Some(Self { words: words.map(AtomicU64::into_inner), other, steps, ..self })
        }

        /// Returns the states that one step of one process leads to.
        fn next(self) -> Vec<Self> {
            let mut all = Vec::new();
            for (index, process) in self.processes.into_iter().enumerate() {
                let mut add = |step: &dyn Fn(Slots<'_>) -> Process| all.push(self.with(index, step));
                match process {
                    Process::Holds(hold) => {
                        add(&|slots| if slots.is_sole(hold) { Process::TakesOver(hold) } else { process });
                        add(&|slots| {
                            slots.release(hold);
                            Process::Gone
                        });
                        add(&|slots| {
                            slots.release(hold);
                            Process::Runs(hold)
                        });
                        // A signal kills it.
                        add(&|_| Process::Gone);
                    }
                    Process::TakesOver(hold) => {
                        add(&|slots| if slots.take_over(hold) { Process::Alone } else { Process::Holds(hold) });
                    }
                    Process::Runs(hold) => {
                        add(&|slots| if slots.add(hold) { Process::Holds(hold) } else { Process::StaysOnTcp });
                        add(&|_| Process::Gone);
                    }
                    Process::Alone => add(&|_| Process::Gone),
                    Process::Unborn | Process::StaysOnTcp | Process::Gone => {}
                }
                if self.steps > 0 {
                    let unborn = self.processes.iter().position(|process| *process == Process::Unborn);
                    all.extend(unborn.and_then(|child| self.forked(index, child)));
                }
            }
            all.extend(self.other_connection());
            all
        }
    }

    /// Every order of forks, closes, kills, failed runs of programs and attempts to take over in three processes: where
    /// one uses lanes, no other one counts as a holder, and nobody becomes one again.
    #[test]
    fn lanes_are_used_by_nobody_while_another_process_holds_the_connection() {
        let mut processes = [Process::Unborn; PROCESSES];
        processes[0] = Process::Alone;
        let mut open = vec![Model { words: [0], processes, other: None, steps: 6 }];
        let mut seen: HashSet<Model> = open.iter().copied().collect();
        let mut taken_over = 0;
        while let Some(model) = open.pop() {
            let holders = |process: &&Process| matches!(process, Process::Holds(_) | Process::TakesOver(_));
            let alone = model.processes.iter().filter(|process| **process == Process::Alone).count();
            let others = model.processes.iter().filter(holders).count();
            assert!(alone <= 1 && (alone == 0 || others == 0), "{model:?}");
            taken_over += usize::from(alone == 1 && model.processes[1] != Process::Unborn);
            open.extend(model.next().into_iter().filter(|next| seen.insert(*next)));
        }
        assert!(taken_over > 10, "{taken_over} of {} states", seen.len());
    }
}
