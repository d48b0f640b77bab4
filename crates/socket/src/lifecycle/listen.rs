//! `listen`: a lane listener beside the TCP one.

use super::descriptor::set_cloexec;
use super::inspect;
use super::{LISTENERS, Listener, ListenerInner, STREAMS, Stream, StreamInner, count_fallback, ledger, settings};
use crate::interest;
use crate::limit;
use crate::rendezvous;
use crate::table::{self, Entry};
use ledger::FallbackReason;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, RawFd};

/// After `listen(2)` has succeeded on `fd`: adds a lane listener, where the rules have the port take lanes.
pub fn listen(fd: RawFd, backlog: i32) {
    let Entry::Stream(stream) = table::get(fd) else { return };
    // Now, because a server may give up its rights before the first client comes.
    ledger();
    let Ok(bound) = inspect::local_of(fd) else { return };
    if !settings().applies_to(bound.port()) {
        count_fallback(FallbackReason::PortRule);
        return;
    }
    let is_v6only = inspect::is_v6only(fd);
    let reuses_port = inspect::reuses_port(fd);
    let lane = limit::above_when_needed(
        || rendezvous::listen(bound, is_v6only, reuses_port, backlog),
        |error| *error == Errno::MFILE,
    );
    match lane {
        Ok(lane) => promote(fd, stream, lane),
        Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => count_fallback(FallbackReason::ResourceLimit),
        Err(_) => count_fallback(FallbackReason::RackUnavailable),
    }
}

fn promote(fd: RawFd, stream: &'static Stream, lane: rendezvous::LaneListener) {
    let inner = stream.with(std::mem::take::<StreamInner>);
    STREAMS.give_back(stream);
    // SAFETY: the program's descriptor, which it is listening on.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(borrowed).unwrap_or(OFlags::empty());
    set_mode(fd, true);
    let is_nonblocking = flags.contains(OFlags::NONBLOCK);
    let descriptors = inner.descriptors.clone();
    let listener = Listener::open(
        ListenerInner { is_v6: inner.is_v6, descriptors: inner.descriptors, options: inner.options, lane: Some(lane) },
        is_nonblocking,
    );
    for descriptor in descriptors {
        table::set(descriptor, Entry::Listener(listener));
        interest::adopt_listener(descriptor, listener);
    }
    set_cloexec(fd);
}

/// After `shutdown(2)` of a listener: nobody gets in any more, a blocked `accept` ends, and the socket is a plain one
/// again.
pub fn shutdown_listener(listener: &'static Listener) {
    // SAFETY: the hidden descriptor lives as long as the listener, whose descriptor the caller uses.
    let lane = unsafe { BorrowedFd::borrow_raw(listener.lane_fd()) };
    let _ = rustix::net::shutdown(lane, rustix::net::Shutdown::Both);
    let is_nonblocking = listener.is_nonblocking();
    let inner = listener.with(std::mem::take::<ListenerInner>);
    let stream = STREAMS.take();
    stream.with(|own| {
        *own = StreamInner {
            is_v6: inner.is_v6,
            descriptors: inner.descriptors.clone(),
            options: inner.options,
            slot: None,
        };
    });
    for descriptor in inner.descriptors {
        interest::forget_listener(descriptor, listener);
        table::set(descriptor, Entry::Stream(stream));
        set_mode(descriptor, is_nonblocking);
    }
    LISTENERS.give_back(listener);
}

fn set_mode(fd: RawFd, is_nonblocking: bool) {
    // SAFETY: the program's descriptor, in a call about it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    if let Ok(flags) = rustix::fs::fcntl_getfl(borrowed) {
        let mode = if is_nonblocking { OFlags::NONBLOCK } else { OFlags::empty() };
        let _ = rustix::fs::fcntl_setfl(borrowed, flags & !OFlags::NONBLOCK | mode);
    }
}
