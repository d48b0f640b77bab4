//! `sendmsg`, `recvmsg`, `sendmmsg` and `recvmmsg`: several buffers, and descriptors passed between processes.

use crate::bytes::{
    CONFINED_FLAGS, EMPTY_MESSAGE, connect_and_send, counted_receive, counted_send, receive_confined, receive_spans,
    received_flags, refuse_urgent, send_confined, send_spans, spans, with_spans,
};
use crate::errno::fail;
use crate::{closing, real};
use libc::{cmsghdr, iovec, mmsghdr, msghdr, timespec};
use rustix::io::Errno;
use rustix::net::AddressFamily;
use socket::connection::total_bytes;
use socket::entry::{self, Entry};
use socket::lifecycle;
use socket::options::control::ControlMessage;
use socket::process::clock::now_ns;
use socket::process::memory;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

/// More than a message with 253 descriptors needs, the largest number that the kernel accepts, including the memory
/// that accompanies each connection.
const CONTROL_BYTES: usize = 8192;
/// Words of a buffer for control messages that is on the stack, enough for a message with credentials and a descriptor:
/// a signal handler may receive that.
const CONTROL_WORDS_FEW: usize = 32;

unsafe fn spans_of<'a>(message: *const msghdr) -> Result<&'a [iovec], Errno> {
    memory::check_readable(message)?;
    // SAFETY: the message is readable, as was just checked.
    unsafe { spans((*message).msg_iov, (*message).msg_iovlen, Errno::MSGSIZE) }
}

/// Returns whether a message can be read and has an address.
unsafe fn is_addressed(message: *const msghdr) -> bool {
    // SAFETY: the message is readable, as is checked first.
    memory::is_readable(message) && unsafe { !(*message).msg_name.is_null() }
}

/// Returns whether a message has control messages that can be read. One that cannot is the kernel's to refuse.
unsafe fn has_control(message: *const msghdr) -> bool {
    // SAFETY: the message is readable, as is checked first.
    memory::is_readable(message)
        && unsafe {
            let (control, bytes) = ((*message).msg_control.cast::<u8>(), (*message).msg_controllen);
            bytes > 0 && memory::are_readable(control, bytes)
        }
}

/// Returns whether a message and its control buffer can be written.
///
/// # Safety
/// `message` is readable.
unsafe fn is_room_writable(message: *const msghdr) -> bool {
    // SAFETY: `message` is readable, by this function's contract, and only two fields are copied from it.
    let (control, bytes) = unsafe { ((*message).msg_control.cast::<u8>(), (*message).msg_controllen) };
    memory::is_writable(message) && memory::are_writable(control, bytes)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(connection) => {
                with_spans(spans_of(message), |spans| send_spans(connection, spans, flags))
            }
            Entry::Confined(_) if flags & libc::MSG_OOB != 0 => refuse_urgent(),
            Entry::Confined(connection) if connection.sends_confined_by_lane() => {
                with_spans(spans_of(message), |spans| {
                    send_confined(connection, spans, |bytes, len, _| {
                        let one = iovec { iov_base: bytes.cast(), iov_len: len };
                        let wakeup = msghdr { msg_iov: (&raw const one).cast_mut(), msg_iovlen: 1, ..EMPTY_MESSAGE };
                        real::sendmsg(fd, &raw const wakeup, flags & CONFINED_FLAGS)
                    })
                })
            }
            Entry::Stream(_) if flags & libc::MSG_FASTOPEN != 0 && is_addressed(message) => {
                let address = ((*message).msg_name.cast_const().cast(), (*message).msg_namelen);
                with_spans(spans_of(message), |spans| connect_and_send(fd, spans, flags, address))
            }
            entry @ Entry::Stream(_) => counted_send(entry, real::sendmsg(fd, message, flags)),
            _ if has_control(message) => send_with_rights(fd, message, flags),
            _ => real::sendmsg(fd, message, flags),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        match entry::get(fd) {
            Entry::Connection(_) | Entry::Confined(_) if !memory::is_writable(message) => fail(Errno::FAULT),
            Entry::Connection(connection) => {
                let result = with_spans(spans_of(message), |spans| receive_spans(connection, spans, flags));
                if result >= 0 {
                    (*message).msg_namelen = 0;
                    (*message).msg_flags = received_flags(flags, result);
                    match connection.requested_control() {
                        None => (*message).msg_controllen = 0,
                        Some(wanted) => {
                            put_control(message, wanted.messages(result as usize, || connection.unread_hint()))
                        }
                    }
                }
                result
            }
            Entry::Confined(connection) if connection.receives_confined_by_lane() => {
                let result = with_spans(spans_of(message), |spans| {
                    receive_confined(connection, spans, flags, |bytes, len, more| {
                        let mut one = iovec { iov_base: bytes.cast(), iov_len: len };
                        let mut wakeups = msghdr { msg_iov: &raw mut one, msg_iovlen: 1, ..EMPTY_MESSAGE };
                        real::recvmsg(fd, &raw mut wakeups, flags & libc::MSG_DONTWAIT | more)
                    })
                });
                if result >= 0 {
                    (*message).msg_namelen = 0;
                    (*message).msg_controllen = 0;
                    (*message).msg_flags = 0;
                }
                result
            }
            entry @ Entry::Stream(_) => counted_receive(entry, flags, real::recvmsg(fd, message, flags)),
            _ if has_control(message) && is_room_writable(message) => receive_with_rights(fd, message, flags),
            _ => real::recvmsg(fd, message, flags),
        }
    }
}

