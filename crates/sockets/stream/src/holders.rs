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
//! | another process finds that a holder was killed | | one less; free at 0 |
//! | the sole holder takes over | 1 | the slot is free |
//!
//! A slot that becomes free gets another generation, by which a process that comes back from a failed `exec` notices
//! that the connection was taken over meanwhile: it never uses lanes then.
//!
//! [`processes`] records which process holds what, so that others can release the holds of one that was killed. A
//! process that leaves the descriptor to somebody whom the library does not know stays counted: it removes the hold
//! from its record without releasing it. The others then stay on TCP, and the slot stays in use until none of them is
//! left.

mod processes;

use processes::{Holds, Processes};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use socket::descriptor::hidden::HiddenFd;
use socket::process::clock::ticks;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

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
/// Number of processes of a family that are recorded at once. A process without a record that is killed stays counted.
const RECORDS: usize = 1024;
/// A search for killed processes takes at most one part in this of the time.
const SEARCH_SHARE: u64 = 100;

/// A connection that several processes hold, or have held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hold {
    index: u16,
    generation: u16,
}

/// The slots; those of this family of processes are created at the first fork with a connection.
#[derive(Clone, Copy)]
struct Slots<'a>(&'a [AtomicU64]);

/// What the processes of a family share. All zeros are its initial value.
struct Shared {
    slots: [AtomicU64; SLOTS],
    states: [AtomicU64; RECORDS],
    holds: [Holds<{ SLOTS / 64 }>; RECORDS],
}

/// The memory of this family.
#[derive(Clone, Copy)]
struct Family {
    slots: Slots<'static>,
    processes: Processes<'static, { SLOTS / 64 }>,
}

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
/// Where this process looks for a free slot next.
static NEXT: AtomicU32 = AtomicU32::new(0);
/// The slot of the hidden descriptor by which this process locks its record, or -1.
static LOCK: AtomicI32 = AtomicI32::new(-1);
/// The record of this process, plus one; 0 if it has none.
static OWN: AtomicU32 = AtomicU32::new(0);
/// The record of the child that is about to be created, plus one; 0 if it has none yet.
static CHILD: AtomicU32 = AtomicU32::new(0);
/// When this process may search for killed ones again, by the processor's clock.
static SEARCH_TICKS: AtomicU64 = AtomicU64::new(0);

fn family() -> Option<Family> {
    // SAFETY: `family_for_fork` has stored the address of a mapping of this size, which is never unmapped. Its zeros
    // are valid words, and all processes access them by atomic operations only.
    let shared = unsafe { SHARED.load(Ordering::Acquire).as_ref() }?;
    Some(Family { slots: Slots(&shared.slots), processes: Processes { states: &shared.states, holds: &shared.holds } })
}

fn family_for_fork() -> Option<Family> {
    if SHARED.load(Ordering::Acquire).is_null() {
        SHARED.store(map_shared()?, Ordering::Release);
    }
    family()
}

