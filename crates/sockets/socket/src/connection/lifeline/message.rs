//! The messages between the endpoints in the stream of the lifeline, and how they are distinguished from the program's
//! bytes.
//!
//! A message is one byte with a descriptor attached. A receive ends after bytes with descriptors (`unix(7)`), and a
//! peek without room for descriptors reports that there are some. So a message is never taken for a byte of the
//! program.

use super::super::total_bytes;
use crate::descriptor::received;
use crate::process::system;
use libc::iovec;
use rustix::io::Errno;
use std::cell::UnsafeCell;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// The sender offers memory for both directions.
pub(super) const OFFER: u8 = 2;
/// After this byte, the sender sends by a lane in the attached memory.
pub(in crate::connection) const SWITCH: u8 = 3;
/// After this byte, the sender sends by a lane in the memory that its peer has sent.
pub(in crate::connection) const FOLLOW: u8 = 4;
/// Spans that the kernel accepts in one call.
const SPANS_MAX: usize = 1024;
/// Number of spans that are copied on the stack: a receive of more allocates.
pub(super) const FEW_SPANS: usize = 16;
/// Size of the buffer that peeks overwrite if they only count.
const SINK_BYTES: usize = 64 << 10;
/// A lifeline holds less than this many of those buffers.
const SINK_SPANS: usize = 16;
pub(super) const NO_SPAN: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// A buffer into which the kernel writes for all threads, and that is never read.
struct Sink(UnsafeCell<[u8; SINK_BYTES]>);

// SAFETY: no reference to the bytes exists, only their address for the kernel.
unsafe impl Sync for Sink {}

static SINK: Sink = Sink(UnsafeCell::new([0; SINK_BYTES]));

/// A message that has been received and not handled yet.
pub(super) struct Message {
    pub kind: u8,
    pub memory: Option<OwnedFd>,
}

/// The result of a receive.
pub(super) struct Received {
    pub bytes: usize,
    /// The first descriptor of a file in memory, which is the memory that a message refers to.
    pub rights: Option<OwnedFd>,
    /// Descriptors came, even if none could be received.
    has_rights: bool,
}

/// Returns the spans after the first `skip` bytes. If those end inside a span, returns only the rest of that span, in
/// `one`.
pub(super) fn spans_after<'a>(spans: &'a [iovec], skip: usize, one: &'a mut [iovec; 1]) -> &'a [iovec] {
    let mut skip = skip;
    for (index, span) in spans.iter().enumerate() {
        if skip == 0 {
            return &spans[index..];
        }
        if skip < span.iov_len {
            let begin = span.iov_base.cast::<u8>().wrapping_add(skip).cast();
            one[0] = iovec { iov_base: begin, iov_len: span.iov_len - skip };
            return one;
        }
        skip -= span.iov_len;
    }
    &[]
}

/// Sends the spans after the first `skip` bytes, without blocking.
///
/// # Safety
/// Every span is readable for its length.
pub(super) unsafe fn send_now(fd: RawFd, spans: &[iovec], skip: usize) -> Result<usize, Errno> {
    let mut one = [NO_SPAN];
    let spans = spans_after(spans, skip, &mut one);
    let message = message_of(spans);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message refers to spans that are readable, by this function's contract, and outlive the call.
    let sent = unsafe { system::call!(libc::SYS_sendmsg, fd, &raw const message, flags) };
    usize::try_from(sent).map_err(|_| system::error_of(sent))
}

/// Returns a message header for `spans`.
fn message_of(spans: &[iovec]) -> libc::msghdr {
    // SAFETY: all zeros are a valid, empty message; musl's has padding that a struct literal cannot name.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast_mut();
    message.msg_iovlen = spans.len() as _;
    message
}

/// Sets the lifeline's buffer to its maximum: the kernel allows programs twice the default size.
pub(super) fn widen(lifeline: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_send_buffer_size(lifeline, i32::MAX as usize / 2)
}

/// Sends a message with its memory even if the lifeline is full for the program: half of its buffer is reserved for
/// that.
pub(super) fn send_message(lifeline: BorrowedFd<'_>, kind: u8, memory: BorrowedFd<'_>) -> Result<(), Errno> {
    match send_message_now(lifeline, kind, memory) {
        Err(Errno::AGAIN) => {
            widen(lifeline)?;
            send_message_now(lifeline, kind, memory)
        }
        sent => sent,
    }
}

fn send_message_now(lifeline: BorrowedFd<'_>, kind: u8, memory: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let memory = [memory];
    if !control.push(rustix::net::SendAncillaryMessage::ScmRights(&memory)) {
        return Err(Errno::NOBUFS);
    }
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    match rustix::net::sendmsg(lifeline, &[std::io::IoSlice::new(&[kind])], &mut control, flags)? {
        1 => Ok(()),
        _ => Err(Errno::PROTO),
    }
}

/// Peeks at the next `wanted` bytes as [`peek`] does, into a buffer that is not read, so that the program's memory
/// stays unchanged: a message there would overwrite what follows the bytes that the program receives.
pub(super) fn peek_to_sink(fd: RawFd, wanted: usize) -> Result<(usize, bool), Errno> {
    let wanted = wanted.min(SINK_SPANS * SINK_BYTES);
    let mut spans = [NO_SPAN; SINK_SPANS + 1];
    let count = wanted.div_ceil(SINK_BYTES);
    for (index, span) in spans[..count].iter_mut().enumerate() {
        *span = iovec { iov_base: SINK.0.get().cast(), iov_len: SINK_BYTES.min(wanted - index * SINK_BYTES) };
    }
    spans[count] = iovec { iov_base: SINK.0.get().cast(), iov_len: 1 };
    // SAFETY: each span is a part of the sink, which no code refers to or reads.
    let seen = unsafe { peek_once(fd, &spans[..=count]) };
    seen.map(|(bytes, has_rights)| (bytes.min(wanted), has_rights && bytes > 0 && bytes <= wanted))
}