/// Writes control messages into the program's buffer, truncated as the kernel truncates them.
///
/// # Safety
/// `message` is valid, as the C program's `recvmsg` requires.
unsafe fn put_control(message: *mut msghdr, messages: impl Iterator<Item = ControlMessage>) {
    // SAFETY: the C program's message, valid as its call requires (manual page).
    let (control, room) = unsafe { ((*message).msg_control.cast::<u8>(), (*message).msg_controllen) };
    let room = if memory::are_writable(control, room) { room } else { 0 };
    let mut used = 0;
    for wanted in messages {
        // SAFETY: these functions only compute sizes.
        let (len, space) = unsafe {
            let data_bytes = wanted.data().len() as c_uint;
            (libc::CMSG_LEN(data_bytes) as usize, libc::CMSG_SPACE(data_bytes) as usize)
        };
        let left = room - used;
        if left < len {
            // SAFETY: the C program's message, valid as its call requires (manual page).
            unsafe { (*message).msg_flags |= libc::MSG_CTRUNC };
        }
        if left < size_of::<cmsghdr>() {
            continue;
        }
        let len = len.min(left);
        let header = cmsghdr { cmsg_len: len, cmsg_level: wanted.level, cmsg_type: wanted.kind };
        // SAFETY: the program's buffer has `left` more bytes, which is at least `len` and the size of a header.
        unsafe {
            let place = control.add(used);
            place.cast::<cmsghdr>().write_unaligned(header);
            let data = place.add(size_of::<cmsghdr>());
            std::ptr::copy_nonoverlapping(wanted.data().as_ptr(), data, len - size_of::<cmsghdr>());
        }
        used += space.min(left);
    }
    // SAFETY: the program's `recvmsg` requires the message to be writable.
    unsafe { (*message).msg_controllen = used };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    // The kernel accepts no more.
    let count = count.min(libc::UIO_MAXIOV as c_uint);
    // SAFETY: the C program's array, valid as its call requires (manual page).
    let carries = |index| unsafe { carries_connection(&raw const (*messages.wrapping_add(index)).msg_hdr) };
    let is_one_by_one = matches!(entry::get(fd), Entry::Connection(_)) || (0..count as usize).any(carries);
    if !is_one_by_one {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        let sent = unsafe { real::sendmmsg(fd, messages, count, flags) };
        // SAFETY: the C program's array has `count` elements, and the kernel has filled the first `sent`.
        counted_send(entry::get(fd), unsafe { bytes_of(messages, sent) });
        return sent;
    }
    for index in 0..count {
        let message = messages.wrapping_add(index as usize);
        if !memory::is_writable(message) {
            return if index > 0 { index as c_int } else { fail(Errno::FAULT) };
        }
        // SAFETY: an element of the C program's array, which is writable, as was just checked.
        let message = unsafe { &mut *message };
        // SAFETY: a message of the C program's array, valid as its call requires (manual page).
        let sent = unsafe { sendmsg(fd, &raw const message.msg_hdr, flags) };
        if sent < 0 {
            return if index > 0 { index as c_int } else { -1 };
        }
        message.msg_len = sent as c_uint;
        // SAFETY: a message of the C program's array, valid as its call requires (manual page).
        let wanted = unsafe { spans_of(&raw const message.msg_hdr) }.map_or(0, total_bytes);
        if (sent as usize) < wanted {
            return index as c_int + 1;
        }
    }
    count as c_int
}

