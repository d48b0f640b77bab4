//! Receives.

use super::receiver::{Attempt, Violation};
use super::wait::{Deadline, WaitFor, Woken};
use super::{Connection, Use};
use crate::flags::MessageFlags;
use crate::kernel::Tcp;
use crate::spans::{Part, total_bytes};
use crate::young::Transfer;
use ::wait::Spin;
use lane::ShortRead;
use libc::iovec;
use rustix::io::Errno;
use socket::process::blocking;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// What became of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// It is done.
    Done(Result<usize, Errno>),
    /// The program's own system call is to do it; call [`Connection::note_received`] afterwards.
    Kernel,
}

/// The state of a receive that takes more than one attempt.
pub(super) struct Call<'a> {
    pub this: Use,
    tcp: Tcp,
    pub spans: &'a [iovec],
    pub flags: MessageFlags,
    /// Bytes that were received; a receive that only peeks begins again each time.
    done: usize,
}

impl Connection {
    /// Receives into the spans in order, by the path of the direction. Returns 0 bytes at the end of the stream.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline]
    pub unsafe fn receive(&'static self, fd: RawFd, spans: &[iovec], flags: MessageFlags) -> Received {
        let this = self.current_use();
        // SAFETY: every span is writable for its length, by this function's contract.
        let read = unsafe { self.receive_short(this, spans, flags) };
        if let ShortRead::Read(bytes) = read {
            return Received::Done(Ok(bytes));
        }
        let call = Call { this, tcp: Tcp(fd), spans, flags, done: 0 };
        if read == ShortRead::Empty && self.may_block(flags.dont_wait) {
            // No other checks before: they would delay a message that is about to arrive.
            // SAFETY: every span is writable for its length, by this function's contract.
            return unsafe { self.receive_waiting(call) };
        }
        // SAFETY: every span is writable for its length, by this function's contract.
        match unsafe { self.attempt(&call, None) } {
            Ok(Attempt::Kernel) => Received::Kernel,
            Ok(Attempt::Got { bytes, wakes_sender }) => {
                if wakes_sender {
                    self.ring();
                }
                if !flags.wait_all || bytes == total_bytes(spans) {
                    return Received::Done(Ok(bytes));
                }
                let call = Call { done: if flags.peek { 0 } else { bytes }, ..call };
                // SAFETY: every span is writable for its length, by this function's contract.
                unsafe { self.receive_waiting(call) }
            }
            Ok(Attempt::End) => Received::Done(Ok(0)),
            Ok(Attempt::Error(error)) | Err(error) => Received::Done(Err(error)),
            // SAFETY: every span is writable for its length, by this function's contract.
            Ok(Attempt::Nothing) => unsafe { self.receive_waiting(call) },
        }
    }

