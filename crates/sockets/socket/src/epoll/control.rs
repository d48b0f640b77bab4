//! `epoll_create1(2)` and `epoll_ctl(2)`.

use super::closing::forget_listener;
use super::kernel;
use super::ready_list::{self, ReadyList};
use super::registration::{EDGE, EXCLUSIVE, ONESHOT, Registration, Target};
use super::set::{EpollSet, POOL, REGISTERED};
use super::wakeup::{poll_again, wake_sleepers};
use crate::connection;
use crate::descriptor::table::{self, Kind, Object};
use crate::listener;
use crate::process::settings::settings;
use crate::process::{background_connects, memory};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// Flags that may be combined with `EPOLLEXCLUSIVE`.
const EXCLUSIVE_ALLOWED: u32 =
    (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32 | EDGE | EXCLUSIVE;

/// `epoll_create1(2)`.
///
/// # Errors
/// As the system call.
pub fn create(flags: i32) -> Result<RawFd, Errno> {
    let fd = kernel::create(flags)?;
    if table::can_hold(fd) && !settings().off {
        ready_list::keep_spare_inner();
        enter(fd);
    }
    Ok(fd)
}

/// Returns the set that an epoll descriptor stands for, if there is one.
#[inline]
pub(super) fn set_of(epfd: RawFd) -> Option<&'static EpollSet> {
    table::load(epfd).get()
}

/// Creates a set for an epoll descriptor of the program.
fn enter(epfd: RawFd) -> &'static EpollSet {
    connection::observe_changes(poll_again);
    listener::observe_closing(forget_listener);
    let set = POOL.take();
    set.spin_history.reset();
    set.with(|ready_list| ready_list.descriptors.push(epfd));
    table::swap(epfd, Object::new(Kind::EpollSet, set));
    set
}

/// `epoll_ctl(2)`.
///
/// # Errors
/// As the system call; `NOMEM` if no descriptor is left for the inner epoll instance.
///
/// # Safety
/// `event` is null or points to an event.
pub unsafe fn control(epfd: RawFd, operation: i32, fd: RawFd, event: *mut epoll_event) -> Result<(), Errno> {
    let target = match Target::of_descriptor(fd) {
        Some(target) if epfd != fd || !matches!(target, Target::Nested(_)) => target,
        // SAFETY: `event` is null or points to an event, by the contract of this function.
        _ => return unsafe { control_foreign(epfd, operation, fd, event) },
    };
    let event = if operation == EPOLL_CTL_DEL {
        epoll_event { events: 0, u64: 0 }
    } else if !memory::is_readable(event) {
        return Err(Errno::FAULT);
    } else {
        // SAFETY: the event is readable, as was just checked; unaligned, because the type is packed on some
        // machines.
        unsafe { event.read_unaligned() }
    };
    let Some(set) = set_of(epfd) else { return control_unknown(epfd, operation, fd, target, event) };
    control_in(set, epfd, operation, fd, target, event)
}

pub(super) fn control_in(
    set: &'static EpollSet,
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    target: Target,
    event: epoll_event,
) -> Result<(), Errno> {
    match target {
        Target::Stream => return control_stream(set, epfd, operation, fd, event),
        Target::Nested(_) => set.nests.store(true, Ordering::Relaxed),
        Target::Connection(_) | Target::Listener(_) => {}
    }
    set.with(|ready_list| control_own(set, ready_list, operation, fd, target, event))
}

unsafe fn control_foreign(epfd: RawFd, operation: i32, fd: RawFd, event: *mut epoll_event) -> Result<(), Errno> {
    // SAFETY: `control` passes on `event` unchanged, which is null or points to an event.
    unsafe { kernel::control_with(epfd, operation, fd, event) }?;
    if operation == EPOLL_CTL_ADD
        && let Some(set) = set_of(epfd)
    {
        set.with(|ready_list| ready_list.has_foreign = true);
    }
    Ok(())
}

/// Handles an epoll instance that was created before the library was loaded, or received from another process: it
/// becomes a set when the first socket of the library's is registered in it.
fn control_unknown(epfd: RawFd, operation: i32, fd: RawFd, target: Target, event: epoll_event) -> Result<(), Errno> {
    let is_new = operation == EPOLL_CTL_ADD && table::can_hold(epfd) && table::load(epfd) == Object::NONE;
    if !is_new {
        return kernel::control(epfd, operation, fd, event.events, event.u64);
    }
    let set = enter(epfd);
    set.with(|ready_list| ready_list.has_foreign = true);
    let result = control_in(set, epfd, operation, fd, target, event);
    if result.is_err() {
        table::swap(epfd, Object::NONE);
        set.remove_descriptor(epfd);
    }
    result
}

pub(super) fn control_stream(
    set: &'static EpollSet,
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: epoll_event,
) -> Result<(), Errno> {
    let _guard = background_connects::hold_off();
    kernel::control(epfd, operation, fd, event.events, event.u64)?;
    set.with(|ready_list| {
        ready_list.has_foreign = true;
        if let Some(index) = ready_list.find(fd) {
            set.drop_registration(ready_list, index);
        }
        if operation != EPOLL_CTL_DEL {
            ready_list.insert(Registration::new(fd, Target::Stream, event.events, event.u64));
            REGISTERED.fetch_add(1, Ordering::Relaxed);
        }
    });
    if background_connects::is_any_pending() {
        wake_sleepers();
    }
    Ok(())
}

fn control_own(
    set: &'static EpollSet,
    ready_list: &mut ReadyList,
    operation: i32,
    fd: RawFd,
    target: Target,
    event: epoll_event,
) -> Result<(), Errno> {
    let found = ready_list.find(fd).or_else(|| ready_list.find_returned(fd, target));
    let events = event.events;
    match (operation, found) {
        (EPOLL_CTL_ADD, _) if events & EXCLUSIVE != 0 && !allows_exclusive(target, events) => Err(Errno::INVAL),
        (EPOLL_CTL_ADD, Some(index)) if is_registered(ready_list, index, fd) => Err(Errno::EXIST),
        (EPOLL_CTL_ADD, found) => {
            match found {
                // A TCP socket had this number before.
                Some(index) if matches!(ready_list.at(index).target, Target::Stream) => {
                    set.drop_registration(ready_list, index)
                }
                // A signal handler has closed the previous owner of the number, and its deferred removal has not been
                // applied yet.
                Some(index) => set.forget(ready_list, index, &[]),
                None => {}
            }
            set.add(ready_list, Registration::new(fd, target, events, event.u64))
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, None) => Err(Errno::NOENT),
        (EPOLL_CTL_MOD, Some(index)) if (events | ready_list.at(index).events) & EXCLUSIVE != 0 => Err(Errno::INVAL),
        (EPOLL_CTL_MOD, Some(index)) => set.change(ready_list, index, event),
        (EPOLL_CTL_DEL, Some(index)) => {
            ready_list.unregister_in_kernel(index);
            set.drop_registration(ready_list, index);
            Ok(())
        }
        _ => Err(Errno::INVAL),
    }
}

/// Returns whether `fd` still refers to the object registered under it, or the object has another descriptor.
fn is_registered(ready_list: &ReadyList, index: u32, fd: RawFd) -> bool {
    let target = ready_list.at(index).target;
    !matches!(target, Target::Stream) && (!Target::has_gone(&(fd, target)) || !target.descriptors().is_empty())
}

fn allows_exclusive(target: Target, events: u32) -> bool {
    events & !EXCLUSIVE_ALLOWED == 0 && events & ONESHOT == 0 && !matches!(target, Target::Nested(_))
}