/// Returns the bytes of the first `count` messages together; 0 for a negative count, which is an error.
///
/// # Safety
/// `messages` has at least `count` elements.
unsafe fn bytes_of(messages: *const mmsghdr, count: c_int) -> isize {
    // SAFETY: the array has at least `count` elements, by the contract of this function.
    (0..count).map(|index| unsafe { (*messages.add(index as usize)).msg_len as isize }).sum()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // The kernel accepts no more.
    let count = count.min(libc::UIO_MAXIOV as c_uint);
    // SAFETY: the C program's array, valid as its call requires (manual page).
    let has_room = |index| unsafe { has_control(&raw const (*messages.wrapping_add(index)).msg_hdr) };
    // Only messages on AF_UNIX sockets carry descriptors.
    let is_one_by_one =
        matches!(entry::get(fd), Entry::Connection(_)) || (0..count as usize).any(has_room) && is_unix(fd);
    if !is_one_by_one {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        let received = unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
        // SAFETY: the C program's array has `count` elements, and the kernel has filled the first `received`.
        counted_receive(entry::get(fd), flags, unsafe { bytes_of(messages, received) });
        return received;
    }
    // SAFETY: null, or valid as the C program's call requires (manual page).
    let limit = match unsafe { timeout.as_ref() }.map(deadline_ns).transpose() {
        Ok(limit) => limit,
        Err(error) => return fail(error),
    };
    let mut flags = flags;
    for index in 0..count {
        let message = messages.wrapping_add(index as usize);
        if !memory::is_writable(message) {
            return if index > 0 { index as c_int } else { fail(Errno::FAULT) };
        }
        // SAFETY: an element of the C program's array, which is writable, as was just checked.
        let message = unsafe { &mut *message };
        // SAFETY: a message of the C program's array, valid as its call requires (manual page).
        let received = unsafe { recvmsg(fd, &raw mut message.msg_hdr, flags & !libc::MSG_WAITFORONE) };
        if received < 0 {
            return if index > 0 { index as c_int } else { -1 };
        }
        message.msg_len = received as c_uint;
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
        // As in the kernel, the time is only checked after each message, so that it does not end a wait.
        let left_ns = limit.map(|limit_ns| limit_ns.saturating_sub(now_ns()));
        if let Some(left_ns) = left_ns {
            // SAFETY: not null, so valid as the C program's call requires (manual page).
            unsafe {
                (*timeout).tv_sec = (left_ns / 1_000_000_000) as _;
                (*timeout).tv_nsec = (left_ns % 1_000_000_000) as _;
            }
        }
        if left_ns == Some(0) {
            return index as c_int + 1;
        }
    }
    count as c_int
}

fn is_unix(fd: c_int) -> bool {
    // SAFETY: the call only reads, and fails for a closed number.
    fd >= 0 && rustix::net::sockopt::socket_domain(unsafe { BorrowedFd::borrow_raw(fd) }) == Ok(AddressFamily::UNIX)
}

/// Returns the time at which `time` will have passed.
fn deadline_ns(time: &timespec) -> Result<u64, Errno> {
    match (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec)) {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => {
            Ok(now_ns().saturating_add(seconds.saturating_mul(1_000_000_000)).saturating_add(nanos))
        }
        _ => Err(Errno::INVAL),
    }
}

/// A zeroed buffer for control messages, with the alignment that they require. On the stack only if it is small.
struct Control {
    few: [u64; CONTROL_WORDS_FEW],
    many: Vec<u64>,
}

impl Control {
    /// Returns a buffer of at least `len_bytes`, at most [`CONTROL_BYTES`].
    fn new(len_bytes: usize) -> Self {
        let words = len_bytes.min(CONTROL_BYTES).div_ceil(size_of::<u64>());
        Self { few: [0; CONTROL_WORDS_FEW], many: if words > CONTROL_WORDS_FEW { vec![0; words] } else { Vec::new() } }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let words = if self.many.is_empty() { &mut self.few[..] } else { &mut self.many[..] };
        // SAFETY: any bytes are valid words and the other way round, and the slice covers exactly the words.
        unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
    }
}

