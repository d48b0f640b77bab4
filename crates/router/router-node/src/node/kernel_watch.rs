//! The thread that watches the kernel's links, addresses, routes and neighbours. To read a full table takes a second or
//! more, in which the control thread would send no keepalives.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::time::{Duration, Instant};

use router_ports::netlink::{Change, Monitor, NetlinkError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::messages::Notifier;

/// Maximum number of routes in a batch: some milliseconds of the control thread.
const ROUTES_MAX: usize = 4096;
/// Maximum number of batches that wait for the control thread. Then events wait in the kernel.
const BATCHES_MAX: usize = 4;
/// Maximum interval between two looks at the kernel, in case a notification was lost.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Minimum interval between two looks. Changes that come one by one are passed on together, because each batch wakes
/// the control threads of all nodes: a million routes took 12.1 s of processor time without the pause, 4.9 s with it.
const LOOK_PAUSE: Duration = Duration::from_millis(2);
/// How often a thread that waits for the whole state makes room for batches.
const ROOM_INTERVAL: Duration = Duration::from_millis(1);

/// What the thread has seen since the last batch.
#[derive(Debug)]
pub struct KernelBatch {
    /// The changes in order, or why they could not be read.
    pub changes: Result<Vec<Change>, NetlinkError>,
    /// [`Monitor::resyncs`].
    pub resyncs: u64,
    /// [`Monitor::unreadable`].
    pub unreadable: u64,
}

/// The control thread's end. Dropping it ends the thread.
pub struct KernelWatch {
    batches: Receiver<KernelBatch>,
    /// Batches that have arrived while the whole state was waited for.
    early: VecDeque<KernelBatch>,
    requests: Sender<Sender<Vec<Change>>>,
    has_batches: Arc<Notifier>,
    has_requests: Arc<Notifier>,
}

impl KernelWatch {
    /// Starts the thread. Its first batches have the existing state.
    ///
    /// # Errors
    /// The kernel has no room for a thread or a descriptor.
    pub fn start(monitor: Monitor) -> io::Result<Self> {
        let (batch_sender, batches) = sync_channel(BATCHES_MAX);
        let (requests, request_receiver) = channel();
        let (has_batches, has_requests) = (Arc::new(Notifier::new()?), Arc::new(Notifier::new()?));
        let thread = WatchThread {
            monitor,
            batches: batch_sender,
            requests: request_receiver,
            has_batches: Arc::clone(&has_batches),
            has_requests: Arc::clone(&has_requests),
        };
        std::thread::Builder::new().name("kernel".to_owned()).spawn(move || thread.run())?;
        Ok(Self { batches, early: VecDeque::new(), requests, has_batches, has_requests })
    }

    /// Returns a descriptor that is readable when there may be a batch.
    pub fn wakes(&self) -> BorrowedFd<'_> {
        self.has_batches.as_fd()
    }

    /// Returns the next batch, if there is one.
    pub fn next(&mut self) -> Option<KernelBatch> {
        if let Some(batch) = self.early.pop_front() {
            return Some(batch);
        }
        // Before the look, so that a batch that arrives meanwhile is reported again.
        self.has_batches.drain();
        let batch = self.batches.try_recv().ok();
        if batch.is_some() {
            self.has_batches.notify();
        }
        batch
    }

    /// Returns the state as changes from nothing. It has what the batches that wait have.
    pub fn all(&mut self) -> Vec<Change> {
        let (sender, state) = channel();
        if self.requests.send(sender).is_err() {
            return Vec::new();
        }
        self.has_requests.notify();
        loop {
            match state.recv_timeout(ROOM_INTERVAL) {
                Ok(state) => return state,
                Err(RecvTimeoutError::Timeout) => self.early.extend(self.batches.try_iter()),
                Err(RecvTimeoutError::Disconnected) => return Vec::new(),
            }
        }
    }
}

impl Drop for KernelWatch {
    fn drop(&mut self) {
        // The thread finds its channels closed.
        self.has_requests.notify();
    }
}

struct WatchThread {
    monitor: Monitor,
    batches: SyncSender<KernelBatch>,
    requests: Receiver<Sender<Vec<Change>>>,
    has_batches: Arc<Notifier>,
    has_requests: Arc<Notifier>,
}

impl WatchThread {
    fn run(mut self) {
        loop {
            match self.requests.try_recv() {
                // Whoever has asked may have gone.
                Ok(request) => _ = request.send(self.monitor.all()),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return,
            }
            let looked_at = Instant::now();
            let (changes, has_more) = match self.monitor.changes_part(ROUTES_MAX) {
                Ok((changes, has_more)) => (Ok(changes), has_more),
                Err(error) => (Err(error), false),
            };
            let is_news = changes.as_ref().map_or(true, |changes| !changes.is_empty());
            let (resyncs, unreadable) = (self.monitor.resyncs(), self.monitor.unreadable());
            if is_news && self.batches.send(KernelBatch { changes, resyncs, unreadable }).is_err() {
                return;
            }
            if is_news {
                self.has_batches.notify();
            }
            if !has_more {
                self.wait();
                std::thread::sleep(LOOK_PAUSE.saturating_sub(looked_at.elapsed()));
            }
        }
    }

    /// Waits for events or requests.
    fn wait(&self) {
        let descriptors = [self.monitor.wakes(), self.has_requests.as_fd()];
        let mut polled = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // An interrupted call is treated as a timeout.
        let _ = poll(&mut polled, Some(&LOOK_INTERVAL));
        self.has_requests.drain();
    }
}
