//! OPTIONS

use super::lanes::Lanes;
use super::{Connection, Details};
use crate::options;
use crate::options::control::RequestedControl;
use segment::OwnState;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// What the options of a socket ask of its connection.
pub(super) struct RequestedOptions {
    pub(super) send_timeout_ns: u64,
    pub(super) receive_timeout_ns: u64,
    pub(super) low_water_bytes: u32,
    pub(super) control: RequestedControl,
    pub(super) send_bytes: usize,
    pub(super) receive_bytes: usize,
}

impl Details {
    pub(super) fn requested_options(&mut self) -> RequestedOptions {
        self.resets_on_close = self.options.resets_on_close();
        RequestedOptions {
            send_timeout_ns: self.options.send_timeout_ns(),
            receive_timeout_ns: self.options.receive_timeout_ns(),
            low_water_bytes: self.options.low_water_bytes(),
            control: self.options.requested_control(),
            send_bytes: self.options.send_capacity_bytes(),
            receive_bytes: self.options.receive_capacity_bytes(),
        }
    }
}

impl Connection {
    /// What receives are to bring beside the bytes, if anything.
    #[inline]
    pub fn requested_control(&self) -> Option<RequestedControl> {
        match self.requested_control.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(RequestedControl::from_bits(bits)),
        }
    }

    /// Notes the descriptor's blocking mode; the kernel's own flag on the lifeline is the caller's affair.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// `SO_SNDTIMEO` in nanoseconds; 0 waits for ever.
    pub fn set_send_timeout_ns(&self, timeout_ns: u64) {
        self.send_timeout_ns.store(timeout_ns, Ordering::Relaxed);
    }

    /// `SO_RCVTIMEO` in nanoseconds; 0 waits for ever.
    pub fn set_receive_timeout_ns(&self, timeout_ns: u64) {
        self.receive_timeout_ns.store(timeout_ns, Ordering::Relaxed);
    }

    /// Lets the options that the program had set on the TCP socket take effect here.
    pub fn apply_recorded_options(&'static self) {
        let asked = self.with_details(Details::requested_options);
        self.apply(&asked);
    }

    /// As [`Connection::apply_recorded_options`] and [`Connection::report_connect_later`], for a connection that no
    /// descriptor leads to yet: no signal has to be kept off.
    pub fn begin(&'static self, reports_connect: bool) {
        let (asked, shared) = self.with_details_unmasked(|details| {
            details.reports_connect = reports_connect;
            (details.requested_options(), details.options.shared_bits())
        });
        self.apply(&asked);
        if shared != 0 {
            self.set_shared_options(shared, shared);
        }
    }

    pub(super) fn apply(&'static self, asked: &RequestedOptions) {
        self.low_water_bytes.store(asked.low_water_bytes, Ordering::Relaxed);
        self.requested_control.store(asked.control.to_bits(), Ordering::Relaxed);
        self.set_send_timeout_ns(asked.send_timeout_ns);
        self.set_receive_timeout_ns(asked.receive_timeout_ns);
        if let Some(_both) = self.lock_both() {
            self.limit_lifeline(asked.send_bytes);
            self.offer_for_capacity(asked.receive_bytes);
            self.set_lane_capacities(asked.send_bytes, asked.receive_bytes);
        }
    }

    /// Options as in [`options::SHARED`], a bit each. Under a lock, or as a waiter.
    pub(super) fn shared_options(&self) -> u64 {
        let in_memory = |lanes: &Lanes| lanes.segment.load(OwnState::Options);
        self.lanes().map_or_else(|| self.shared_options.load(Ordering::Relaxed), in_memory)
    }

    /// Whether one of [`options::SHARED`] is on, whichever process that holds the end has set it.
    pub fn has_shared_option(&'static self, bit: u64) -> bool {
        let _guard = self.lock_direction(&self.send_lock);
        self.shared_options() & bit != 0
    }

    /// Sets those of [`options::SHARED`] that `mask` names. A cork that is pulled shows what is held back.
    pub fn set_shared_options(&'static self, mask: u64, bits: u64) {
        {
            let _guard = self.lock_direction(&self.send_lock);
            let others = self.shared_options.load(Ordering::Relaxed) & !mask;
            self.shared_options.store(others | bits & mask, Ordering::Relaxed);
            if let Some(lanes) = self.lanes() {
                lanes.segment.set_bits(OwnState::Options, mask, bits);
                if mask & options::CORKED != 0 {
                    // SAFETY: under the send lock.
                    unsafe { (*lanes.sender.get()).ask_for_room_next() };
                }
            }
        }
        if mask & options::URGENT_INLINE != 0 {
            let is_inline = bits & options::URGENT_INLINE != 0;
            let _ = rustix::net::sockopt::set_socket_oobinline(self.borrow_lifeline(), is_inline);
        }
        if mask & !bits & options::CORKED != 0 {
            self.push();
        }
    }

    /// Of an end that came without memory: takes over what of [`options::SHARED`] its lifeline keeps, which is what
    /// decides about bytes.
    pub fn take_options_of_lifeline(&'static self) {
        if rustix::net::sockopt::socket_oobinline(self.borrow_lifeline()) == Ok(true) {
            self.set_shared_options(options::URGENT_INLINE, options::URGENT_INLINE);
        }
    }

    /// Before another program comes to hold the end by `exec`: what is set of [`options::SHARED`] goes along in the
    /// memory of lanes, which the end gets if it can. `is_left` tells descriptors that the program gets.
    pub fn keep_options_through_exec(&'static self, is_left: impl Fn(RawFd) -> bool) {
        let is_needed = {
            let _guard = self.lock_direction(&self.send_lock);
            self.lanes().is_none() && self.shared_options() != 0
        };
        if is_needed && self.has_descriptor(is_left) {
            self.settle_lifeline();
        }
    }

    /// Lets both lanes hold so much. Under both locks.
    pub(super) fn set_lane_capacities(&self, send_bytes: usize, receive_bytes: usize) {
        let Some(lanes) = self.lanes() else { return };
        // SAFETY: under the send lock.
        unsafe { (*lanes.sender.get()).set_capacity(send_bytes) };
        // SAFETY: under the receive lock.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        receiver.set_capacity(receive_bytes);
        if receiver.take_wake_request() {
            self.ring();
        }
    }
}
