//! Receives.

use super::calls::BlockingCall;
use super::receiver::{Attempt, Violation};
use super::reclaim;
use super::wait::{Deadline, WaitFor, Woken};
use super::{Connection, Generation, Use};
use crate::flags::MessageFlags;
use crate::lifecycle;
use crate::spans::total_bytes;
use crate::young::Transfer;
use ::wait::Spin;
use lane::ShortRead;
use libc::iovec;
use meeting::proof::Stream;
use rustix::io::Errno;
use socket::process::blocking;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// What became of a receive.
#[derive(Clone, Copy)]
pub enum Received {
    /// It is done.
    Done(Result<usize, Errno>),
    /// The program's own system call is to do it; call [`Use::note_received`] of [`Connection::use_of`] afterwards.
    Kernel(Generation),
}

/// The state of a receive that takes more than one attempt.
pub(super) struct Call<'a> {
    pub this: Use,
    pub spans: &'a [iovec],
    pub flags: MessageFlags,
    /// Bytes that were received; a receive that only peeks begins again each time.
    done: usize,
}

impl Call<'_> {
    /// Returns whether only the program's own call can receive by TCP as it asks for.
    fn is_kernels(&self) -> bool {
        let flags = self.flags;
        flags.kernel_only() || flags.out_of_stream() || (flags.peek() && flags.wait_all())
    }
}

impl Connection {
    /// Receives into the spans in order, by the path of the direction. Returns 0 bytes at the end of the stream.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(always)] // A short message takes a few instructions more than the call itself.
    pub unsafe fn receive(&'static self, fd: RawFd, spans: &[iovec], flags: MessageFlags) -> Received {
        let this = self.current_use(fd);
        // SAFETY: every span is writable for its length, by this function's contract.
        match unsafe { self.receive_short(this, spans, flags) } {
            ShortRead::Read(bytes) => Received::Done(Ok(bytes)),
            // SAFETY: every span is writable for its length, by this function's contract.
            other => unsafe { self.receive_long(this, spans, flags, other == ShortRead::Empty) },
        }
    }

    /// Leaves a receive to the kernel if there is no lane.
    fn receive_unmet(&'static self, this: Use) -> Option<Received> {
        let (mut receiver, _) = this.receiver().ok()?;
        (receiver.lane().is_none() && receiver.is_plain()).then(|| {
            receiver.enter_kernel();
            Received::Kernel(this.generation())
        })
    }

    /// Receives what is no short message; `is_empty` says that the lane was found empty.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(never)]
    unsafe fn receive_long(&'static self, this: Use, spans: &[iovec], flags: MessageFlags, is_empty: bool) -> Received {
        if let Some(received) = self.receive_unmet(this) {
            return received;
        }
        let call = Call { this, spans, flags, done: 0 };
        if is_empty && self.may_block(flags.dont_wait()) {
            // No other checks before: they would delay a message that is about to arrive.
            // SAFETY: every span is writable for its length, by this function's contract.
            return unsafe { self.receive_waiting(call) };
        }
        // SAFETY: every span is writable for its length, by this function's contract.
        match unsafe { self.attempt(&call, None) } {
            Ok(Attempt::Kernel) if self.waits_here(&call) => {
                call.this.leave_kernel(0);
                // SAFETY: every span is writable for its length, by this function's contract.
                unsafe { self.receive_waiting(call) }
            }
            Ok(Attempt::Kernel) => Received::Kernel(call.this.generation()),
            Ok(Attempt::Got { bytes, wakes_sender }) => {
                if wakes_sender {
                    self.ring();
                }
                if !flags.wait_all() || bytes == total_bytes(spans) {
                    return Received::Done(Ok(bytes));
                }
                let call = Call { done: if flags.peek() { 0 } else { bytes }, ..call };
                // SAFETY: every span is writable for its length, by this function's contract.
                unsafe { self.receive_waiting(call) }
            }
            Ok(Attempt::End) => Received::Done(Ok(0)),
            Ok(Attempt::Error(error)) | Err(error) => Received::Done(Err(error)),
            // SAFETY: every span is writable for its length, by this function's contract.
            Ok(Attempt::Nothing) => unsafe { self.receive_waiting(call) },
        }
    }

    /// Returns whether a receive by TCP must not block in the kernel, because this end sends by a lane: the peer may
    /// ask for what it has left there by ringing, which a thread that blocks in the kernel does not notice.
    fn waits_here(&'static self, call: &Call) -> bool {
        self.may_block(call.flags.dont_wait()) && !call.is_kernels() && !self.sends_by_tcp_now(call.this)
    }

