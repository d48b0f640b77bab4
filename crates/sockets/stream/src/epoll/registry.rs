//! The program's registrations, by descriptor.
//!
//! Nearly every descriptor is in one set at most, so the first registration of each is found by its number alone, and
//! costs a call of `epoll_ctl` three stores.

use socket::process::locked::Locked;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

const PAGE_ENTRIES: usize = 1024;
const PAGES: usize = 1024;

/// A registration of a descriptor in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registration {
    /// The set's descriptor.
    pub epfd: RawFd,
    /// The events and flags that the program has asked for.
    pub events: u32,
    /// The program's data.
    pub data: u64,
}

/// The first registration of a descriptor; none if `set` is 0, else it is the set's descriptor plus one.
#[derive(Default)]
struct First {
    set: AtomicU32,
    events: AtomicU32,
    data: AtomicU64,
    /// The descriptor may be among the further registrations.
    has_further: AtomicBool,
    /// Threads that wait on this descriptor as on a set without members.
    waiters: AtomicU32,
    /// This descriptor is a set that the program has created.
    is_set: AtomicBool,
    /// It is one of several descriptors of a set, which the library does not know as one: it gets no members.
    is_split: AtomicBool,
}

type Page = [First; PAGE_ENTRIES];

static FIRST: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];
/// The registrations of descriptors that have another one already.
static FURTHER: Locked<Vec<(RawFd, Registration)>> = Locked::new(Vec::new());
static HAS_FURTHER: AtomicBool = AtomicBool::new(false);

fn first(fd: RawFd) -> Option<&'static First> {
    let index = usize::try_from(fd).ok()?;
    let page = FIRST.get(index / PAGE_ENTRIES)?.load(Ordering::Acquire);
    // SAFETY: a pointer in the array that is not null is a leaked box, stored by `ensure_first`.
    unsafe { page.as_ref() }.map(|page| &page[index % PAGE_ENTRIES])
}

fn ensure_first(fd: RawFd) -> Option<&'static First> {
    if let Some(first) = first(fd) {
        return Some(first);
    }
    let cell = FIRST.get(usize::try_from(fd).ok()? / PAGE_ENTRIES)?;
    // Made on the heap: the stack of a thread may have no room for a page.
    let fresh: Vec<First> = (0..PAGE_ENTRIES).map(|_| First::default()).collect();
    let fresh: *mut Page = Box::into_raw(fresh.into_boxed_slice()).cast();
    if cell.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: `fresh` came from `Box::into_raw` above and was not shared, because the exchange failed.
        drop(unsafe { Box::from_raw(fresh) });
    }
    first(fd)
}

impl First {
    fn get(&self) -> Option<Registration> {
        let epfd = self.set.load(Ordering::Acquire).checked_sub(1)? as RawFd;
        let (events, data) = (self.events.load(Ordering::Relaxed), self.data.load(Ordering::Relaxed));
        Some(Registration { epfd, events, data })
    }

    fn put(&self, registration: Registration) {
        self.events.store(registration.events, Ordering::Relaxed);
        self.data.store(registration.data, Ordering::Relaxed);
        self.set.store(registration.epfd as u32 + 1, Ordering::Release);
    }
}

/// Notes that the program has created a set.
pub fn note_set(epfd: RawFd) {
    if let Some(first) = ensure_first(epfd) {
        first.is_set.store(true, Ordering::Relaxed);
        first.is_split.store(false, Ordering::Relaxed);
    }
}

/// Returns whether a descriptor is a set that the program has created.
pub fn is_set(epfd: RawFd) -> bool {
    first(epfd).is_some_and(|first| first.is_set.load(Ordering::Relaxed))
}

/// Notes that a descriptor is about to be closed, in case it is a set.
#[inline]
pub fn forget_set(epfd: RawFd) {
    if let Some(first) = first(epfd).filter(|first| first.is_set.load(Ordering::Relaxed)) {
        first.is_set.store(false, Ordering::Relaxed);
        first.is_split.store(false, Ordering::Relaxed);
    }
}

/// Notes that a set has a descriptor of which the library does not know that it is the same set.
pub fn split(epfd: RawFd) {
    if let Some(first) = ensure_first(epfd) {
        first.is_set.store(true, Ordering::Relaxed);
        first.is_split.store(true, Ordering::Relaxed);
    }
}

/// Returns whether a set gets no members for that reason.
pub fn is_split(epfd: RawFd) -> bool {
    first(epfd).is_some_and(|first| first.is_split.load(Ordering::Relaxed))
}

/// Notes that a thread begins to wait on a set without members, which may get one meanwhile.
pub fn add_waiter(epfd: RawFd) {
    if let Some(first) = ensure_first(epfd) {
        first.waiters.fetch_add(1, Ordering::SeqCst);
    }
}

