//! TCP listeners with a lane listener each.

mod deferral;
mod observer;
mod shared_queue;

use crate::accounting::process_stats;
use crate::descriptor::hidden;
use crate::descriptor::table::{Kind, Tracked};
use crate::options::{OptionRecord, inspect};
use crate::process::pool::Pool;
use crate::process::shared::{Shared, remove_is_last};
use crate::rendezvous::LaneListener;
use crate::rendezvous::name_key::NameKey;
use stats_page::ConnectionSlot;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use deferral::{
    DEFER_ACCEPT, DeferredAccept, accept, mark_listeners_shared, resume_after_exec, share_before_exec, wait_ns_of,
};
pub(crate) use observer::observe_closing;
pub(crate) use shared_queue::{SharedQueue, close_orphaned_queues};

/// A TCP listener with a lane listener. The kernel socket is always in non-blocking mode, so that a call that waits for
/// both never blocks in one; the mode that the program has set is recorded here.
#[derive(Default)]
pub struct Listener {
    pub(crate) shared: Shared<ListenerInner>,
    is_nonblocking: AtomicBool,
    /// A wait for readiness has reported a client that came by the lane listener, and no call has accepted since.
    has_notified: AtomicBool,
}

// SAFETY: no other type lists this kind, and the fields of the struct have an alignment of 8.
unsafe impl Tracked for Listener {
    const KINDS: &'static [Kind] = &[Kind::Listener];
}

#[derive(Default)]
pub(crate) struct ListenerInner {
    pub(crate) is_v6: bool,
    pub(crate) descriptors: Vec<RawFd>,
    pub(crate) options: OptionRecord,
    pub(crate) lane: Option<LaneListener>,
    /// The connections that are held until they have bytes (`TCP_DEFER_ACCEPT`).
    pub(crate) deferral: Option<DeferredAccept>,
    /// The queue to which the parent of this process releases connections, until this process uses the listener: it is
    /// passed on to a program that follows by `exec`.
    pub(crate) parent_queue: Option<SharedQueue>,
    /// Its row of `crosslane stat`, which is removed with it.
    pub(crate) _slot: Option<ConnectionSlot>,
}

impl ListenerInner {
    /// Releases the held connections to other processes.
    pub(crate) fn share_all(&mut self) {
        if let Some(deferral) = &mut self.deferral {
            deferral.share(usize::MAX);
        }
    }
}

pub(crate) static LISTENERS: Pool<Listener> = Pool::new();

impl Listener {
    pub(crate) fn with<R>(&'static self, access: impl FnOnce(&mut ListenerInner) -> R) -> R {
        self.shared.with(access, |fd| self.remove_descriptor(fd))
    }

    /// Removes a descriptor of the listener that the program has closed.
    pub(crate) fn remove_descriptor(&'static self, fd: RawFd) {
        if self.shared.defers_close(fd) {
            return;
        }
        observer::notify_closing(fd, self);
        let last = self.with(|inner| {
            remove_is_last(&mut inner.descriptors, fd).then(|| {
                inner.share_all();
                std::mem::take::<ListenerInner>(inner)
            })
        });
        if last.is_some() {
            drop(last);
            LISTENERS.release(self);
        }
    }

    /// Returns the hidden descriptor on which lane connections arrive.
    pub fn lane_fd(&'static self) -> RawFd {
        self.with(|inner| inner.lane.as_ref().map_or(-1, LaneListener::fd))
    }

    /// Returns the descriptor that is readable when a lane connection may have arrived; [`Listener::has_lane_client`]
    /// then shows whether one has.
    pub fn watched_fd(&'static self) -> RawFd {
        self.with(|inner| match (&inner.deferral, &inner.lane) {
            (Some(deferral), _) => deferral.gate(),
            (None, lane) => lane.as_ref().map_or(-1, LaneListener::fd),
        })
    }

    /// Returns whether `accept` would find a lane connection, once the watched descriptor is readable.
    pub fn has_lane_client(&'static self) -> bool {
        let has_client = deferral::has_client(self);
        if has_client {
            self.has_notified.store(true, Ordering::Relaxed);
        }
        has_client
    }