/// Creates the memory of the family, and the file whose parts its processes lock.
fn map_shared() -> Option<*mut Shared> {
    let (anywhere, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: the kernel chooses the address, so that the new mapping replaces no existing memory.
    let mapped = unsafe { rustix::mm::mmap_anonymous(anywhere, size_of::<Shared>(), access, MapFlags::SHARED) }.ok()?;
    let file = rustix::fs::memfd_create(c"crosslane-holders", MemfdFlags::CLOEXEC).ok();
    keep_lock(file.and_then(|file| HiddenFd::hide_in_small_table(file).ok()));
    Some(mapped.cast())
}

/// Replaces the descriptor by which this process locks its record.
fn keep_lock(lock: Option<HiddenFd>) {
    let new = lock.map_or(-1, |lock| lock.into_slot().into());
    let old = LOCK.swap(new, Ordering::AcqRel);
    if let Ok(slot) = u16::try_from(old) {
        drop(HiddenFd::from_slot(slot));
    }
}

/// Returns whether a connection of this process was ever held at a fork.
pub fn is_any() -> bool {
    !SHARED.load(Ordering::Relaxed).is_null()
}

/// Counts this process and the child that it is about to create as holders of a connection. `None` if there is no
/// memory or no free slot. The caller excludes other forks.
pub fn share() -> Option<Hold> {
    let family = family_for_fork()?;
    let first = NEXT.load(Ordering::Relaxed) as usize;
    let hold = family.slots.share(first)?;
    NEXT.store(u32::from(hold.index) + 1, Ordering::Relaxed);
    family.note(family.own_record(), hold);
    family.note(family.childs_record(), hold);
    Some(hold)
}

/// Undoes [`share`] of a connection that another thread has changed meanwhile.
pub fn unshare(hold: Hold) {
    hold.release_of_child();
    hold.release();
}

/// Continues after a fork, in the parent: the record of the child is the child's.
pub fn after_fork_in_parent() -> ChildsRecord {
    ChildsRecord(CHILD.swap(0, Ordering::AcqRel))
}

/// The record of a child that was to be created.
#[derive(Clone, Copy, Default)]
pub struct ChildsRecord(u32);

impl ChildsRecord {
    /// No record.
    pub const NONE: Self = Self(0);

    /// Frees the record, because there is no child.
    pub fn free(self) {
        if let (Some(family), Some(record)) = (family(), self.0.checked_sub(1)) {
            family.processes.free(record as usize);
        }
    }
}

/// Continues in the child of a fork. The lock of the parent must not outlive it because this process holds it too.
pub fn after_fork_in_child() {
    SEARCH_TICKS.store(0, Ordering::Relaxed);
    OWN.store(CHILD.swap(0, Ordering::AcqRel), Ordering::Release);
    let Some(family) = family().filter(|_| !crate::process::is_confined()) else { return };
    let lock = lock_number();
    if lock >= 0 && !processes::reopen(lock) {
        keep_lock(None);
    }
    if let Some(record) = OWN.load(Ordering::Acquire).checked_sub(1) {
        family.begin(record as usize);
    }
}

/// Closes the descriptor by which this process locks its record, so that the program gets its number.
pub fn close_descriptor() {
    if let (Some(family), Some(record)) = (family(), OWN.load(Ordering::Acquire).checked_sub(1)) {
        family.processes.keep_counted(record as usize);
    }
    keep_lock(None);
}

/// Frees the record of this process, which has released its holds and is about to end.
pub fn end_process() {
    if let (Some(family), Some(record)) = (family(), OWN.load(Ordering::Acquire).checked_sub(1))
        && family.processes.end_if_empty(record as usize)
    {
        OWN.store(0, Ordering::Release);
    }
}

/// Releases the holds of processes of this family that were killed, unless such a search was made a short time ago.
#[cold]
pub fn release_those_of_killed() {
    let now = ticks();
    // The clock is one of all processors.
    if (now.wrapping_sub(SEARCH_TICKS.load(Ordering::Relaxed)) as i64) < 0 {
        return;
    }
    if let Some(family) = family() {
        family.release_those_of_killed();
    }
    let end = ticks();
    SEARCH_TICKS.store(end.wrapping_add(end.wrapping_sub(now).wrapping_mul(SEARCH_SHARE)), Ordering::Relaxed);
}

impl Family {
    /// Returns the record of this process, which it gets if it has none. `None` if there is no free one.
    fn own_record(self) -> Option<usize> {
        if OWN.load(Ordering::Acquire) == 0
            && let Some(record) = self.allocate()
        {
            OWN.store(record as u32 + 1, Ordering::Release);
            self.begin(record);
        }
        OWN.load(Ordering::Acquire).checked_sub(1).map(|record| record as usize)
    }

    /// Returns the record of the child that is about to be created.
    fn childs_record(self) -> Option<usize> {
        if CHILD.load(Ordering::Acquire) == 0
            && let Some(record) = self.allocate()
        {
            CHILD.store(record as u32 + 1, Ordering::Release);
        }
        CHILD.load(Ordering::Acquire).checked_sub(1).map(|record| record as usize)
    }

    fn allocate(self) -> Option<usize> {
        self.processes.allocate().or_else(|| {
            self.release_those_of_killed();
            self.processes.allocate()
        })
    }

    /// Locks the record of this process. From then on its end is noticed.
    fn begin(self, record: usize) {
        if processes::lock(lock_number(), record) {
            self.processes.begin(record);
        }
    }

    fn note(self, record: Option<usize>, hold: Hold) {
        if let Some(record) = record {
            self.processes.add(record, hold.index);
        }
    }

    fn release_those_of_killed(self) {
        let (own, lock) = (OWN.load(Ordering::Acquire), lock_number());
        let is_killed = |record| record + 1 != own as usize && processes::is_unlocked(lock, record);
        (0..RECORDS).for_each(|record| self.processes.release_if(record, is_killed, |index| self.slots.remove(index)));
    }
}

fn lock_number() -> i32 {
    u16::try_from(LOCK.load(Ordering::Acquire)).map_or(-1, socket::descriptor::hidden::number_at)
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

    /// Counts this process again. Returns `false` if the connection was taken over, or nobody holds it any more.
    pub fn add(self) -> bool {
        let family = family().filter(|family| family.slots.add(self));
        family.inspect(|family| family.note(family.own_record(), self)).is_some()
    }

    /// Counts the child that this process is about to create. Returns `false` as [`Hold::add`].
    pub fn add_child(self) -> bool {
        let family = family().filter(|family| family.slots.add(self));
        family.inspect(|family| family.note(family.childs_record(), self)).is_some()
    }

    /// Removes the hold from the record of this process. Returns whether it was there.
    fn remove_from_record(self) -> bool {
        let own = OWN.load(Ordering::Acquire).checked_sub(1);
        family().zip(own).is_some_and(|(family, own)| family.processes.remove(own as usize, self.index))
    }

    /// Counts one holder less: this process does not hold the connection any more.
    pub fn release(self) {
        self.remove_from_record();
        if let Some(family) = family() {
            family.slots.release(self);
        }
    }

    /// Counts one holder less: the child is not created.
    pub fn release_of_child(self) {
        let Some(family) = family() else { return };
        if let Some(record) = CHILD.load(Ordering::Acquire).checked_sub(1) {
            family.processes.remove(record as usize, self.index);
        }
        family.slots.release(self);
    }

    /// Stays counted when this process ends: somebody whom the library does not know may have the connection.
    pub fn leave_counted(self) {
        self.remove_from_record();
    }

    /// Returns whether there is one holder, in one load.
    #[inline]
    pub fn is_sole(self) -> bool {
        family().is_some_and(|family| family.slots.is_sole(self))
    }

    /// Ends the sharing, for the sole holder. Returns whether it was that.
    pub fn take_over(self) -> bool {
        // Before: as soon as the slot is free, another connection may have it.
        let was_recorded = self.remove_from_record();
        let is_taken_over = family().is_some_and(|family| family.slots.take_over(self));
        if !is_taken_over
            && was_recorded
            && let Some(family) = family()
        {
            family.note(family.own_record(), self);
        }
        is_taken_over
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

    /// Counts one holder less of the connection that has a slot, because a process that held it was killed.
    fn remove(self, index: u16) {
        let generation = (self.0[usize::from(index)].load(Ordering::Acquire) >> GENERATION_SHIFT) as u16;
        self.release(Hold { index, generation });
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
mod tests;