    /// Makes one attempt, after the kernel has reported `events` if these are given.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline]
    unsafe fn attempt(&'static self, call: &Call, events: Option<i16>) -> Result<Attempt, Errno> {
        let &Call { this, spans, flags, done } = call;
        let (mut receiver, tcp) = this.receiver()?;
        if flags.out_of_stream() {
            receiver.enter_kernel();
            return Ok(Attempt::Kernel);
        }
        if flags.kernel_only() && !receiver.is_plain() {
            // What follows these spans is where no program has memory, which matters once there are bytes for it.
            if receiver.unread_bytes(tcp.available()) > total_bytes(spans) as u64 {
                return Err(Errno::FAULT);
            }
        }
        let was_by_lane = receiver.is_by_lane();
        let attempt = match events {
            // SAFETY: every span is writable for its length, by this function's contract.
            None => unsafe { receiver.receive(tcp, spans, done, flags) },
            // SAFETY: every span is writable for its length, by this function's contract.
            Some(events) => unsafe { receiver.receive_after(events, tcp, spans, done, flags) },
        };
        if self.has_drawn_reset.load(Ordering::Relaxed)
            && !matches!(attempt, Ok(Attempt::Got { .. }))
            && done == 0
            && tcp.available() == 0
            && let Some(error) = tcp.take_error()
        {
            return Ok(Attempt::Error(error));
        }
        match attempt {
            Ok(Attempt::Kernel) => {
                receiver.enter_kernel();
                Ok(Attempt::Kernel)
            }
            Ok(attempt) => {
                let has_entered = !was_by_lane && receiver.is_by_lane();
                drop(receiver);
                self.is_answering.store(true, Ordering::Relaxed);
                if has_entered {
                    // The sender may have written everything before any set could ask for a ring.
                    self.for_each_watcher(|set| set.poll_again(self));
                }
                Ok(attempt)
            }
            Err(Violation) => Err(self.reset(tcp)),
        }
    }

    /// Receives the rest: waits and tries again until the call is complete.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline(never)]
    unsafe fn receive_waiting(&'static self, mut call: Call) -> Received {
        lifecycle::follow_switch();
        let wanted = total_bytes(call.spans);
        let may_block = self.may_block(call.flags.dont_wait());
        if wanted == 0 && !call.flags.kernel_only() {
            let has_bytes = call.this.receiver().is_ok_and(|(mut receiver, tcp)| receiver.has_bytes(tcp));
            return Received::Done(if may_block || has_bytes { Ok(0) } else { Err(Errno::AGAIN) });
        }
        let (mut blocking, mut deadline) = (BlockingCall::begin(call.this), Deadline::begin());
        let mut spin = Some(Spin::with(&self.spin_history));
        if may_block
            && call.done == 0
            && let Some(spin) = &mut spin
            // SAFETY: every span is writable for its length, by this function's contract.
            && let ShortRead::Read(bytes) = unsafe { self.receive_spinning(&call, spin, deadline) }
        {
            return Received::Done(Ok(bytes));
        }
        // Bytes that a peek has found, which a later attempt finds again.
        let mut peeked = 0;
        // It receives by TCP itself: the number may be another file's once the call has slept.
        let mut by_itself = false;
        let finish = |done: usize, error| Received::Done(if done > 0 { Ok(done) } else { Err(error) });
        loop {
            let awaits_requested = || call.this.receiver().is_ok_and(|(mut receiver, _)| receiver.awaits_requested());
            let stays_here = call.done > 0 || by_itself || awaits_requested();
            let what = if stays_here { WaitFor::MoreData } else { WaitFor::Data };
            let events = match self.wait_to_receive(&mut blocking, &mut deadline, may_block, what, &mut spin) {
                Ok(events) => events,
                Err(error) => return finish(call.done.max(peeked), error),
            };
            // SAFETY: every span is writable for its length, by this function's contract.
            let mut attempt = unsafe { self.attempt(&call, events) };
            if attempt == Ok(Attempt::Kernel) {
                by_itself |= !call.is_kernels() && (blocking.has_slept() || self.waits_here(&call));
                if call.done == 0 && !by_itself {
                    return Received::Kernel(call.this.generation());
                }
                // At a mark a receive stops, and an error is for the next call to report.
                if call.done > 0 && call.this.tcp().is_ok_and(|tcp| tcp.is_at_mark() || tcp.has_failed()) {
                    call.this.leave_kernel(0);
                    return Received::Done(Ok(call.done));
                }
                // SAFETY: every span is writable for its length, by this function's contract.
                attempt = unsafe { call.this.receive_by_tcp(call.spans, call.done, call.flags) };
            }
            match attempt {
                Ok(Attempt::Got { bytes, wakes_sender }) => {
                    if wakes_sender {
                        self.ring();
                    }
                    call.done += bytes;
                    if !call.flags.wait_all() || call.done == wanted {
                        return Received::Done(Ok(call.done));
                    }
                    if call.flags.peek() {
                        // What was peeked at stays, so that nothing would wake this thread for more.
                        let tcp = call.this.tcp().map_or(-1, |tcp| tcp.0);
                        let has_ended = blocking::poll_now(tcp, libc::POLLRDHUP) != 0;
                        if has_ended || !may_block || self.nap(&mut blocking, &mut deadline).is_err() {
                            return Received::Done(Ok(call.done));
                        }
                        peeked = std::mem::take(&mut call.done);
                    }
                }
                Ok(Attempt::End) => return Received::Done(Ok(call.done)),
                Ok(Attempt::Error(error)) | Err(error) => return finish(call.done, error),
                Ok(Attempt::Nothing | Attempt::Kernel) if !may_block => return finish(call.done, Errno::AGAIN),
                Ok(Attempt::Nothing | Attempt::Kernel) => {}
            }
        }
    }