/// Returns the descriptors of a control message, if it carries any.
unsafe fn rights_of<'a>(header: *const cmsghdr) -> Option<&'a [c_int]> {
    // SAFETY: `header` comes from `for_each_control`, which only yields headers inside the control buffer.
    let header_ref = unsafe { &*header };
    if header_ref.cmsg_level != libc::SOL_SOCKET || header_ref.cmsg_type != libc::SCM_RIGHTS {
        return None;
    }
    // SAFETY: the function only computes a size.
    let data_bytes = header_ref.cmsg_len.checked_sub(unsafe { libc::CMSG_LEN(0) } as usize)?;
    // SAFETY: the message was written by the kernel, or by the C program for the kernel: its data, of `data_bytes`, are
    // descriptors, and control messages are aligned for them.
    Some(unsafe {
        std::slice::from_raw_parts(libc::CMSG_DATA(header).cast::<c_int>(), data_bytes / size_of::<c_int>())
    })
}

/// Calls `visit` on every control message of `message`.
unsafe fn for_each_control(message: *const msghdr, mut visit: impl FnMut(*const cmsghdr)) {
    // SAFETY: the C program's message, valid as its call requires (manual page).
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            visit(header);
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Copies control messages into a buffer, replacing the descriptors in them.
struct Rewriter<'a> {
    control: &'a mut [u8],
    used: usize,
    fits: bool,
}

impl Rewriter<'_> {
    fn push(&mut self, level: c_int, kind: c_int, data: &[u8]) {
        // SAFETY: these functions only compute sizes.
        let (space, len) =
            unsafe { (libc::CMSG_SPACE(data.len() as c_uint) as usize, libc::CMSG_LEN(data.len() as c_uint) as usize) };
        if self.used + space > self.control.len() {
            self.fits = false;
            return;
        }
        let header = cmsghdr { cmsg_len: len as _, cmsg_level: level, cmsg_type: kind };
        let place = &mut self.control[self.used..self.used + space];
        place.fill(0);
        // SAFETY: `place` has room for a header, and `CMSG_SPACE` keeps the offsets in the aligned buffer aligned.
        unsafe { place.as_mut_ptr().cast::<cmsghdr>().write(header) };
        let data_at = len - data.len();
        place[data_at..data_at + data.len()].copy_from_slice(data);
        self.used += space;
    }

    unsafe fn rewrite(&mut self, header: *const cmsghdr, change: impl FnOnce(&[c_int]) -> Vec<c_int>) {
        // SAFETY: `header` comes from `for_each_control`, which only yields headers inside the control buffer.
        let (level, kind, len) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        // SAFETY: `header` is a header inside the control buffer, and its data lies inside it too.
        if let Some(rights) = unsafe { rights_of(header) } {
            let bytes: Vec<u8> = change(rights).iter().flat_map(|fd| fd.to_ne_bytes()).collect();
            if !bytes.is_empty() {
                self.push(level, kind, &bytes);
            }
            return;
        }
        // SAFETY: the data of the control message, whose length is in its header, are inside the control buffer.
        let data = unsafe {
            let data_bytes = len.saturating_sub(libc::CMSG_LEN(0) as usize);
            std::slice::from_raw_parts(libc::CMSG_DATA(header), data_bytes)
        };
        self.push(level, kind, data);
    }
}

/// Returns whether a message carries connections or listeners of the library, or sockets that may become some.
unsafe fn carries_connection(message: *const msghdr) -> bool {
    let mut carries = false;
    // SAFETY: the message and its control messages are readable, as is checked first.
    unsafe {
        if !has_control(message) {
            return false;
        }
        for_each_control(message, |header| {
            let rights = rights_of(header).unwrap_or_default();
            let is_ours =
                |right| matches!(entry::get(right), Entry::Connection(_) | Entry::Listener(_) | Entry::Stream(_));
            carries |= rights.iter().any(|&right| is_ours(right));
        });
    }
    carries
}

