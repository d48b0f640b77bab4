//! What the library knows about each descriptor of the program.
//!
//! A lookup takes two loads, and one for a descriptor that only the kernel knows. A connection that has not proved busy
//! has no object: its counters are in the entry itself. Objects are never freed, so that a reference stays valid while
//! another thread closes the descriptor.

use crate::connection::Connection;
use crate::epoll::EpollSet;
use crate::young::Young;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

const PAGE_ENTRIES: usize = 1024;
const PAGES: usize = 1024;
const KIND_MASK: usize = 7;
const KIND_YOUNG: usize = 1;
const KIND_CONNECTION: usize = 2;
const KIND_SET: usize = 3;
const PAYLOAD_SHIFT: u32 = 3;
const _: () = assert!(Young::BITS + PAYLOAD_SHIFT <= usize::BITS, "counters fit in an entry");

/// What a descriptor refers to.
#[derive(Clone, Copy)]
pub enum Entry {
    /// Nothing of the library: the kernel serves it alone.
    None,
    /// A TCP connection that has not proved busy: the kernel serves it, and its transfers are counted.
    Young(Young),
    /// A TCP connection that has met its other end, or tries to.
    Connection(&'static Connection),
    /// An epoll instance that has, or had, such connections as members.
    Set(&'static EpollSet),
}

type Page = [AtomicUsize; PAGE_ENTRIES];

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];

impl Entry {
    #[inline(always)]
    fn from_word(word: usize) -> Self {
        match word & KIND_MASK {
            KIND_YOUNG => Self::Young(Young::from_word((word >> PAYLOAD_SHIFT) as u64)),
            // SAFETY: `to_word` made the word from a `&'static Connection`, and the table holds no others of this kind.
            KIND_CONNECTION => Self::Connection(unsafe { &*std::ptr::with_exposed_provenance(word & !KIND_MASK) }),
            // SAFETY: `to_word` made the word from a `&'static EpollSet`, and the table holds no others of this kind.
            KIND_SET => Self::Set(unsafe { &*std::ptr::with_exposed_provenance(word & !KIND_MASK) }),
            _ => Self::None,
        }
    }

    fn to_word(self) -> usize {
        match self {
            Self::None => 0,
            Self::Young(young) => (young.to_word() as usize) << PAYLOAD_SHIFT | KIND_YOUNG,
            Self::Connection(connection) => {
                // Exposed, because the table stores integers.
                let address = std::ptr::from_ref(connection).expose_provenance();
                debug_assert_eq!(address & KIND_MASK, 0);
                address | KIND_CONNECTION
            }
            Self::Set(set) => {
                let address = std::ptr::from_ref(set).expose_provenance();
                debug_assert_eq!(address & KIND_MASK, 0);
                address | KIND_SET
            }
        }
    }
}

/// Returns the entry of `fd`.
#[inline(always)] // Part of the path of every call.
pub fn get(fd: RawFd) -> Entry {
    slot(fd).map_or(Entry::None, |slot| Entry::from_word(slot.load(Ordering::Acquire)))
}

/// Replaces the entry of `fd` and returns the previous one. A descriptor beyond the table is left to the kernel.
pub fn set(fd: RawFd, entry: Entry) -> Entry {
    let Ok(index) = usize::try_from(fd) else { return Entry::None };
    let is_absent = matches!(entry, Entry::None) && slot(fd).is_none();
    if index >= PAGES * PAGE_ENTRIES || is_absent {
        return Entry::None;
    }
    Entry::from_word(page_for(index)[index % PAGE_ENTRIES].swap(entry.to_word(), Ordering::AcqRel))
}

/// Gives `fd` an entry if it has none. Returns whether it had none.
pub fn insert(fd: RawFd, entry: Entry) -> bool {
    if let Ok(index) = usize::try_from(fd)
        && can_hold(fd)
    {
        page_for(index);
    }
    replace(fd, Entry::None, entry)
}

/// Returns whether `fd` fits in the table.
pub fn can_hold(fd: RawFd) -> bool {
    usize::try_from(fd).is_ok_and(|index| index < PAGES * PAGE_ENTRIES)
}

/// Replaces the entry of `fd` if it is still `before`. Returns whether it was.
pub fn replace(fd: RawFd, before: Entry, after: Entry) -> bool {
    slot(fd).is_some_and(|slot| {
        slot.compare_exchange(before.to_word(), after.to_word(), Ordering::AcqRel, Ordering::Acquire).is_ok()
    })
}

/// Runs `visit` on each descriptor in `range` that has an entry.
pub fn for_each(range: std::ops::RangeInclusive<RawFd>, mut visit: impl FnMut(RawFd, Entry)) {
    let first = usize::try_from(*range.start()).unwrap_or(0);
    let last = usize::try_from(*range.end()).unwrap_or(0).min(PAGES * PAGE_ENTRIES - 1);
    let mut index = first;
    while index <= last {
        if slot(index as RawFd).is_none() {
            index = (index / PAGE_ENTRIES + 1) * PAGE_ENTRIES;
            continue;
        }
        match get(index as RawFd) {
            Entry::None => {}
            entry => visit(index as RawFd, entry),
        }
        index += 1;
    }
}

#[inline(always)]
fn slot(fd: RawFd) -> Option<&'static AtomicUsize> {
    let index = usize::try_from(fd).ok()?;
    let page = TABLE.get(index / PAGE_ENTRIES)?.load(Ordering::Acquire);
    // SAFETY: a pointer in the table that is not null is a leaked box, stored by `page_for`.
    unsafe { page.as_ref() }.map(|page| &page[index % PAGE_ENTRIES])
}

fn page_for(index: usize) -> &'static Page {
    let cell = &TABLE[index / PAGE_ENTRIES];
    let mut page = cell.load(Ordering::Acquire);
    if page.is_null() {
        // Made on the heap: the stack of a thread may have no room for a page.
        let fresh: Vec<AtomicUsize> = (0..PAGE_ENTRIES).map(|_| AtomicUsize::new(0)).collect();
        let fresh: *mut Page = Box::into_raw(fresh.into_boxed_slice()).cast();
        match cell.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => page = fresh,
            Err(theirs) => {
                // SAFETY: `fresh` came from `Box::into_raw` above and was not shared, because the exchange failed.
                drop(unsafe { Box::from_raw(fresh) });
                page = theirs;
            }
        }
    }
    // SAFETY: `page` is not null here, and the pages of the table are leaked boxes.
    unsafe { &*page }
}
