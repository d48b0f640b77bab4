//! Sends.

use super::calls::BlockingCall;
use super::lanes::OutLane;
use super::reclaim;
use super::sender::{Resent, Sender, Written};
use super::wait::{Deadline, WaitFor, Woken};
use super::{Connection, Generation, Use};
use crate::flags::MessageFlags;
use crate::kernel::Tcp;
use crate::lifecycle;
use crate::order;
use crate::spans::total_bytes;
use lane::Corrupt;
use libc::iovec;
use meeting::proof::Stream;
use path::SendBy;
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// Most bytes of one step of a send in place: the receiver is woken after each.
const FILL_BYTES_MAX: usize = 256 << 10;

/// What became of a send.
#[derive(Clone, Copy)]
pub enum Sent {
    /// It is done.
    Done(Result<usize, Errno>),
    /// The program's own system call is to do it; call [`Use::note_sent`] of [`Connection::use_of`] afterwards.
    Kernel(Generation),
}

/// What one attempt to send has done.
enum Step {
    Wrote(Written),
    Blocked,
    Kernel,
}

impl Connection {
    /// Sends the spans in order, by the path of the direction.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(always)] // A short message takes a few instructions more than the call itself.
    pub unsafe fn send(&'static self, fd: RawFd, spans: &[iovec], flags: MessageFlags) -> Sent {
        let this = self.current_use(fd);
        // SAFETY: every span is readable for its length, by this function's contract.
        if unsafe { self.send_short(this, spans, flags) } {
            return Sent::Done(Ok(spans[0].iov_len));
        }
        // SAFETY: every span is readable for its length, by this function's contract.
        unsafe { self.send_long(this, spans, flags) }
    }

    /// Leaves a send to the kernel if there is no lane.
    fn send_unmet(&'static self, this: Use) -> Option<Sent> {
        let (mut sender, tcp) = this.sender().ok()?;
        (sender.lane().is_none() && !sender.misses_bytes()).then(|| {
            sender.enter_kernel(tcp, self.role());
            Sent::Kernel(this.generation())
        })
    }

    /// Sends what is no short message, or what there is no room for.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[inline(never)]
    unsafe fn send_long(&'static self, this: Use, spans: &[iovec], flags: MessageFlags) -> Sent {
        if flags.out_of_stream()
            && !self.has_met()
            && let Ok(tcp) = this.tcp()
        {
            // The peer may have agreed to meet and consented to a move, from which this end cannot withdraw yet.
            self.stay_on_tcp(tcp);
        }
        if let Some(sent) = self.send_unmet(this) {
            return sent;
        }
        let may_wait = self.may_block(flags.dont_wait());
        // SAFETY: every span is readable for its length, by this function's contract.
        let write = |sender: &mut Sender, tcp, is_answer| unsafe { sender.write(tcp, spans, 0, may_wait, is_answer) };
        match self.send_step(this, flags, write) {
            Ok(Step::Kernel) => Sent::Kernel(this.generation()),
            Ok(Step::Wrote(written)) => {
                if written.wakes_receiver {
                    self.ring();
                }
                let wanted = if spans.len() == 1 { spans[0].iov_len } else { total_bytes(spans) };
                if written.bytes == wanted {
                    return Sent::Done(Ok(wanted));
                }
                // SAFETY: every span is readable for its length, by this function's contract.
                Sent::Done(unsafe { self.send_waiting(this, spans, written.bytes, flags) })
            }
            // SAFETY: every span is readable for its length, by this function's contract.
            Ok(Step::Blocked) => Sent::Done(unsafe { self.send_waiting(this, spans, 0, flags) }),
            Err(error) => Sent::Done(Err(error)),
        }
    }

