//! What the two ends of a connection say to each other in its stream, and how it is told from the program's bytes.
//!
//! A message is one byte with a descriptor attached. A receive ends behind bytes with descriptors (`unix(7)`), and a
//! look without room for descriptors says that there are some: so a message is never taken for the program's.

use super::super::total_bytes;
use crate::descriptor::hidden::close;
use crate::process::system;
use libc::iovec;
use rustix::io::Errno;
use std::cell::UnsafeCell;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Here is memory, for both directions if you like.
pub(super) const OFFER: u8 = 2;
/// Behind this byte, what I send is in this memory.
pub(in crate::connection) const SWITCH: u8 = 3;
/// Behind this byte, what I send is in the memory that you have sent.
pub(in crate::connection) const FOLLOW: u8 = 4;
/// Descriptors that a message may bring before they are cut off; one is right.
const RIGHTS_MAX: usize = 4;
const CONTROL_WORDS: usize = 8;
/// What the kernel takes at once.
const SPANS_MAX: usize = 1024;
/// Where looks put what they only count.
const SINK_BYTES: usize = 64 << 10;
/// A lifeline holds less than so many of them.
const SINK_SPANS: usize = 16;
pub(super) const NO_SPAN: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Written by the kernel for all threads alike, and read by nobody.
struct Sink(UnsafeCell<[u8; SINK_BYTES]>);

// SAFETY: there is never a reference to its bytes, only their address for the kernel.
unsafe impl Sync for Sink {}

static SINK: Sink = Sink(UnsafeCell::new([0; SINK_BYTES]));

/// A message with a descriptor that has been received and not followed yet.
pub(super) struct Message {
    pub kind: u8,
    pub memory: Option<OwnedFd>,
}

/// What a receive has brought.
pub(super) struct Received {
    pub bytes: usize,
    pub rights: Option<OwnedFd>,
    /// Descriptors came, though perhaps none could be had.
    has_rights: bool,
}

/// The spans behind the first `skip` bytes; where those end inside a span, the rest of that one alone.
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

/// # Safety
/// Every span is readable for its length.
pub(super) unsafe fn send_now(fd: RawFd, spans: &[iovec], skip: usize) -> Result<usize, Errno> {
    let mut one = [NO_SPAN];
    let spans = spans_after(spans, skip, &mut one);
    let message = message_of(spans, &mut []);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message is of the caller's spans.
    let sent = unsafe { system::call!(libc::SYS_sendmsg, fd, &raw const message, flags) };
    usize::try_from(sent).map_err(|_| system::error_of(sent))
}

fn message_of(spans: &[iovec], control: &mut [u64]) -> libc::msghdr {
    // SAFETY: all zeros are a message of nothing; musl's has padding that no literal can name.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast_mut();
    message.msg_iovlen = spans.len() as _;
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(control) as _;
    }
    message
}

/// The system's bound for programs is twice what sockets have from the beginning.
pub(super) fn widen(lifeline: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_send_buffer_size(lifeline, i32::MAX as usize / 2)
}

/// Sends a message of ours with its memory, though the lifeline may be full: that is what half of its buffer is for.
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

/// Looks how much of at most `wanted` bytes comes next, as [`peek`] does, and where it finds a message. None of it gets
/// into the program's memory: a message there would change what lies behind the bytes that the program receives.
pub(super) fn peek_to_sink(fd: RawFd, wanted: usize) -> Result<(usize, bool), Errno> {
    let wanted = wanted.min(SINK_SPANS * SINK_BYTES);
    let mut spans = [NO_SPAN; SINK_SPANS + 1];
    let count = wanted.div_ceil(SINK_BYTES);
    for (index, span) in spans[..count].iter_mut().enumerate() {
        *span = iovec { iov_base: SINK.0.get().cast(), iov_len: SINK_BYTES.min(wanted - index * SINK_BYTES) };
    }
    spans[count] = iovec { iov_base: SINK.0.get().cast(), iov_len: 1 };
    // SAFETY: each span is a part of the sink, of which nobody has a reference and nobody reads.
    let seen = unsafe { peek_once(fd, &spans[..=count]) };
    seen.map(|(bytes, has_rights)| (bytes.min(wanted), has_rights && bytes > 0 && bytes <= wanted))
}