/// Notes that the wait has ended.
pub fn remove_waiter(epfd: RawFd) {
    if let Some(first) = first(epfd) {
        first.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns whether a thread has begun to wait on a set when it had no members.
pub fn has_waiters(epfd: RawFd) -> bool {
    first(epfd).is_some_and(|first| first.waiters.load(Ordering::SeqCst) > 0)
}

/// Records a registration that the program has made or changed.
pub fn put(fd: RawFd, registration: Registration) {
    let Some(first) = ensure_first(fd) else { return };
    match first.get() {
        Some(other) if other.epfd != registration.epfd => FURTHER.with(|further| {
            let known = further.iter_mut().find(|(of, it)| *of == fd && it.epfd == registration.epfd);
            match known {
                Some((_, known)) => *known = registration,
                None => further.push((fd, registration)),
            }
            first.has_further.store(true, Ordering::Release);
            HAS_FURTHER.store(true, Ordering::Release);
        }),
        _ => first.put(registration),
    }
}

/// Returns whether a descriptor has a registration.
#[inline]
pub fn is_any(fd: RawFd) -> bool {
    first(fd).is_some_and(|first| first.set.load(Ordering::Acquire) != 0 || first.has_further.load(Ordering::Acquire))
}

/// Returns the registrations of a descriptor.
pub fn of(fd: RawFd) -> Vec<Registration> {
    let mut all: Vec<Registration> = first(fd).and_then(First::get).into_iter().collect();
    if HAS_FURTHER.load(Ordering::Acquire) {
        FURTHER.with(|further| all.extend(further.iter().filter(|(of, _)| *of == fd).map(|(_, it)| *it)));
    }
    all
}

/// Removes the registration of a descriptor in a set.
pub fn remove(fd: RawFd, epfd: RawFd) {
    if let Some(first) = first(fd)
        && first.get().is_some_and(|it| it.epfd == epfd)
    {
        first.set.store(0, Ordering::Release);
    }
    if HAS_FURTHER.load(Ordering::Acquire) {
        FURTHER.with(|further| further.retain(|(of, it)| *of != fd || it.epfd != epfd));
    }
}

/// Removes all registrations of a descriptor.
pub fn remove_all(fd: RawFd) {
    if let Some(first) = first(fd) {
        first.set.store(0, Ordering::Release);
    }
    if HAS_FURTHER.load(Ordering::Acquire) {
        FURTHER.with(|further| {
            further.retain(|(of, _)| *of != fd);
            if let Some(first) = first(fd) {
                first.has_further.store(false, Ordering::Release);
            }
        });
    }
}

/// Calls `visit` with the first registration of each descriptor that is one in a set.
fn for_each_first(epfd: RawFd, visit: impl Fn(&First)) {
    for page in &FIRST {
        // SAFETY: a pointer in the array that is not null is a leaked box, stored by `ensure_first`.
        let Some(page) = (unsafe { page.load(Ordering::Acquire).as_ref() }) else { continue };
        page.iter().filter(|first| first.set.load(Ordering::Acquire) == epfd as u32 + 1).for_each(&visit);
    }
}

/// Notes that a set is known by another of its descriptors from now on.
pub fn rename_set(epfd: RawFd, next: RawFd) {
    for_each_first(epfd, |first| first.set.store(next as u32 + 1, Ordering::Release));
    FURTHER.with(|further| further.iter_mut().filter(|(_, it)| it.epfd == epfd).for_each(|(_, it)| it.epfd = next));
}

/// Removes the registrations in a set that is about to be closed.
pub fn remove_set(epfd: RawFd) {
    for_each_first(epfd, |first| first.set.store(0, Ordering::Release));
    FURTHER.with(|further| further.retain(|(_, it)| it.epfd != epfd));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_are_known_by_descriptor_and_set() {
        let (fd, one, two) = (900_001, 900_002, 900_003);
        let registration = |epfd, data| Registration { epfd, events: 5, data };
        assert!(of(fd).is_empty());
        put(fd, registration(one, 1));
        assert!(is_any(fd) && !is_any(one));
        put(fd, registration(two, 2));
        put(fd, registration(two, 3));
        put(fd, registration(one, 4));
        assert_eq!(of(fd), [registration(one, 4), registration(two, 3)]);
        remove(fd, one);
        assert_eq!(of(fd), [registration(two, 3)]);
        assert!(is_any(fd) && !is_any(one), "only the descriptor itself has registrations");
        put(fd, registration(one, 5));
        remove_set(two);
        assert_eq!(of(fd), [registration(one, 5)]);
        remove_all(fd);
        assert!(of(fd).is_empty() && !is_any(fd));
    }
}
