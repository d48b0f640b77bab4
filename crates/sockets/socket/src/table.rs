//! Which descriptor is what.
//!
//! Two loads answer for any descriptor; those that are not ours cost one. Objects are never freed, so a reference stays
//! good while another thread closes the descriptor.

use crate::connection::Connection;
use crate::interest::InterestSet;
use crate::lifecycle::{Listener, Stream};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

const PAGE_ENTRIES: usize = 1024;
const PAGES: usize = 1024;
const KIND_MASK: usize = 7;

/// What a descriptor is to us.
#[derive(Clone, Copy)]
pub enum Entry {
    /// Nothing: the kernel alone knows it.
    None,
    /// A connection over lanes.
    Connection(&'static Connection),
    /// A connection of a process under a system call filter of its own: what is not said of it is the kernel's.
    Confined(&'static Connection),
    /// A TCP listener with a lane listener beside it.
    Listener(&'static Listener),
    /// A TCP socket that has no lane (yet).
    Stream(&'static Stream),
    /// An epoll instance that has held a connection of ours.
    Interest(&'static InterestSet),
}

type Page = [AtomicUsize; PAGE_ENTRIES];

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];

/// What `fd` is.
#[inline]
pub fn get(fd: RawFd) -> Entry {
    slot(fd).map_or(Entry::None, |slot| decode(slot.load(Ordering::Acquire)))
}

/// The connection that `fd` is, if it is one.
#[inline]
pub fn connection(fd: RawFd) -> Option<&'static Connection> {
    match get(fd) {
        Entry::Connection(connection) => Some(connection),
        _ => None,
    }
}

/// Says what `fd` is from now on; returns what it was. A descriptor beyond the table stays the kernel's.
pub fn set(fd: RawFd, entry: Entry) -> Entry {
    let Ok(index) = usize::try_from(fd) else { return Entry::None };
    if index >= PAGES * PAGE_ENTRIES || (matches!(entry, Entry::None) && slot(fd).is_none()) {
        return Entry::None;
    }
    decode(page_for(index)[index % PAGE_ENTRIES].swap(encode(entry), Ordering::AcqRel))
}

/// Whether `fd` can be in the table.
pub fn can_hold(fd: RawFd) -> bool {
    usize::try_from(fd).is_ok_and(|index| index < PAGES * PAGE_ENTRIES)
}

/// Runs `visit` on every descriptor of ours in a range.
pub fn for_each(range: std::ops::RangeInclusive<RawFd>, mut visit: impl FnMut(RawFd, Entry)) {
    let first = usize::try_from(*range.start()).unwrap_or(0);
    let last = usize::try_from(*range.end()).unwrap_or(0).min(PAGES * PAGE_ENTRIES - 1);
    for (page, entries) in TABLE.iter().enumerate().take(last / PAGE_ENTRIES + 1).skip(first / PAGE_ENTRIES) {
        if entries.load(Ordering::Acquire).is_null() {
            continue;
        }
        for index in (page * PAGE_ENTRIES).max(first)..=(page * PAGE_ENTRIES + PAGE_ENTRIES - 1).min(last) {
            match get(index as RawFd) {
                Entry::None => {}
                entry => visit(index as RawFd, entry),
            }
        }
    }
}

#[inline]
fn slot(fd: RawFd) -> Option<&'static AtomicUsize> {
    let index = usize::try_from(fd).ok()?;
    let page = TABLE.get(index / PAGE_ENTRIES)?.load(Ordering::Acquire);
    // SAFETY: pages are leaked boxes.
    unsafe { page.as_ref() }.map(|page| &page[index % PAGE_ENTRIES])
}

fn page_for(index: usize) -> &'static Page {
    let place = &TABLE[index / PAGE_ENTRIES];
    let mut page = place.load(Ordering::Acquire);
    if page.is_null() {
        let fresh = Box::into_raw(Box::new([const { AtomicUsize::new(0) }; PAGE_ENTRIES]));
        match place.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => page = fresh,
            Err(theirs) => {
                // SAFETY: made above and shared with nobody.
                drop(unsafe { Box::from_raw(fresh) });
                page = theirs;
            }
        }
    }
    // SAFETY: pages are leaked boxes.
    unsafe { &*page }
}

fn encode(entry: Entry) -> usize {
    let (address, kind) = match entry {
        Entry::None => (0, 0),
        Entry::Connection(object) => (std::ptr::from_ref(object).addr(), 1),
        Entry::Listener(object) => (std::ptr::from_ref(object).addr(), 2),
        Entry::Stream(object) => (std::ptr::from_ref(object).addr(), 3),
        Entry::Interest(object) => (std::ptr::from_ref(object).addr(), 4),
        Entry::Confined(object) => (std::ptr::from_ref(object).addr(), 5),
    };
    // Exposed, because the table keeps numbers.
    match entry {
        Entry::Connection(object) | Entry::Confined(object) => _ = std::ptr::from_ref(object).expose_provenance(),
        Entry::Listener(object) => _ = std::ptr::from_ref(object).expose_provenance(),
        Entry::Stream(object) => _ = std::ptr::from_ref(object).expose_provenance(),
        Entry::Interest(object) => _ = std::ptr::from_ref(object).expose_provenance(),
        Entry::None => {}
    }
    debug_assert_eq!(address & KIND_MASK, 0);
    address | kind
}

#[inline]
fn decode(word: usize) -> Entry {
    let address = word & !KIND_MASK;
    // SAFETY: `encode` made the word from a reference that lives for ever, of the kind the low bits say.
    unsafe {
        match word & KIND_MASK {
            1 => Entry::Connection(&*std::ptr::with_exposed_provenance(address)),
            2 => Entry::Listener(&*std::ptr::with_exposed_provenance(address)),
            3 => Entry::Stream(&*std::ptr::with_exposed_provenance(address)),
            4 => Entry::Interest(&*std::ptr::with_exposed_provenance(address)),
            5 => Entry::Confined(&*std::ptr::with_exposed_provenance(address)),
            _ => Entry::None,
        }
    }
}