    /// Waits until a receive may find something; a call that does not block only asks the kernel, where that may know
    /// more. Returns the kernel's events, if it was asked.
    fn wait_to_receive(
        &'static self,
        blocking: &mut BlockingCall,
        deadline: &mut Deadline,
        may_block: bool,
        what: WaitFor,
        spin: &mut Option<Spin>,
    ) -> Result<Option<i16>, Errno> {
        if may_block {
            let spin = spin.take().unwrap_or_else(|| Spin::with(&self.spin_history));
            return Ok(match self.wait_with(spin, blocking, deadline, what)? {
                Woken::ByMemory => None,
                Woken::ByKernel(events) => Some(events),
            });
        }
        reclaim::sweep_while_polling();
        let (mut receiver, tcp) = blocking.this.receiver()?;
        if !receiver.must_ask_kernel() {
            return Err(Errno::AGAIN);
        }
        drop(receiver);
        Ok(Some(blocking::poll_now(tcp.0, libc::POLLIN | libc::POLLRDHUP)))
    }
}

impl Use {
    /// Receives by TCP what has arrived, after the first `skip` bytes of the spans, for a call that was counted there.
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub(super) unsafe fn receive_by_tcp(
        self,
        spans: &[iovec],
        skip: usize,
        flags: MessageFlags,
    ) -> Result<Attempt, Errno> {
        let (mut receiver, tcp) = self.receiver()?;
        // SAFETY: every span is writable for its length, by this function's contract.
        let attempt = unsafe { receiver.receive_up_to(tcp, spans, skip, u64::MAX, flags) };
        receiver.leave_kernel(0);
        Ok(attempt)
    }

    /// Notes that a receive by the kernel has returned, and has taken this number of bytes into the spans, or into no
    /// memory of the program's without spans.
    ///
    /// # Safety
    /// The first `bytes` bytes of the spans are readable.
    pub unsafe fn note_received(self, spans: &[iovec], bytes: usize) {
        self.leave_kernel(bytes);
        if bytes > 0 && self.connection.is_proving.load(Ordering::Relaxed) {
            // SAFETY: the bytes are readable, by this function's contract.
            unsafe { self.connection.keep(Stream::Received, spans, bytes) };
        }
        if bytes > 0
            && !self.is_closed()
            && let Ok(tcp) = self.tcp()
        {
            self.connection.count(tcp, Transfer::Received);
        }
    }

    fn leave_kernel(self, bytes: usize) {
        if let Ok((mut receiver, tcp)) = self.receiver() {
            receiver.leave_kernel(bytes);
            if bytes > 0 {
                // The peer may have asked for a move during the call. A violation is found again by the next receive.
                // Where nothing was taken, the program's own call may still follow, as in `splice_to`.
                let _ = receiver.prepare(tcp);
            }
        }
    }
}
