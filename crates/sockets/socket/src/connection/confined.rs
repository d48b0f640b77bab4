//! A connection of a process that has put itself under a system call filter; see `crate::process::sandbox`.
//!
//! Each call of the program comes with a closure that makes the same call on the lifeline, and the library makes no
//! other call. A direction that uses the lifeline is left to the kernel: the peer can send no message of the library
//! any more, because the kernel refuses its descriptor (`SO_PASSRIGHTS`, Linux 6.16). A direction that uses a lane
//! stays there, in its present ring. A receiver that finds nothing sleeps in the program's call, which brings a ring. A
//! sender that finds no room rings by the program's call, until the lifeline is full of rings and the kernel makes the
//! caller wait for the peer to consume them. A receiver cannot ring: the peer is informed of that, and polls for room.

use super::lanes::Lanes;
use super::lifeline::{FOLLOW, Lookahead, SWITCH};
use super::transfer::ReceiveAttempt;
use super::{Connection, MessageFlags, SHUTDOWN_READ, SHUTDOWN_WRITE, total_bytes};
use crate::descriptor::hidden::close;
use crate::options::SocketOption;
use crate::process::clock::stamp;
use crate::process::system::{self, RING};
use crate::process::{signals, socket_option};
use libc::iovec;
use rustix::io::Errno;
use segment::{BY_LANE_RECEIVE, IS_CONFINED, OwnState};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// `SO_PASSRIGHTS`: whether peers may send descriptors.
const PASS_RIGHTS: SocketOption = SocketOption { level: libc::SOL_SOCKET, name: 83 };
/// Polls of memory before a call: some microseconds, in which a peer that responds at once has responded.
const SPINS_MAX: u32 = 400;
/// Rings that are consumed by one call.
const RING_BATCH_BYTES: usize = 64;
const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// The program's call, made on the lifeline with another buffer, and with these flags as well if the call has flags.
/// Returns the number of bytes, or -1 with `errno`.
pub trait ProgramCall: Fn(*mut u8, usize, i32) -> isize {}
impl<F: Fn(*mut u8, usize, i32) -> isize> ProgramCall for F {}

impl Connection {
    /// Prepares for a filter, while all system calls are still allowed. Returns `false` if that is not possible; then
    /// nothing changes.
    pub(crate) fn confine(&'static self) -> bool {
        if self.is_confined.load(Ordering::Relaxed) {
            return true;
        }
        let is_in_windows = || self.lanes().is_some_and(|lanes| lanes.segment.is_in_windows());
        if self.awaits_handshake.load(Ordering::Relaxed) || is_in_windows() {
            return false;
        }
        self.process_messages_for_all();
        if socket_option::set_raw(self.borrow_lifeline(), PASS_RIGHTS, &0_u32.to_ne_bytes()).is_err() {
            return false; // The kernel is older.
        }
        // Messages that came before the option was set.
        self.process_messages_for_all();
        let Some(_both) = self.lock_both() else { return false };
        if !self.receives_by_lane() && !self.locate_message() {
            self.accept_rights();
            return false;
        }
        self.set_options_on_lifeline();
        self.is_confined.store(true, Ordering::Relaxed);
        if let Some(lanes) = self.lanes() {
            lanes.note_by_lane(IS_CONFINED);
            self.count_as_user(lanes);
            // A peer that relies on rings for room learns that there will be none.
            self.ring_locked();
        }
        true
    }

    /// Undoes what [`Connection::confine`] did.
    pub(crate) fn unconfine(&'static self) {
        let _both = self.lock_both();
        if self.is_confined.swap(false, Ordering::Relaxed) {
            self.accept_rights();
        }
    }

    /// Accepts descriptors from the peer again.
    fn accept_rights(&self) {
        let _ = socket_option::set_raw(self.borrow_lifeline(), PASS_RIGHTS, &1_u32.to_ne_bytes());
    }

    /// Finds the message that may follow bytes of the program in the lifeline, and notes where it is: later the library
    /// could not tell it from those without a system call that the program does not make. Returns `false` if the
    /// message cannot be handled under a filter. The caller holds both locks.
    fn locate_message(&'static self) -> bool {
        let Lookahead { bytes, message, memory, .. } = self.look_ahead();
        let is_ready = match (message, memory) {
            (None, memory) => {
                memory.into_iter().for_each(close);
                return true;
            }
            (Some(SWITCH | FOLLOW), Some(memory)) => self.attach_in_advance(memory),
            (_, memory) => {
                memory.into_iter().for_each(close);
                false
            }
        };
        if is_ready {
            self.lifeline_path.bytes_to_message.store(bytes as u64 + 1, Ordering::Relaxed);
        }
        is_ready
    }

