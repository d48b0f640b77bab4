//! `listen`: a lane listener in addition to the TCP listener.

use crate::accounting::process_stats;
use crate::entry::{self, Entry};
use crate::epoll;
use crate::listener::{DeferredAccept, LISTENERS, Listener, ListenerInner};
use crate::options::inspect;
use crate::process::settings::settings;
use crate::process::{limit, signals};
use crate::rendezvous::{self, LaneListener};
use crate::stream::{STREAMS, Stream, StreamInner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use stats_page::{DataPath, FallbackReason, Role};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};

/// `listen(2)`: the kernel's, with a lane listener if the settings allow lanes for the port. The lane listener is
/// created first if the address is already known: a client that sees the TCP port listen then finds the lane too.
///
/// # Errors
/// Those of `in_kernel`, which calls the kernel.
pub fn listen(fd: RawFd, backlog: i32, in_kernel: impl FnOnce() -> Result<(), Errno>) -> Result<(), Errno> {
    let stream = match entry::get(fd) {
        Entry::Stream(stream) => stream,
        Entry::Listener(listener) => {
            in_kernel()?;
            // SAFETY: the hidden descriptor is open as long as the listener, one of whose descriptors the calling
            // program uses.
            return rustix::net::listen(unsafe { BorrowedFd::borrow_raw(listener.lane_fd()) }, backlog);
        }
        _ => return in_kernel(),
    };
    let announced = inspect::local_address(fd).ok().filter(|bound| bound.port() != 0);
    let early = announced.map(|bound| add_lane(fd, stream, bound, backlog, false));
    in_kernel()?;
    // The page is created now, because a server may drop its privileges before the first client connects.
    process_stats::page();
    let Ok(bound) = inspect::local_address(fd) else { return Ok(()) };
    // The port differs if the kernel has chosen it, now or before the listener was shut down.
    let lane = match early.filter(|_| announced == Some(bound)) {
        // The kernel lets two processes listen without sharing the address only if both have the same socket.
        Some(Err(FallbackReason::NameTaken)) => add_lane(fd, stream, bound, backlog, true),
        Some(lane) => lane,
        None => add_lane(fd, stream, bound, backlog, false),
    };
    let with_deferral = lane.and_then(|lane| match DeferredAccept::for_listener(fd, lane.fd()) {
        Ok(deferral) => Ok((lane, deferral)),
        Err(_) => Err(FallbackReason::ResourceLimit),
    });
    match with_deferral {
        Ok((lane, deferral)) => signals::without_handlers(|| promote(fd, stream, lane, deferral)),
        Err(reason) => record_kernel_listener(fd, stream, bound, reason),
    }
    Ok(())
}

/// Counts the reason, and records on the stats page that clients connect by kernel TCP only.
fn record_kernel_listener(fd: RawFd, stream: &'static Stream, bound: SocketAddr, reason: FallbackReason) {
    process_stats::count_fallback(reason);
    let slot = process_stats::page().open_connection(&stats_page::NewConnection {
        fd,
        path: DataPath::Kernel,
        role: Role::Listen,
        local: Some(bound),
        peer: None,
        reason: Some(reason),
    });
    stream.with(|inner| inner.listener_slot = Some(slot));
}

fn add_lane(
    fd: RawFd,
    stream: &'static Stream,
    bound: SocketAddr,
    backlog: i32,
    is_on_shared_socket: bool,
) -> Result<LaneListener, FallbackReason> {
    if !settings().applies_to(bound.port()) {
        return Err(FallbackReason::PortRule);
    }
    if settings().honours_filters {
        return Err(FallbackReason::PacketFilters);
    }
    if limit::is_address_space_limited() {
        return Err(FallbackReason::AddressSpaceLimited);
    }
    if stream.with_options(|options| inspect::needs_kernel_tcp(fd, options)) {
        return Err(FallbackReason::UnsupportedCall);
    }
    let netns = inspect::netns_of(fd);
    let is_v6only = inspect::is_v6only(fd);
    let reuses_port = inspect::reuses_port(fd);
    let listen = || match is_on_shared_socket {
        true => rendezvous::listen_on_shared_socket(bound, netns, is_v6only, backlog),
        false => rendezvous::listen(bound, netns, is_v6only, reuses_port, backlog),
    };
    let lane = limit::with_raised_limit(listen, |error| *error == Errno::MFILE);
    lane.map_err(|error| match error {
        Errno::ADDRINUSE => FallbackReason::NameTaken,
        Errno::XDEV => FallbackReason::NamespaceDiffers,
        error => rendezvous::reasons::of_rack_error(error),
    })
}