    /// Makes one attempt; `write` sends by the lane what there is room for.
    #[inline]
    fn send_step(
        &'static self,
        this: Use,
        flags: MessageFlags,
        write: impl FnOnce(&mut Sender, Tcp, bool) -> Result<Written, Corrupt>,
    ) -> Result<Step, Errno> {
        let (mut sender, tcp) = this.sender()?;
        if flags.out_of_stream() && sender.is_by_lane() && !sender.lane().is_none_or(|lane| lane.is_writable()) {
            // Bytes that are out of the stream wait for room like others.
            return Ok(Step::Blocked);
        }
        let mut by = if flags.kernel_only() || flags.out_of_stream() {
            sender.go_back(tcp, self.role())
        } else {
            sender.prepare(tcp, self.role())
        };
        if flags.out_of_stream() {
            // The kernel's counts are not exact any more.
            sender.stay_on_tcp();
        }
        if by == SendBy::Lane && sender.lane().is_some_and(|lane| lane.has_peer_closed()) {
            // The kernel refuses what comes now, as it would without a lane.
            by = sender.go_back(tcp, self.role());
        }
        let has_left = sender.lane().is_some_and(OutLane::take_left);
        if by == SendBy::Resend {
            match sender.resend(tcp) {
                Ok(Resent::All | Resent::Ended) => by = SendBy::Tcp,
                Ok(Resent::Blocked) => {
                    drop(sender);
                    self.note_path_if(has_left);
                    return Ok(Step::Blocked);
                }
                Err(_) => return Err(self.reset(tcp)),
            }
        }
        if by != SendBy::Lane {
            if sender.misses_bytes() {
                return Err(self.reset(tcp));
            }
            sender.enter_kernel(tcp, self.role());
            drop(sender);
            self.note_path_if(has_left);
            return Ok(Step::Kernel);
        }
        let is_answer = self.is_answering.load(Ordering::Relaxed);
        let written = write(&mut sender, tcp, is_answer).map_err(|_| self.reset(tcp))?;
        if is_answer {
            self.is_answering.store(false, Ordering::Relaxed);
        }
        drop(sender);
        reclaim::sweep_under_pressure();
        Ok(Step::Wrote(written))
    }

    /// Has the sets watch the kernel's room if sends do not use the lane any more.
    fn note_path_if(&self, has_left: bool) {
        if has_left {
            self.for_each_watcher(|set| set.note_path(self));
        }
    }

