//! Socket options that a connection implements itself: timeouts, low-water mark, capacities, and the options that all
//! processes with the endpoint share.

use super::lanes::Lanes;
use super::{Connection, Details};
use crate::options;
use crate::options::control::RequestedControl;
use segment::OwnState;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// The settings that a socket's recorded options request of its connection.
pub(super) struct RequestedOptions {
    pub(super) send_timeout_ns: u64,
    pub(super) receive_timeout_ns: u64,
    pub(super) low_water_bytes: u32,
    pub(super) control: RequestedControl,
    pub(super) send_bytes: usize,
    pub(super) receive_bytes: usize,
}

impl Details {
    /// Returns what the recorded options request.
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
    /// Returns the ancillary data that receives return, if any.
    #[inline]
    pub fn requested_control(&self) -> Option<RequestedControl> {
        match self.requested_control.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(RequestedControl::from_bits(bits)),
        }
    }

    /// Notes the descriptor's blocking mode. The caller changes the kernel's flag of the lifeline.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// Sets `SO_SNDTIMEO` in nanoseconds; 0 disables it.
    pub fn set_send_timeout_ns(&self, timeout_ns: u64) {
        self.send_timeout_ns.store(timeout_ns, Ordering::Relaxed);
    }

    /// Sets `SO_RCVTIMEO` in nanoseconds; 0 disables it.
    pub fn set_receive_timeout_ns(&self, timeout_ns: u64) {
        self.receive_timeout_ns.store(timeout_ns, Ordering::Relaxed);
    }

    /// Applies the options that the program has set on the TCP socket before.
    pub fn apply_recorded_options(&'static self) {
        let requested = self.with_details(Details::requested_options);
        self.apply(&requested);
    }

    /// Does what [`Connection::apply_recorded_options`] and [`Connection::report_connect_later`] do, for a connection
    /// without a descriptor. No signal handler can reach it, so none is masked.
    pub fn begin(&'static self, reports_connect: bool) {
        let (requested, shared) = self.with_details_unmasked(|details| {
            details.reports_connect = reports_connect;
            (details.requested_options(), details.options.shared_bits())
        });
        self.apply(&requested);
        if shared != 0 {
            self.set_shared_options(shared, shared);
        }
    }

    /// Applies the settings to the connection.
    fn apply(&'static self, requested: &RequestedOptions) {
        self.low_water_bytes.store(requested.low_water_bytes, Ordering::Relaxed);
        self.requested_control.store(requested.control.to_bits(), Ordering::Relaxed);
        self.set_send_timeout_ns(requested.send_timeout_ns);
        self.set_receive_timeout_ns(requested.receive_timeout_ns);
        if let Some(_both) = self.lock_both() {
            self.limit_lifeline(requested.send_bytes);
            self.offer_for_capacity(requested.receive_bytes);
            self.set_lane_capacities(requested.send_bytes, requested.receive_bytes);
        }
    }

    /// Returns the options of [`options::SHARED`], a bit each. The caller holds a lock of the connection, or is a
    /// waiter.
    pub(super) fn shared_options(&self) -> u64 {
        let in_memory = |lanes: &Lanes| lanes.segment.load(OwnState::Options);
        self.lanes().map_or_else(|| self.shared_options.load(Ordering::Relaxed), in_memory)
    }

    /// Returns whether one of [`options::SHARED`] is set, by any process that holds the endpoint.
    pub fn has_shared_option(&'static self, bit: u64) -> bool {
        let _guard = self.lock_direction(&self.send_lock);
        self.shared_options() & bit != 0
    }

    /// Sets those of [`options::SHARED`] that `mask` selects. Clearing the cork publishes what is held back.
    pub fn set_shared_options(&'static self, mask: u64, bits: u64) {
        {
            let _guard = self.lock_direction(&self.send_lock);
            let others = self.shared_options.load(Ordering::Relaxed) & !mask;
            self.shared_options.store(others | bits & mask, Ordering::Relaxed);
            if let Some(lanes) = self.lanes() {
                lanes.segment.set_bits(OwnState::Options, mask, bits);
                if mask & options::CORKED != 0 {
                    // SAFETY: the send lock is held, which protects the sender.
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

    /// Reads those of [`options::SHARED`] that the lifeline keeps, for an endpoint that was received without memory:
    /// the options that affect the bytes.
    pub fn read_options_of_lifeline(&'static self) {
        if rustix::net::sockopt::socket_oobinline(self.borrow_lifeline()) == Ok(true) {
            self.set_shared_options(options::URGENT_INLINE, options::URGENT_INLINE);
        }
    }

    /// Preserves the options of [`options::SHARED`] across `exec`: they are kept in the memory of lanes, which the
    /// endpoint gets if it can. `is_inherited` tells which descriptors the next program inherits.
    pub fn keep_options_through_exec(&'static self, is_inherited: impl Fn(RawFd) -> bool) {
        let is_needed = {
            let _guard = self.lock_direction(&self.send_lock);
            self.lanes().is_none() && self.shared_options() != 0
        };
        if is_needed && self.has_descriptor(is_inherited) {
            self.settle_lifeline();
        }
    }

    /// Sets the capacities of both lanes. The caller holds both locks.
    pub(super) fn set_lane_capacities(&self, send_bytes: usize, receive_bytes: usize) {
        let Some(lanes) = self.lanes() else { return };
        // SAFETY: the caller holds the send lock, which protects the sender.
        unsafe { (*lanes.sender.get()).set_capacity(send_bytes) };
        // SAFETY: the caller holds the receive lock, which protects the receiver.
        let receiver = unsafe { &mut *lanes.receiver.get() };
        receiver.set_capacity(receive_bytes);
        if receiver.take_wake_request() {
            self.ring_locked();
        }
    }
}