    /// Receives by the lifeline up to the message that was located, or receives that message. Returns `None` if the
    /// input uses the lane.
    fn receive_to_message(
        &'static self,
        spans: &[iovec],
        flags: MessageFlags,
        call: &impl ProgramCall,
    ) -> Option<isize> {
        let bytes_to_message = self.lifeline_path.bytes_to_message.load(Ordering::Relaxed);
        let program_bytes = bytes_to_message.checked_sub(1)? as usize;
        if program_bytes == 0 {
            let mut message = 0_u8;
            let taken = call(&raw mut message, 1, 0);
            if taken != 1 {
                return Some(taken);
            }
            self.lifeline_path.bytes_to_message.store(0, Ordering::Relaxed);
            let both = self.lock_both();
            signals::without_handlers(|| self.use_lanes_for(BY_LANE_RECEIVE));
            drop(both);
            return None;
        }
        let Some(span) = spans.iter().find(|span| span.iov_len > 0) else { return Some(0) };
        let peek = if flags.peek { libc::MSG_PEEK } else { 0 };
        let received = call(span.iov_base.cast(), span.iov_len.min(program_bytes), peek);
        if received > 0 && !flags.peek {
            self.lifeline_path.bytes_to_message.store(bytes_to_message - received as u64, Ordering::Relaxed);
        }
        Some(received)
    }

