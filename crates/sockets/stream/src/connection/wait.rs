//! Waiting: spin, then sleep until the kernel reports an event of the socket or the peer rings the bell.
//!
//! A sleeper publishes that it sleeps, polls once more, and then sleeps in the kernel.

use super::calls::BlockingCall;
use super::{Connection, Use};
use crate::kernel::Tcp;
use ::wait::{Action, Spin};
use path::{ReceiveBy, SendBy};
use rustix::io::Errno;
use socket::process::clock::now_ns;
use socket::process::signals::{HandlersRun, SignalCheckpoint};
use socket::process::{blocking, threads};
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Milliseconds that a thread sleeps if it is not alone on the bell, where another thread may consume the byte that was
/// meant for it.
const NAP_MS: i32 = 1;
/// Milliseconds that a thread sleeps at most while it waits for room, if the process has other threads: one of them may
/// shut the connection down for sending, of which the kernel tells nobody.
const ROOM_POLL_MS: i32 = 100;

/// When a wait ends without success.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    began: SignalCheckpoint,
    at_ns: Option<u64>,
    /// The socket has been asked for its timeout.
    is_known: bool,
}

impl Deadline {
    /// Returns the deadline of a call that begins to wait. The socket's timeout is asked for before the first sleep.
    pub fn begin() -> Self {
        Self { began: SignalCheckpoint::now(), at_ns: None, is_known: false }
    }

    /// Asks the socket for its timeout.
    fn find_out(&mut self, tcp: Tcp, what: WaitFor) {
        if !self.is_known {
            let option = if what == WaitFor::Room { libc::SO_SNDTIMEO } else { libc::SO_RCVTIMEO };
            let timeout_ns = tcp.timeout_ns(option);
            self.at_ns = (timeout_ns != 0).then(|| now_ns().saturating_add(timeout_ns));
            self.is_known = true;
        }
    }

    /// Returns `INTR` once a signal handler has run that ends the wait: one without `SA_RESTART`, or any if the wait
    /// has a timeout. The kernel reports this only to threads that sleep in it.
    pub(super) fn check_signals(self) -> Result<(), Errno> {
        match self.began.since() {
            HandlersRun::None => Ok(()),
            HandlersRun::Restarting if self.at_ns.is_none() => Ok(()),
            _ => Err(Errno::INTR),
        }
    }

    /// Returns whether a wait that the kernel has interrupted continues.
    fn continues_after_signal(self) -> bool {
        self.at_ns.is_none() && self.began.restarts()
    }

    /// Returns the milliseconds left, rounded up; -1 for never.
    fn left_ms(self) -> Result<i32, Errno> {
        let Some(at_ns) = self.at_ns else { return Ok(-1) };
        let left_ns = at_ns.saturating_sub(now_ns());
        if left_ns == 0 {
            Err(Errno::AGAIN)
        } else {
            Ok(i32::try_from(left_ns.div_ceil(1_000_000)).unwrap_or(i32::MAX))
        }
    }
}

/// How a wait has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Woken {
    /// There was something in memory, without a sleep.
    ByMemory,
    /// The thread was about to sleep or has slept. The kernel has reported these events of the socket.
    ByKernel(i16),
}

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitFor {
    /// Bytes to receive by a lane, or that the next receive is the kernel's.
    Data,
    /// More bytes to receive, by a lane or by TCP.
    MoreData,
    /// Room to send.
    Room,
}

thread_local! {
    /// The connection that this thread sleeps on. The destructor serves threads that are cancelled while they sleep.
    static ASLEEP: Asleep = const { Asleep(Cell::new(None)) };
}