/// Makes a stream a listener. Called without handlers, so that none closes the socket between the steps.
fn promote(fd: RawFd, stream: &'static Stream, lane: LaneListener, deferral: Option<DeferredAccept>) {
    let inner = stream.with(std::mem::take::<StreamInner>);
    if inner.descriptors.is_empty() {
        return; // It was closed meanwhile.
    }
    STREAMS.release(stream);
    // SAFETY: the descriptor is borrowed for this function; the program is listening on it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(borrowed).unwrap_or(OFlags::empty());
    let is_nonblocking = flags.contains(OFlags::NONBLOCK) && !inspect::is_mode_ours(fd);
    set_mode(fd, true);
    let descriptors = inner.descriptors.clone();
    let StreamInner { is_v6, descriptors: own, options, .. } = inner;
    let lane = Some(lane);
    let inner = ListenerInner { is_v6, descriptors: own, options, lane, deferral, ..ListenerInner::default() };
    let listener = Listener::open(inner, is_nonblocking);
    for descriptor in descriptors {
        entry::set(descriptor, Entry::Listener(listener));
        epoll::adopt_listener(descriptor, listener);
    }
}

/// After `shutdown(2)` of a listener: it accepts no more clients, a blocked `accept` returns, and the socket is a plain
/// one again.
pub fn shutdown_listener(listener: &'static Listener) {
    // No handler that closes the socket may run between the steps.
    signals::without_handlers(|| _ = demote(listener, |fd| epoll::forget_listener(fd, listener), |_| ()));
}

/// Removes the lane listener: clients connect by kernel TCP only from now on.
pub(super) fn leave_to_kernel(listener: &'static Listener) {
    let name = listener.with(|inner| inner.lane.as_ref().map(|lane| lane.name().address));
    let stream = signals::without_handlers(|| demote(listener, |_| (), epoll::adopt_stream));
    if let (Some((fd, stream)), Some(bound)) = (stream, name) {
        record_kernel_listener(fd, stream, bound, FallbackReason::UnsupportedCall);
    }
}

/// Makes a listener a plain TCP socket. `before` and `after` are called for each of its descriptors, before and after
/// the change. Returns the first descriptor and the socket, unless it was closed meanwhile.
fn demote(
    listener: &'static Listener,
    before: impl Fn(RawFd),
    after: impl Fn(RawFd),
) -> Option<(RawFd, &'static Stream)> {
    // SAFETY: the hidden descriptor is open as long as the listener, one of whose descriptors the calling program uses.
    let lane = unsafe { BorrowedFd::borrow_raw(listener.lane_fd()) };
    let _ = rustix::net::shutdown(lane, rustix::net::Shutdown::Both);
    let is_nonblocking = listener.is_nonblocking();
    let inner = listener.with(std::mem::take::<ListenerInner>);
    let first = *inner.descriptors.first()?; // Otherwise it was closed meanwhile.
    let stream = STREAMS.take();
    stream.with(|own| {
        *own = StreamInner {
            is_v6: inner.is_v6,
            descriptors: inner.descriptors.clone(),
            options: inner.options,
            ..StreamInner::default()
        };
    });
    for descriptor in inner.descriptors {
        before(descriptor);
        entry::set(descriptor, Entry::Stream(stream));
        set_mode(descriptor, is_nonblocking);
        inspect::mark_mode(descriptor, false);
        after(descriptor);
    }
    LISTENERS.release(listener);
    Some((first, stream))
}

fn set_mode(fd: RawFd, is_nonblocking: bool) {
    // SAFETY: the descriptor is borrowed for this function, during a call of the program that names it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    if let Ok(flags) = rustix::fs::fcntl_getfl(borrowed) {
        let mode = if is_nonblocking { OFlags::NONBLOCK } else { OFlags::empty() };
        let _ = rustix::fs::fcntl_setfl(borrowed, flags & !OFlags::NONBLOCK | mode);
    }
}