/// Peeks without room for descriptors. Returns the number of bytes, and whether the last one has a descriptor.
///
/// The kernel reports descriptors when it has come to bytes that have some or, if the buffer is full, when such bytes
/// come anywhere later. So the peek has room for one byte more than is wanted: if that byte stays empty, the peek has
/// ended after the last byte of the stream, or after one with a descriptor.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn peek(fd: RawFd, spans: &[iovec]) -> Result<(usize, bool), Errno> {
    let mut extra = 0_u8;
    let extra = iovec { iov_base: (&raw mut extra).cast(), iov_len: 1 };
    let spans = &spans[..spans.len().min(SPANS_MAX - 1)];
    let wanted = total_bytes(spans);
    let seen = if let [span] = spans {
        // SAFETY: the span is writable by this function's contract, and the byte after it is a local variable.
        unsafe { peek_once(fd, &[*span, extra]) }
    } else {
        let all: Vec<iovec> = spans.iter().copied().chain([extra]).collect();
        // SAFETY: the spans are writable by this function's contract, and the byte after them is a local variable.
        unsafe { peek_once(fd, &all) }
    };
    seen.map(|(bytes, has_rights)| (bytes.min(wanted), has_rights && bytes > 0 && bytes <= wanted))
}

/// Makes the system call of a peek. Returns the number of bytes, and whether descriptors were cut off.
///
/// # Safety
/// Every span is writable for its length.
unsafe fn peek_once(fd: RawFd, spans: &[iovec]) -> Result<(usize, bool), Errno> {
    let mut message = message_of(spans);
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: the message refers to spans that are writable, by this function's contract, and outlive the call.
    let seen = unsafe { system::call!(libc::SYS_recvmsg, fd, &raw mut message, flags) };
    let bytes = usize::try_from(seen).map_err(|_| system::error_of(seen))?;
    Ok((bytes, message.msg_flags & libc::MSG_CTRUNC != 0))
}

/// Receives without blocking. Descriptors that cannot be the memory of a message are closed.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn receive(fd: RawFd, spans: &[iovec], flags: i32) -> Result<Received, Errno> {
    let mut rights = None;
    let keep = |one: OwnedFd| {
        let is_memory = rustix::fs::fcntl_get_seals(&one).is_ok();
        if is_memory && rights.is_none() {
            rights = Some(one);
        } else {
            received::discard(one);
        }
    };
    // SAFETY: every span is writable for its length, by this function's contract.
    let received::Received { bytes, has_rights, .. } = unsafe { received::receive(fd, spans, flags, keep) }?;
    Ok(Received { bytes, rights, has_rights })
}

/// Receives the `bytes` that a peek has found, and nothing of what follows them. Returns the number of bytes of the
/// program, and a message among them.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn receive_exactly(
    fd: RawFd,
    spans: &[iovec],
    bytes: usize,
) -> Result<(usize, Option<Message>), Errno> {
    // SAFETY: the parts are prefixes of spans that are writable, by this function's contract.
    with_prefix(spans, bytes, |parts| unsafe { receive(fd, parts, 0) }.map(|received| split_message(parts, received)))
}

/// Peeks at the `bytes` that a peek has found. Returns how many of them belong to the program.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn peek_exactly(fd: RawFd, spans: &[iovec], bytes: usize) -> Result<usize, Errno> {
    // SAFETY: the parts are prefixes of spans that are writable, by this function's contract.
    with_prefix(spans, bytes, |parts| unsafe { peek(fd, parts) })
        .map(|(seen, has_rights)| seen - usize::from(has_rights))
}

/// Calls `act` with spans of the first `bytes`.
fn with_prefix<R>(spans: &[iovec], bytes: usize, act: impl FnOnce(&[iovec]) -> R) -> R {
    if let [span] = spans {
        return act(&[iovec { iov_base: span.iov_base, iov_len: span.iov_len.min(bytes) }]);
    }
    if spans.len() <= FEW_SPANS {
        let mut few = [NO_SPAN; FEW_SPANS];
        few[..spans.len()].copy_from_slice(spans);
        return act(cut(&mut few[..spans.len()], bytes));
    }
    act(cut(&mut spans[..spans.len().min(SPANS_MAX)].to_vec(), bytes))
}

/// Shortens `spans` to their first `bytes`.
fn cut(spans: &mut [iovec], bytes: usize) -> &[iovec] {
    let (mut left, mut count) = (bytes, 0);
    for span in spans.iter_mut() {
        if left == 0 {
            break;
        }
        span.iov_len = span.iov_len.min(left);
        left -= span.iov_len;
        count += 1;
    }
    &spans[..count]
}

/// Returns the number of bytes of the program, and the message after them.
fn split_message(spans: &[iovec], received: Received) -> (usize, Option<Message>) {
    let Received { bytes, rights, has_rights } = received;
    if !has_rights || bytes == 0 {
        rights.into_iter().for_each(received::discard);
        return (bytes, None);
    }
    let mut last = bytes - 1;
    for span in spans {
        if last < span.iov_len {
            // SAFETY: the kernel has just written a byte at this position of the span.
            let kind = unsafe { span.iov_base.cast::<u8>().add(last).read() };
            return (bytes - 1, Some(Message { kind, memory: rights }));
        }
        last -= span.iov_len;
    }
    (bytes, None)
}