struct Asleep(Cell<Option<&'static Connection>>);

impl Asleep {
    fn begin(&self, connection: &'static Connection) -> Option<&'static Connection> {
        threads::add(&connection.sleepers, 1);
        self.0.replace(Some(connection))
    }

    fn end(&self, interrupted: Option<&'static Connection>) {
        if let Some(connection) = self.0.replace(interrupted) {
            threads::add(&connection.sleepers, u32::MAX);
        }
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        self.end(None);
    }
}

impl Connection {
    /// Sleeps for a moment, in a wait of which nothing reports the end.
    pub(super) fn nap(&self, call: &mut BlockingCall, deadline: &mut Deadline) -> Result<(), Errno> {
        deadline.find_out(call.this.tcp()?, WaitFor::MoreData);
        deadline.left_ms()?;
        call.note_sleep();
        match blocking::poll_slice(&mut [], NAP_MS) {
            Err(Errno::INTR) if deadline.continues_after_signal() => Ok(()),
            polled => polled.and(deadline.check_signals()),
        }
    }

    /// Waits until there may be what the caller waits for. Returns how the wait has ended.
    pub(super) fn wait(
        &'static self,
        call: &mut BlockingCall,
        deadline: &mut Deadline,
        what: WaitFor,
    ) -> Result<Woken, Errno> {
        let spin = if what == WaitFor::Room { Spin::new() } else { Spin::with(&self.spin_history) };
        self.wait_with(spin, call, deadline, what)
    }

    /// As [`Connection::wait`], with a spin that may have begun before.
    pub(super) fn wait_with(
        &'static self,
        spin: Spin,
        call: &mut BlockingCall,
        deadline: &mut Deadline,
        what: WaitFor,
    ) -> Result<Woken, Errno> {
        let this = call.this;
        if self.spin(spin, this, *deadline, what)? {
            return Ok(Woken::ByMemory);
        }
        deadline.find_out(this.tcp()?, what);
        call.note_sleep();
        let interrupted = ASLEEP.with(|asleep| asleep.begin(self));
        let slept = self.announce_and_sleep(call, *deadline, what);
        ASLEEP.with(|asleep| asleep.end(interrupted));
        slept
    }

    /// Spins while the direction uses a lane. Returns `false` when it is time to sleep.
    fn spin(&'static self, mut spin: Spin, this: Use, deadline: Deadline, what: WaitFor) -> Result<bool, Errno> {
        loop {
            match self.is_ready(this, what)? {
                Some(true) => return Ok(true),
                Some(false) => {}
                None => return Ok(false),
            }
            match spin.iterate() {
                Action::Poll => {}
                Action::PollKernel => deadline.check_signals()?,
                Action::Block => return Ok(false),
            }
        }
    }

    /// Returns whether the lane has what the caller waits for; `None` if the direction does not go by the lane.
    #[inline]
    fn is_ready(&'static self, this: Use, what: WaitFor) -> Result<Option<bool>, Errno> {
        Ok(match what {
            WaitFor::Data | WaitFor::MoreData => this.receiver()?.0.lane_in_use().map(|lane| lane.may_have_data()),
            WaitFor::Room => {
                let (mut sender, _) = this.sender()?;
                if sender.is_by_lane() { sender.lane().map(|lane| lane.may_have_room()) } else { None }
            }
        })
    }

    /// Publishes that this thread sleeps, polls once more, and sleeps.
    fn announce_and_sleep(
        &'static self,
        call: &mut BlockingCall,
        deadline: Deadline,
        what: WaitFor,
    ) -> Result<Woken, Errno> {
        let this = call.this;
        let has_changed = match what {
            WaitFor::Data | WaitFor::MoreData => {
                let (mut receiver, tcp) = this.receiver()?;
                if let Some(lane) = receiver.lane() {
                    lane.announce_sleep();
                }
                // The sender may have begun or ended a move before it could see that this thread sleeps.
                match receiver.prepare(tcp) {
                    Ok(ReceiveBy::Lane) => receiver.lane_in_use().is_none_or(|lane| lane.may_have_data()),
                    Ok(ReceiveBy::Nothing | ReceiveBy::KernelUpTo(_)) => false,
                    Ok(ReceiveBy::Kernel) => what == WaitFor::Data,
                    Err(_) => true,
                }
            }
            WaitFor::Room => {
                let (mut sender, tcp) = this.sender()?;
                if let Some(lane) = sender.lane() {
                    lane.announce_sleep();
                }
                // The receiver may have left the lane.
                sender.prepare(tcp, self.role()) == SendBy::Lane && sender.lane().is_none_or(|lane| lane.has_room(tcp))
            }
        };
        if has_changed {
            return Ok(Woken::ByKernel(0));
        }
        self.sleep(call, deadline, what)
    }

    fn sleep(&'static self, call: &mut BlockingCall, deadline: Deadline, what: WaitFor) -> Result<Woken, Errno> {
        let events = match what {
            WaitFor::Data | WaitFor::MoreData => libc::POLLIN | libc::POLLRDHUP,
            WaitFor::Room if self.sends_by_lane() => 0,
            WaitFor::Room => libc::POLLOUT,
        };
        let left_ms = deadline.left_ms()?;
        // As late as possible: a handler that runs from now on interrupts the system call.
        deadline.check_signals()?;
        let is_alone = self.sleepers.load(Ordering::SeqCst) == 1;
        let longest_ms = match () {
            () if !is_alone => NAP_MS,
            () if what == WaitFor::Room && !threads::is_single() => ROOM_POLL_MS,
            () if what != WaitFor::Room && !threads::is_single() && !self.receives_by_lane() => call.recheck_ms(),
            () => -1,
        };
        let this = call.this;
        let timeout_ms = match () {
            () if left_ms < 0 => longest_ms,
            () if longest_ms < 0 => left_ms,
            () => left_ms.min(longest_ms),
        };
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let tcp = this.tcp()?;
        let mut entries = [entry(tcp.0, events), entry(if is_alone { self.bell() } else { -1 }, libc::POLLIN)];
        match blocking::poll_slice(&mut entries, timeout_ms) {
            Err(Errno::INTR) if deadline.continues_after_signal() => {}
            polled => {
                polled?;
            }
        }
        if entries[1].revents != 0 && self.sleepers.load(Ordering::SeqCst) == 1 {
            self.answer_ring_for(this);
            self.for_each_watcher(|set| set.poll_again(self));
        }
        // A close meanwhile may have given the number to another file.
        let is_same = this.tcp() == Ok(tcp);
        Ok(Woken::ByKernel(if is_same { entries[0].revents } else { 0 }))
    }
}