    /// Makes one attempt, after the kernel has reported `events` if these are given.
    ///
    /// # Safety
    /// Every span is writable for its length.
    #[inline]
    unsafe fn attempt(&'static self, call: &Call, events: Option<i16>) -> Result<Attempt, Errno> {
        let &Call { this, tcp, spans, flags, done } = call;
        let mut receiver = this.receiver()?;
        if flags.out_of_stream {
            receiver.enter_kernel();
            return Ok(Attempt::Kernel);
        }
        if flags.kernel_only && !receiver.is_plain() {
            // The buffers are where no program has memory, which matters once there are bytes for them.
            return if receiver.has_bytes(tcp) { Err(Errno::FAULT) } else { Ok(Attempt::Nothing) };
        }
        let attempt = match events {
            // SAFETY: every span is writable for its length, by this function's contract.
            None => unsafe { receiver.receive(tcp, spans, done, flags) },
            // SAFETY: every span is writable for its length, by this function's contract.
            Some(events) => unsafe { receiver.receive_after(events, tcp, spans, done, flags) },
        };
        match attempt {
            Ok(Attempt::Kernel) => {
                receiver.enter_kernel();
                Ok(Attempt::Kernel)
            }
            Ok(attempt) => {
                self.is_answering.store(true, Ordering::Relaxed);
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
        let wanted = total_bytes(call.spans);
        let may_block = self.may_block(call.flags.dont_wait);
        if wanted == 0 && !call.flags.kernel_only {
            let has_bytes = call.this.receiver().is_ok_and(|mut receiver| receiver.has_bytes(call.tcp));
            return Received::Done(if may_block || has_bytes { Ok(0) } else { Err(Errno::AGAIN) });
        }
        let mut deadline = Deadline::begin();
        let mut spin = Some(Spin::with(&self.spin_history));
        if may_block
            && call.done == 0
            && let Some(spin) = &mut spin
            // SAFETY: every span is writable for its length, by this function's contract.
            && let ShortRead::Read(bytes) = unsafe { self.receive_spinning(&call, spin, deadline) }
        {
            return Received::Done(Ok(bytes));
        }
        let finish = |done: usize, error| Received::Done(if done > 0 { Ok(done) } else { Err(error) });
        loop {
            let events = match self.wait_to_receive(&call, &mut deadline, may_block, &mut spin) {
                Ok(events) => events,
                Err(error) => return finish(call.done, error),
            };
            // SAFETY: every span is writable for its length, by this function's contract.
            match unsafe { self.attempt(&call, events) } {
                Ok(Attempt::Got { bytes, wakes_sender }) => {
                    if wakes_sender {
                        self.ring();
                    }
                    call.done += bytes;
                    if !call.flags.wait_all || call.done == wanted {
                        return Received::Done(Ok(call.done));
                    }
                    if call.flags.peek {
                        // What was peeked at stays, so that nothing would wake this thread for more.
                        let has_ended = blocking::poll_now(call.tcp.0, libc::POLLRDHUP) != 0;
                        if has_ended || !may_block || self.nap(call.tcp, &mut deadline).is_err() {
                            return Received::Done(Ok(call.done));
                        }
                        call.done = 0;
                    }
                }
                Ok(Attempt::End) => return Received::Done(Ok(call.done)),
                Ok(Attempt::Error(error)) | Err(error) => return finish(call.done, error),
                Ok(Attempt::Kernel) if call.done == 0 => return Received::Kernel,
                Ok(Attempt::Kernel) if call.tcp.is_at_mark() => {
                    self.note_received(call.tcp.0, 0);
                    return Received::Done(Ok(call.done));
                }
                Ok(Attempt::Kernel) => {
                    let part = Part::new(call.spans, call.done, usize::MAX);
                    // SAFETY: the part is within spans that are writable, by this function's contract.
                    let received = unsafe { call.tcp.receive(part.spans(), 0) };
                    if let Some(mut receiver) = self.receiver.lock() {
                        receiver.leave_kernel(received.unwrap_or(0));
                    }
                    match received {
                        Ok(0) => return Received::Done(Ok(call.done)),
                        Ok(bytes) => call.done += bytes,
                        Err(Errno::AGAIN | Errno::INTR) => {}
                        Err(_) => return Received::Done(Ok(call.done)),
                    }
                    if call.done == wanted {
                        return Received::Done(Ok(wanted));
                    }
                }
                Ok(Attempt::Nothing) if !may_block => return finish(call.done, Errno::AGAIN),
                Ok(Attempt::Nothing) => {}
            }
        }
    }

    /// Waits until a receive may find something; a call that does not block only asks the kernel, where that may know
    /// more. Returns the kernel's events, if it was asked.
    fn wait_to_receive(
        &'static self,
        call: &Call,
        deadline: &mut Deadline,
        may_block: bool,
        spin: &mut Option<Spin>,
    ) -> Result<Option<i16>, Errno> {
        if may_block {
            let what = if call.done > 0 { WaitFor::MoreData } else { WaitFor::Data };
            let spin = spin.take().unwrap_or_else(|| Spin::with(&self.spin_history));
            return Ok(match self.wait_with(spin, call.this, call.tcp, deadline, what)? {
                Woken::ByMemory => None,
                Woken::ByKernel(events) => Some(events),
            });
        }
        if !call.this.receiver()?.must_ask_kernel() {
            return Err(Errno::AGAIN);
        }
        Ok(Some(blocking::poll_now(call.tcp.0, libc::POLLIN | libc::POLLRDHUP)))
    }

    /// Notes that a receive by the kernel has returned, and has taken this number of bytes.
    pub fn note_received(&'static self, fd: RawFd, bytes: usize) {
        if let Some(mut receiver) = self.receiver.lock() {
            receiver.leave_kernel(bytes);
        }
        if bytes > 0 {
            self.count(Tcp(fd), Transfer::Received);
        }
    }

    /// Resets the connection, whose peer has violated a protocol; returns the error of the call.
    #[cold]
    pub(super) fn reset(&self, tcp: Tcp) -> Errno {
        // The peer's lane cannot be used any more, and TCP has only a part of the stream.
        let _ = rustix::net::sockopt::set_socket_linger(tcp.borrow(), Some(std::time::Duration::ZERO));
        let _ = rustix::net::shutdown(tcp.borrow(), rustix::net::Shutdown::Both);
        Errno::CONNRESET
    }
}
