//! The object behind each descriptor of the program.
//!
//! A lookup takes two loads, and one for a descriptor that only the kernel knows. Objects are never freed, so that a
//! reference stays valid while another thread closes the descriptor. The table does not know the types of its objects;
//! `crate::entry` does.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

const PAGE_ENTRIES: usize = 1024;
const PAGES: usize = 1024;
const KIND_MASK: usize = 7;

/// The kind of an object in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    /// A connection with lanes.
    Connection = 1,
    /// A TCP listener that is accompanied by a lane listener.
    Listener = 2,
    /// A TCP socket without lanes.
    Stream = 3,
    /// An epoll instance.
    EpollSet = 4,
    /// A connection of a process that has installed a system call filter.
    Confined = 5,
}

/// A type whose objects can be entered in the table.
///
/// # Safety
/// No two types have a kind in common, and the alignment of the type is at least 8.
pub unsafe trait Tracked: Sync + 'static {
    /// The kinds of the type's objects.
    const KINDS: &'static [Kind];
}

/// A reference to an object of any kind, or to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object(usize);

impl Object {
    /// No object: only the kernel knows the descriptor.
    pub const NONE: Self = Self(0);

    /// Returns a reference to `object` with the given kind.
    ///
    /// # Panics
    /// If the type does not have this kind.
    pub fn new<T: Tracked>(kind: Kind, object: &'static T) -> Self {
        assert!(T::KINDS.contains(&kind), "{kind:?} is the kind of another type");
        // Exposed, because the table stores integers.
        let address = std::ptr::from_ref(object).expose_provenance();
        debug_assert_eq!(address & KIND_MASK, 0);
        Self(address | kind as usize)
    }

    /// Returns the kind, or `None` for no object.
    #[inline]
    pub fn kind(self) -> Option<Kind> {
        match self.0 & KIND_MASK {
            1 => Some(Kind::Connection),
            2 => Some(Kind::Listener),
            3 => Some(Kind::Stream),
            4 => Some(Kind::EpollSet),
            5 => Some(Kind::Confined),
            _ => None,
        }
    }

    /// Returns the object, if it is of this type.
    #[inline]
    pub fn get<T: Tracked>(self) -> Option<&'static T> {
        let is_of_type = self.kind().is_some_and(|kind| T::KINDS.contains(&kind));
        // SAFETY: `new` made the word from a `&'static` reference of a type with this kind, and no other type has it.
        is_of_type.then(|| unsafe { &*std::ptr::with_exposed_provenance(self.0 & !KIND_MASK) })
    }
}

type Page = [AtomicUsize; PAGE_ENTRIES];

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];

/// Returns the object of `fd`.
#[inline]
pub fn load(fd: RawFd) -> Object {
    slot(fd).map_or(Object::NONE, |slot| Object(slot.load(Ordering::Acquire)))
}

/// Replaces the object of `fd` and returns the previous one. A descriptor beyond the table is left to the kernel.
pub fn swap(fd: RawFd, object: Object) -> Object {
    let Ok(index) = usize::try_from(fd) else { return Object::NONE };
    if index >= PAGES * PAGE_ENTRIES || (object == Object::NONE && slot(fd).is_none()) {
        return Object::NONE;
    }
    Object(page_for(index)[index % PAGE_ENTRIES].swap(object.0, Ordering::AcqRel))
}

/// Returns whether `fd` fits in the table.
pub fn can_hold(fd: RawFd) -> bool {
    usize::try_from(fd).is_ok_and(|index| index < PAGES * PAGE_ENTRIES)
}

/// Runs `visit` on each descriptor in `range` that has an object.
pub fn for_each(range: std::ops::RangeInclusive<RawFd>, mut visit: impl FnMut(RawFd, Object)) {
    let first = usize::try_from(*range.start()).unwrap_or(0);
    let last = usize::try_from(*range.end()).unwrap_or(0).min(PAGES * PAGE_ENTRIES - 1);
    for (page, entries) in TABLE.iter().enumerate().take(last / PAGE_ENTRIES + 1).skip(first / PAGE_ENTRIES) {
        if entries.load(Ordering::Acquire).is_null() {
            continue;
        }
        for index in (page * PAGE_ENTRIES).max(first)..=(page * PAGE_ENTRIES + PAGE_ENTRIES - 1).min(last) {
            match load(index as RawFd) {
                Object::NONE => {}
                object => visit(index as RawFd, object),
            }
        }
    }
}

#[inline]
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
        let fresh = Box::into_raw(Box::new([const { AtomicUsize::new(0) }; PAGE_ENTRIES]));
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