    /// Sends the rest after `done` bytes: waits and tries again until all is sent.
    ///
    /// # Safety
    /// Every span is readable for its length.
    #[cold]
    #[inline(never)]
    unsafe fn send_waiting(
        &'static self,
        this: Use,
        spans: &[iovec],
        done: usize,
        flags: MessageFlags,
    ) -> Result<usize, Errno> {
        lifecycle::follow_switch();
        let (mut done, wanted) = (done, total_bytes(spans));
        let (mut call, mut deadline) = (BlockingCall::begin(this), Deadline::begin());
        while done < wanted {
            if !self.may_block(flags.dont_wait()) {
                // Sets in which the connection is parked have asked for a ring before there was a need for room.
                self.for_each_watcher(|set| set.poll_again(self));
                reclaim::sweep_while_polling();
                return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
            }
            let result = self.wait(&mut call, &mut deadline, WaitFor::Room).and_then(|woken| {
                let may_wait = woken == Woken::ByMemory;
                // SAFETY: every span is readable for its length, by this function's contract.
                let write = |sender: &mut Sender, tcp, is_answer| unsafe {
                    sender.write(tcp, spans, done, may_wait, is_answer)
                };
                self.send_step(this, flags, write)
            });
            match result {
                Ok(Step::Wrote(written)) => {
                    done += written.bytes;
                    if written.wakes_receiver {
                        self.ring();
                    }
                }
                Ok(Step::Blocked) => {}
                Ok(Step::Kernel) => {
                    // SAFETY: every span is readable for its length, by this function's contract.
                    match unsafe { self.send_by_tcp(this, spans, done) } {
                        Ok(bytes) => done += bytes,
                        Err(Errno::AGAIN | Errno::INTR) => {}
                        Err(error) => return if done > 0 { Ok(done) } else { Err(error) },
                    }
                }
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Sends what `fill` writes in place, such as `read(2)` of a file: at most `len_bytes`. It gets an address, a
    /// length and the number of bytes sent before, and returns how many bytes it wrote; 0 ends the send.
    pub fn send_filled(
        &'static self,
        fd: RawFd,
        len_bytes: usize,
        fill: &mut dyn FnMut(*mut u8, usize, usize) -> Result<usize, Errno>,
    ) -> Sent {
        let (this, flags) = (self.current_use(fd), MessageFlags::default());
        let (mut call, mut deadline) = (BlockingCall::begin(this), Deadline::begin());
        let (mut done, mut prefers_waiting) = (0, self.may_block(false));
        let finish = |done: usize, error| Sent::Done(if done > 0 { Ok(done) } else { Err(error) });
        while done < len_bytes {
            let (step_bytes, mut ended) = ((len_bytes - done).min(FILL_BYTES_MAX), None);
            let mut position = done;
            let mut fill_next = |to: *mut u8, bytes| fill(to, bytes, position).inspect(|filled| position += filled);
            let step = self.send_step(this, flags, |sender, tcp, _| {
                let filled = sender.fill(tcp, step_bytes, prefers_waiting, &mut fill_next);
                filled.map(|(written, end)| {
                    ended = end;
                    written
                })
            });
            match step {
                Ok(Step::Kernel) if done == 0 => return Sent::Kernel(this.generation()),
                Ok(Step::Kernel) => {
                    // SAFETY: there are no bytes.
                    unsafe { this.note_sent(&[], 0) };
                    return Sent::Done(Ok(done));
                }
                Ok(Step::Wrote(Written { bytes, wakes_receiver })) => {
                    done += bytes;
                    if wakes_receiver {
                        self.ring();
                    }
                    match ended {
                        Some(Ok(())) => return Sent::Done(Ok(done)),
                        Some(Err(error)) => return finish(done, error),
                        None if bytes == step_bytes => continue,
                        None => {}
                    }
                }
                Ok(Step::Blocked) => {}
                Err(error) => return finish(done, error),
            }
            if !self.may_block(false) {
                self.for_each_watcher(|set| set.poll_again(self));
                reclaim::sweep_while_polling();
                return finish(done, Errno::AGAIN);
            }
            match self.wait(&mut call, &mut deadline, WaitFor::Room) {
                Ok(woken) => prefers_waiting = woken == Woken::ByMemory,
                Err(error) => return finish(done, error),
            }
        }
        Sent::Done(Ok(done))
    }

    /// Sends by TCP what it has room for, after the first `skip` bytes, for a call that was counted there.
    ///
    /// # Safety
    /// Every span is readable for its length.
    unsafe fn send_by_tcp(&'static self, this: Use, spans: &[iovec], skip: usize) -> Result<usize, Errno> {
        let (mut sender, tcp) = this.sender()?;
        if skip > 0 && tcp.has_failed() {
            // The next call is to report the error, which this one would take.
            sender.leave_kernel(0);
            return Err(Errno::PIPE);
        }
        // SAFETY: every span is readable for its length, by this function's contract.
        let sent = unsafe { tcp.send_part(spans, skip) };
        sender.leave_kernel(sent.unwrap_or(0));
        order::note_use_of_kernel();
        sent
    }
}

impl Use {
    /// Notes that a send by the kernel has returned, and has sent this number of bytes of the spans, or of no memory of
    /// the program's without spans.
    ///
    /// # Safety
    /// The first `bytes` bytes of the spans are readable.
    pub unsafe fn note_sent(self, spans: &[iovec], bytes: usize) {
        let Ok((mut sender, tcp)) = self.sender() else { return };
        sender.leave_kernel(bytes);
        drop(sender);
        if bytes > 0 {
            order::note_use_of_kernel();
        }
        if bytes > 0 && self.connection.is_proving.load(Ordering::Relaxed) {
            // SAFETY: the bytes are readable, by this function's contract.
            unsafe { self.connection.keep(Stream::Sent, spans, bytes) };
        }
        if bytes > 0 && !self.is_closed() {
            self.connection.count(tcp, crate::young::Transfer::Sent);
        }
    }
}