    /// Sets the options on the lifeline that the program has set on its TCP socket and that the kernel implements from
    /// now on.
    fn set_options_on_lifeline(&self) {
        const KEPT: [i32; 3] = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, libc::SO_RCVLOWAT];
        let record = self.with_details(|details| details.options.clone());
        for name in KEPT {
            let option = SocketOption { level: libc::SOL_SOCKET, name };
            if let Some(value) = record.find(option) {
                let _ = socket_option::set_raw(self.borrow_lifeline(), option, value);
            }
        }
        if self.state().1 & SHUTDOWN_READ != 0 && !self.receives_by_lane() {
            let _ = rustix::net::shutdown(self.borrow_lifeline(), rustix::net::Shutdown::Read);
        }
    }

    /// Returns whether receives use a lane, now or after the located message. Otherwise the kernel serves the program's
    /// call.
    #[inline]
    pub fn receives_confined_by_lane(&self) -> bool {
        self.receives_by_lane() || self.lifeline_path.bytes_to_message.load(Ordering::Relaxed) != 0
    }

    /// Returns whether sends use a lane.
    #[inline]
    pub fn sends_confined_by_lane(&self) -> bool {
        self.sends_by_lane()
    }

    /// Receives by the lane, and sleeps by `call` unless that does not block.
    ///
    /// # Errors
    /// Those of [`Connection::receive`].
    ///
    /// # Safety
    /// Every span is writable for its length.
    pub unsafe fn receive_confined(
        &'static self,
        spans: &[iovec],
        flags: MessageFlags,
        call: impl ProgramCall,
    ) -> Result<usize, Errno> {
        let wanted = total_bytes(spans);
        let generation = self.generation();
        match self.receive_to_message(spans, flags, &call) {
            Some(received) => return usize::try_from(received).map_err(|_| system::errno()),
            None if !self.receives_by_lane() => return Err(Errno::BADF),
            None => {}
        }
        let mut done = 0;
        loop {
            let skip = if flags.peek { 0 } else { done };
            // SAFETY: every span is writable for its length, by this function's contract, and `skip` is within the
            // spans.
            let step = match unsafe { self.receive_by_lane(generation, spans, skip, flags, false) } {
                Err(error) if done == 0 => return Err(error),
                Err(_) | Ok(ReceiveAttempt::End) => return Ok(done),
                Ok(step) => step,
            };
            match step {
                ReceiveAttempt::Moved(bytes) => done = skip + bytes,
                // A call that requests no bytes.
                _ if wanted == 0 => return Ok(0),
                _ => {}
            }
            if done > 0 && (!flags.wait_all || done >= wanted) {
                return Ok(done);
            }
            match self.sleep_confined(&call) {
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sleeps until there may be something to receive.
    fn sleep_confined(&'static self, call: &impl ProgramCall) -> Result<(), Errno> {
        let has_something = || {
            let _guard = self.lock_direction(&self.receive_lock);
            self.lanes().is_none_or(|lanes| self.input_readiness(lanes) != 0)
        };
        if spin_until(has_something) {
            return Ok(());
        }
        let Some(lanes) = self.lanes() else { return Err(Errno::BADF) };
        self.announce_receive_sleep(lanes);
        if has_something() { Ok(()) } else { self.consume_rings(lanes, call) }
    }

    /// Consumes rings in the lifeline by `call`, which waits for one if the program's call would block.
    fn consume_rings(&self, lanes: &Lanes, call: &impl ProgramCall) -> Result<(), Errno> {
        let mut rings = [0_u8; RING_BATCH_BYTES];
        match call(rings.as_mut_ptr(), rings.len(), 0) {
            0 => self.note_hang_up(lanes, false),
            taken if taken > 0 => {}
            _ => match system::errno() {
                Errno::CONNRESET => self.note_hang_up(lanes, true),
                error => return Err(error),
            },
        }
        Ok(())
    }

    /// Sends by the lane, in its present ring. Rings by `call`, and waits for room by it.
    ///
    /// # Errors
    /// Those of [`Connection::send`].
    ///
    /// # Safety
    /// Every span is readable for its length.
    pub unsafe fn send_confined(&'static self, spans: &[iovec], call: impl ProgramCall) -> Result<usize, Errno> {
        let wanted = total_bytes(spans);
        let generation = self.generation();
        let mut done = 0;
        loop {
            // SAFETY: every span is readable for its length, by this function's contract, and `done` is within the
            // spans.
            let (sent, wakes_receiver) = match unsafe { self.send_confined_now(generation, spans, done, wanted) } {
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
                Ok(written) => written,
            };
            done += sent;
            if done >= wanted && !wakes_receiver {
                return Ok(done);
            }
            let has_room = || self.output_readiness(OUTPUT) != 0;
            if !wakes_receiver && spin_until(has_room) {
                continue;
            }
            let mut ring = [RING];
            if call(ring.as_mut_ptr(), 1, 0) < 0 {
                match (system::errno(), self.lanes()) {
                    // A lifeline full of rings wakes the peer as well as one more would.
                    _ if done >= wanted => {}
                    (Errno::PIPE | Errno::CONNRESET, Some(lanes)) => self.note_hang_up(lanes, false),
                    _ if done > 0 => return Ok(done),
                    (error, _) => return Err(error),
                }
            }
            if done >= wanted {
                return Ok(done);
            }
        }
    }

    /// Sends once. Returns the number of bytes, and whether the receiver must be rung.
    ///
    /// # Safety
    /// Every span is readable for its length.
    unsafe fn send_confined_now(
        &'static self,
        generation: u32,
        spans: &[iovec],
        skip: usize,
        wanted: usize,
    ) -> Result<(usize, bool), Errno> {
        let _guard = self.lock_for_generation(generation, &self.send_lock)?;
        let lanes = self.lanes().ok_or(Errno::BADF)?;
        let _shared = self.lock_as_program_waits(lanes, OwnState::SendLock)?;
        if !self.may_send(lanes, wanted - skip)? {
            return Ok((self.bytes_accepted_for_closed_peer(wanted - skip), false));
        }
        // SAFETY: the send lock is held, which protects the sender.
        unsafe { (*lanes.sender.get()).prepare(true, stamp()) };
        // SAFETY: every span is readable for its length, by this function's contract, and the send lock is held.
        let sent = unsafe { self.copy_out(lanes, spans, skip, wanted) }?;
        if sent > 0 {
            self.count_sent(sent);
        }
        // SAFETY: the send lock is held, which protects the sender.
        let sender = unsafe { &mut *lanes.sender.get() };
        sender.end_hold(false);
        Ok((sent, sent > 0 && sender.take_wake_request()))
    }

    /// Returns which of `wanted` hold now in the directions that use lanes.
    pub(crate) fn confined_readiness(&'static self, wanted: i16) -> i16 {
        let mut ready = 0;
        if self.receives_by_lane() {
            let _guard = self.lock_direction(&self.receive_lock);
            ready |= self.lanes().map_or(0, |lanes| self.input_readiness(lanes));
        }
        if self.sends_by_lane() {
            ready |= self.output_readiness(wanted);
        }
        ready & (wanted | libc::POLLERR | libc::POLLHUP)
    }

    /// Notes that the program closes a descriptor. Nothing is unmapped and no callback is called. With the last
    /// descriptor this process closes the connection; its memory stays mapped until the process ends.
    pub(crate) fn close_confined(&'static self, fd: RawFd) {
        let remaining = self.with_details(|details| {
            details.descriptors.retain(|&known| known != fd);
            details.descriptors.first().copied()
        });
        if let Some(other) = remaining {
            self.rename_lifeline(other);
            return;
        }
        let Some(_both) = self.lock_both() else { return };
        if self.lifetime.close() {
            if let Some(lanes) = self.lanes() {
                self.announce_close(lanes);
            }
            // SAFETY: both locks are held. The slot of the stats page is released with the value.
            unsafe { *self.slot.get() = None };
            drop(self.with_details(|details| details.retained_lifeline.take()));
        }
    }

    /// Notes that the program shuts down directions. Its own call tells the kernel, which wakes the sleepers.
    pub fn note_confined_shutdown(&'static self, directions: u64) {
        let Some(_send) = self.lock_direction(&self.send_lock) else { return };
        let Some(lanes) = self.lanes() else { return };
        lanes.segment.store(OwnState::Shutdown, lanes.segment.load(OwnState::Shutdown) | directions);
        if directions & SHUTDOWN_WRITE != 0 {
            // SAFETY: the send lock is held, which protects the sender.
            unsafe { (*lanes.sender.get()).finish() };
        }
    }

    /// Returns whether `poll` must consult this connection, because a direction of it uses a lane.
    pub(crate) fn is_polled_by_lane(&self) -> bool {
        self.lanes().is_some()
    }

    /// Returns whether a wait for `events` includes one for room in a lane.
    pub(crate) fn waits_for_lane_room(&self, events: i16) -> bool {
        events & OUTPUT != 0 && self.sends_by_lane()
    }

    /// Asks the peer to ring. Returns the events to ask the kernel for: only rings where a lane has the bytes.
    pub(crate) fn prepare_confined_poll(&'static self, events: i16) -> i16 {
        let mut polled = events;
        if self.sends_by_lane() {
            polled &= !OUTPUT;
        }
        if let Some(lanes) = self.lanes().filter(|_| self.receives_by_lane()) {
            self.announce_receive_sleep(lanes);
            polled |= libc::POLLIN;
        }
        polled
    }

    /// Translates `revents`, the kernel's result for the lifeline, to the result for `events` of the connection.
    pub(crate) fn confined_revents(
        &'static self,
        revents: i16,
        events: i16,
        consume_rings: impl Fn(*mut u8, usize) -> isize,
    ) -> i16 {
        let Some(lanes) = self.lanes() else { return revents };
        if revents & libc::POLLHUP != 0 {
            self.note_hang_up(lanes, revents & libc::POLLERR != 0);
        }
        let consume_rings = |bytes: *mut u8, len, _: i32| consume_rings(bytes, len);
        let is_message =
            revents & libc::POLLIN != 0 && self.lifeline_path.bytes_to_message.load(Ordering::Relaxed) == 1;
        if is_message {
            let _ = self.receive_to_message(&[], MessageFlags::default(), &consume_rings);
        }
        let mut ready = self.confined_readiness(events);
        if self.receives_by_lane() {
            if !is_message && ready & INPUT == 0 && revents & libc::POLLIN != 0 {
                let _ = self.consume_rings(lanes, &consume_rings);
                ready = self.confined_readiness(events);
            }
        } else {
            ready |= revents & (INPUT | libc::POLLRDHUP | libc::POLLPRI);
        }
        if !self.sends_by_lane() {
            ready |= revents & OUTPUT;
        }
        ready & (events | libc::POLLERR | libc::POLLHUP)
    }

    /// Translates events of the lifeline to those of TCP: a peer that has closed has only ended its direction.
    pub(crate) fn to_tcp_events(&self, revents: i16, wanted: i16) -> i16 {
        let has_closed = revents & libc::POLLHUP != 0 && revents & libc::POLLERR == 0 && self.lanes().is_none();
        if !has_closed || self.state().1 & SHUTDOWN_WRITE != 0 {
            return revents;
        }
        (revents & !libc::POLLHUP) | (wanted & (INPUT | libc::POLLRDHUP))
    }
}

/// Returns whether `is_true` returned `true` within some microseconds.
fn spin_until(is_true: impl Fn() -> bool) -> bool {
    (0..SPINS_MAX).any(|_| {
        let is_true = is_true();
        if !is_true {
            std::hint::spin_loop();
        }
        is_true
    })
}