/// Sends a message whose descriptors may be connections; their memory is sent with them.
unsafe fn send_with_rights(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: the C program's message, valid as its call requires (manual page).
    unsafe {
        if !carries_connection(message) {
            return real::sendmsg(fd, message, flags);
        }
        let mut control = Control::new(CONTROL_BYTES);
        let mut rewriter = Rewriter { control: control.bytes(), used: 0, fits: true };
        let mut refusal = None;
        for_each_control(message, |header| {
            rewriter.rewrite(header, |rights| {
                lifecycle::send_rights(rights).unwrap_or_else(|errno| {
                    refusal = Some(errno);
                    Vec::new()
                })
            });
        });
        if let Some(errno) = refusal {
            return fail(errno);
        }
        let (used, fits) = (rewriter.used, rewriter.fits);
        // The kernel returns the same error for too many descriptors. A connection without its memory would be lost
        // unnoticed.
        if !fits {
            return fail(Errno::INVAL);
        }
        let mut copy = *message;
        copy.msg_control = control.bytes().as_mut_ptr().cast::<c_void>();
        copy.msg_controllen = used;
        real::sendmsg(fd, &raw const copy, flags)
    }
}

/// Receives a message whose descriptors may be connections; their memory is removed before the program sees the
/// message.
#[inline(never)] // Other messages need less of the stack.
unsafe fn receive_with_rights(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    // SAFETY: the C program's message, whose copy has a control buffer of this function.
    unsafe {
        // The size of the program's buffer, and twice as much for memory that accompanies connections.
        let control_bytes = ((*message).msg_controllen.saturating_mul(3).saturating_add(64)).min(CONTROL_BYTES);
        let mut control = Control::new(control_bytes);
        let mut copy = *message;
        copy.msg_control = control.bytes().as_mut_ptr().cast::<c_void>();
        copy.msg_controllen = control_bytes;
        let received = real::recvmsg(fd, &raw mut copy, flags);
        if received < 0 {
            return received;
        }
        let mut clean = Control::new(copy.msg_controllen);
        let mut rewriter = Rewriter { control: clean.bytes(), used: 0, fits: true };
        for_each_control(&raw const copy, |header| {
            rewriter.rewrite(header, |rights| lifecycle::receive_rights(fd, rights));
        });
        let used = rewriter.used;
        let room = (*message).msg_controllen;
        let (kept, is_cut) = copy_control(&clean.bytes()[..used], (*message).msg_control.cast::<u8>(), room);
        (*message).msg_controllen = kept;
        (*message).msg_namelen = copy.msg_namelen;
        (*message).msg_flags = copy.msg_flags | if is_cut { libc::MSG_CTRUNC } else { 0 };
        received
    }
}

/// Copies as many control messages as fit, and closes descriptors that do not. Returns the bytes used, and whether
/// anything was left out.
unsafe fn copy_control(clean: &[u8], destination: *mut u8, room: usize) -> (usize, bool) {
    let (mut kept, mut is_cut) = (0, false);
    // SAFETY: `view` describes the local buffer `clean`, and the program's control buffer has `room` bytes at
    // `destination`.
    unsafe {
        let mut view: msghdr = std::mem::zeroed();
        view.msg_control = clean.as_ptr().cast_mut().cast::<c_void>();
        view.msg_controllen = clean.len();
        for_each_control(&raw const view, |header| {
            let (len, data_bytes) = part_that_fits(header, room - kept);
            is_cut |= len < (*header).cmsg_len;
            if len > 0 {
                let place = destination.add(kept);
                std::ptr::copy_nonoverlapping(header.cast::<u8>(), place, len);
                place.cast::<cmsghdr>().write_unaligned(cmsghdr { cmsg_len: len, ..*header });
                kept = (kept + libc::CMSG_SPACE(data_bytes as c_uint) as usize).min(room);
            }
            for &fd in rights_of(header).unwrap_or_default().iter().skip(data_bytes / size_of::<c_int>()) {
                closing::close(fd);
            }
        });
    }
    (kept, is_cut)
}

/// Returns how many bytes of a control message fit in `room`, with its header and without it. Truncates as the kernel
/// does, descriptors only as a whole.
unsafe fn part_that_fits(header: *const cmsghdr, room: usize) -> (usize, usize) {
    // SAFETY: `header` comes from `for_each_control`, which only yields headers inside the control buffer.
    let (head_bytes, len, is_rights) =
        unsafe { (libc::CMSG_LEN(0) as usize, (*header).cmsg_len, rights_of(header).is_some()) };
    let Some(data_bytes) = len.min(room).checked_sub(head_bytes) else { return (0, 0) };
    match data_bytes / size_of::<c_int>() * size_of::<c_int>() {
        0 if is_rights => (0, 0),
        whole_bytes if is_rights => (head_bytes + whole_bytes, whole_bytes),
        _ => (head_bytes + data_bytes, data_bytes),
    }
}
