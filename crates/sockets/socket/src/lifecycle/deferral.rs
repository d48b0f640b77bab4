//! Changes to listeners that hold connections (`TCP_DEFER_ACCEPT`) and that epoll sets may contain.

use crate::epoll;
use crate::listener::{DeferredAccept, Listener, SharedQueue, wait_ns_of};
use rustix::io::Errno;
use std::os::fd::RawFd;

/// Applies a change of `TCP_DEFER_ACCEPT` to a listener with a lane listener.
///
/// # Errors
/// `MFILE` and similar errors, when no descriptor is free.
pub(super) fn apply_option(fd: RawFd, listener: &'static Listener) -> Result<(), Errno> {
    let wait_ns = wait_ns_of(fd);
    let is_known =
        listener.with(|inner| inner.deferral.as_mut().map(|deferral| deferral.set_wait_ns(wait_ns)).is_some());
    if is_known || wait_ns == 0 {
        return Ok(());
    }
    let lane_fd = listener.lane_fd();
    let queue = listener.with(|inner| inner.parent_queue.take()).map_or_else(|| SharedQueue::new(lane_fd), Ok)?;
    let deferral = DeferredAccept::new(lane_fd, wait_ns, queue)?;
    epoll::rewatch_listener(listener, || {
        listener.with(|inner| inner.deferral.get_or_insert(deferral).set_wait_ns(wait_ns));
    });
    Ok(())
}

/// In the child of a fork: the held connections are the parent's. Parent and child share the program's epoll instances,
/// which would wake the child for the parent's gate only, so a listener that is in one does not hold connections in the
/// child.
pub(super) fn after_fork_in_child(listener: &'static Listener) {
    let Some(before) = listener.with(|inner| inner.deferral.take()) else { return };
    if epoll::holds_listener(listener) {
        listener.with(|inner| inner.parent_queue = Some(before.queue));
        return;
    }
    let fresh = DeferredAccept::new(listener.lane_fd(), before.wait_ns, before.queue).ok();
    listener.with(|inner| inner.deferral = fresh);
}