    /// Returns whether the program may have been notified of a client that came by the lane listener, and clears that.
    pub(crate) fn take_notification(&'static self) -> bool {
        self.has_notified.swap(false, Ordering::Relaxed)
    }

    /// Returns the hidden descriptor and the key of the names that connecting endpoints have.
    pub(crate) fn lane(&'static self) -> Option<(RawFd, NameKey)> {
        self.with(|inner| inner.lane.as_ref().map(|lane| (lane.fd(), lane.key())))
    }

    /// Runs `access` on the program's descriptors of this listener.
    pub fn with_descriptors<R>(&'static self, access: impl FnOnce(&[RawFd]) -> R) -> R {
        self.with(|inner| access(&inner.descriptors))
    }

    /// Creates the listener of the program's descriptors in `inner`, with its lane listener.
    pub(crate) fn open(inner: ListenerInner, is_nonblocking: bool) -> &'static Self {
        hidden::note_inheritable();
        let listener = LISTENERS.take();
        let slot = inner.lane.as_ref().map(|lane| {
            process_stats::page().open_connection(&stats_page::NewConnection {
                path: stats_page::DataPath::Lane,
                role: stats_page::Role::Listen,
                fd: inner.descriptors.first().copied().unwrap_or(-1),
                local: Some(lane.name().address),
                peer: None,
                reason: None,
            })
        });
        listener.with(|own| *own = ListenerInner { _slot: slot, ..inner });
        listener.take_notification();
        listener.set_nonblocking(is_nonblocking);
        listener
    }

    /// Returns whether clients can connect by lanes. False in a signal handler that has interrupted the holder of the
    /// lock.
    pub(crate) fn is_listening(&'static self) -> bool {
        !self.shared.lock.is_held_by_this_thread() && self.with(|inner| inner.lane.is_some())
    }

    /// Sets whether the lane listener and the shared queue stay open through `exec`.
    pub(crate) fn set_inheritable(&'static self, inheritable: bool) {
        if inheritable {
            deferral::mark_listeners_shared();
        }
        self.with(|inner| {
            let queue = inner.deferral.as_ref().map(DeferredAccept::queue).or(inner.parent_queue.as_ref());
            queue.inspect(|queue| queue.set_inheritable(inheritable));
            inner.lane.as_ref().inspect(|lane| lane.set_inheritable(inheritable)).is_some()
        });
    }

    /// Returns whether the program has set the descriptor to non-blocking mode.
    pub fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Records the mode that the program has set; the kernel socket stays non-blocking.
    pub fn set_nonblocking(&'static self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
        inspect::remember_mode(self.lane_fd(), nonblocking);
        if let Some(fd) = self.with(|inner| inner.descriptors.first().copied()) {
            inspect::mark_mode(fd, !nonblocking);
        }
    }

    /// Runs `access` on the record of the socket's options.
    pub fn with_options<R>(&'static self, access: impl FnOnce(&mut OptionRecord) -> R) -> R {
        self.with(|inner| access(&mut inner.options))
    }
}

/// Returns whether the caller is a signal handler that has interrupted a thread which holds the lock of a listener.
pub(crate) fn is_inside_a_listener() -> bool {
    LISTENERS.any(|listener| listener.shared.lock.is_held_by_this_thread())
}

/// Runs `work` as in a signal handler that has interrupted a thread which holds the lock of a listener.
#[cfg(test)]
pub(crate) fn inside_a_listener(work: impl FnOnce()) {
    LISTENERS.take().with(|_| work());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_close_in_a_handler_that_has_interrupted_the_holder_takes_effect_at_unlock() {
        let listener = LISTENERS.take();
        listener.with(|inner| inner.descriptors = vec![904, 905]);
        listener.with(|inner| {
            listener.remove_descriptor(904);
            assert_eq!(inner.descriptors, [904, 905], "the close is left to the holder");
        });
        listener.with(|inner| assert_eq!(inner.descriptors, [905]));
        listener.with_descriptors(|_| listener.remove_descriptor(905));
        listener.with(|inner| assert_eq!(inner.descriptors, []));
        assert!(listener.shared.deferred_closes.is_empty());
    }
}