/// Looks at what comes next, without room for descriptors. Answers how many bytes, and whether the last one has some.
///
/// The kernel says that there are descriptors when it has come to bytes that have some, or, where the buffer is full,
/// when such bytes come at any later time. So the look has room for one byte more than is asked for: if that stays
/// empty, it has ended behind the last byte that there is, or behind one with descriptors.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn peek(fd: RawFd, spans: &[iovec]) -> Result<(usize, bool), Errno> {
    let mut extra = 0_u8;
    let extra = iovec { iov_base: (&raw mut extra).cast(), iov_len: 1 };
    let spans = &spans[..spans.len().min(SPANS_MAX - 1)];
    let wanted = total_bytes(spans);
    let seen = if let [span] = spans {
        // SAFETY: our caller says that the span is writable, and the byte behind it is our own.
        unsafe { peek_once(fd, &[*span, extra]) }
    } else {
        let all: Vec<iovec> = spans.iter().copied().chain([extra]).collect();
        // SAFETY: our caller says that the spans are writable, and the byte behind them is our own.
        unsafe { peek_once(fd, &all) }
    };
    seen.map(|(bytes, has_rights)| (bytes.min(wanted), has_rights && bytes > 0 && bytes <= wanted))
}

unsafe fn peek_once(fd: RawFd, spans: &[iovec]) -> Result<(usize, bool), Errno> {
    let mut message = message_of(spans, &mut []);
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: the message is of the caller's spans.
    let seen = unsafe { system::call!(libc::SYS_recvmsg, fd, &raw mut message, flags) };
    let bytes = usize::try_from(seen).map_err(|_| system::error_of(seen))?;
    Ok((bytes, message.msg_flags & libc::MSG_CTRUNC != 0))
}

/// Receives without waiting.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn receive(fd: RawFd, spans: &[iovec], flags: i32) -> Result<Received, Errno> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut message = message_of(spans, &mut control);
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message is of the caller's spans and our control buffer.
    let received = unsafe { system::call!(libc::SYS_recvmsg, fd, &raw mut message, flags) };
    let bytes = usize::try_from(received).map_err(|_| system::error_of(received))?;
    let mut rights = None;
    let mut has_rights = message.msg_flags & libc::MSG_CTRUNC != 0;
    // SAFETY: the kernel has filled the control buffer and said how far.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: a whole header, as the macros have found.
        let (level, kind, len) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len as usize) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: computes only.
            let count = (len - unsafe { libc::CMSG_LEN(0) } as usize) / size_of::<RawFd>();
            for index in 0..count.min(RIGHTS_MAX) {
                // SAFETY: the data are so many numbers, just received and nobody else's.
                let one = unsafe {
                    OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().add(index).read_unaligned())
                };
                if let Some(more) = rights.replace(one) {
                    close(more);
                }
            }
            has_rights = true;
        }
        // SAFETY: the header before it was whole, and the macro stays inside the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(Received { bytes, rights, has_rights })
}

/// Receives the `bytes` that were seen, and nothing of what lies behind them. Answers how many are the program's.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn receive_exactly(
    fd: RawFd,
    spans: &[iovec],
    bytes: usize,
) -> Result<(usize, Option<Message>), Errno> {
    // SAFETY: parts of the caller's spans.
    with_prefix(spans, bytes, |parts| unsafe { receive(fd, parts, 0) }.map(|received| split_message(parts, received)))
}

/// Looks at the `bytes` that were seen, and leaves them. Answers how many there are of the program's.
///
/// # Safety
/// Every span is writable for its length.
pub(super) unsafe fn peek_exactly(fd: RawFd, spans: &[iovec], bytes: usize) -> Result<usize, Errno> {
    // SAFETY: parts of the caller's spans.
    with_prefix(spans, bytes, |parts| unsafe { peek(fd, parts) })
        .map(|(seen, has_rights)| seen - usize::from(has_rights))
}

/// Does `act` with the spans of the first `bytes`.
fn with_prefix<R>(spans: &[iovec], bytes: usize, act: impl FnOnce(&[iovec]) -> R) -> R {
    if let [span] = spans {
        return act(&[iovec { iov_base: span.iov_base, iov_len: span.iov_len.min(bytes) }]);
    }
    let mut left = bytes;
    let parts: Vec<iovec> = spans
        .iter()
        .map_while(|span| {
            let iov_len = span.iov_len.min(left);
            let is_part = left > 0;
            left -= iov_len;
            is_part.then_some(iovec { iov_base: span.iov_base, iov_len })
        })
        .take(SPANS_MAX)
        .collect();
    act(&parts)
}

/// The program's bytes, and the message behind them.
fn split_message(spans: &[iovec], received: Received) -> (usize, Option<Message>) {
    let Received { bytes, rights, has_rights } = received;
    if !has_rights || bytes == 0 {
        rights.into_iter().for_each(close);
        return (bytes, None);
    }
    let mut last = bytes - 1;
    for span in spans {
        if last < span.iov_len {
            // SAFETY: the kernel has just written there.
            let kind = unsafe { span.iov_base.cast::<u8>().add(last).read() };
            return (bytes - 1, Some(Message { kind, memory: rights }));
        }
        last -= span.iov_len;
    }
    (bytes, None)
}
