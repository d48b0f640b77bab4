//! `sendmsg`, `recvmsg` and their kin: several buffers, and descriptors that travel between processes.

use crate::bytes::{counted_receive, counted_send, receive_spans, send_spans};
use crate::real;
use libc::{cmsghdr, iovec, mmsghdr, msghdr, timespec};
use socket::lifecycle;
use socket::table::{self, Entry};
use std::ffi::{c_int, c_uint, c_void};

/// Descriptors in one message, and as many for the memory of connections among them.
const RIGHTS_MAX: usize = 253;
const CONTROL_BYTES: usize = 8192;

unsafe fn spans_of<'a>(message: *const msghdr) -> &'a [iovec] {
    // SAFETY: the C caller's message.
    unsafe {
        let message = &*message;
        if message.msg_iovlen == 0 { &[] } else { std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: the C caller's.
    unsafe {
        match table::get(fd) {
            Entry::Connection(connection) => send_spans(connection, spans_of(message), flags),
            Entry::Stream(stream) => counted_send(stream, real::sendmsg(fd, message, flags)),
            _ if (*message).msg_controllen > 0 => send_with_rights(fd, message, flags),
            _ => real::sendmsg(fd, message, flags),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    // SAFETY: the C caller's.
    unsafe {
        match table::get(fd) {
            Entry::Connection(connection) => {
                let result = receive_spans(connection, spans_of(message), flags);
                if result >= 0 {
                    (*message).msg_namelen = 0;
                    (*message).msg_controllen = 0;
                    (*message).msg_flags = 0;
                }
                result
            }
            Entry::Stream(stream) => counted_receive(stream, real::recvmsg(fd, message, flags)),
            _ if (*message).msg_controllen > 0 && !(*message).msg_control.is_null() => {
                receive_with_rights(fd, message, flags)
            }
            _ => real::recvmsg(fd, message, flags),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if !matches!(table::get(fd), Entry::Connection(_)) {
        // SAFETY: the C caller's.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    for index in 0..count.min(libc::UIO_MAXIOV as c_uint) {
        // SAFETY: the C caller's array.
        let message = unsafe { &mut *messages.add(index as usize) };
        // SAFETY: as above.
        let sent = unsafe { sendmsg(fd, &raw const message.msg_hdr, flags) };
        if sent < 0 {
            return if index > 0 { index as c_int } else { -1 };
        }
        message.msg_len = sent as c_uint;
        // SAFETY: as above.
        if (sent as usize) < socket::connection::total_bytes(unsafe { spans_of(&raw const message.msg_hdr) }) {
            return index as c_int + 1;
        }
    }
    count.min(libc::UIO_MAXIOV as c_uint) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if !matches!(table::get(fd), Entry::Connection(_)) {
        // SAFETY: the C caller's.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    let mut flags = flags;
    for index in 0..count {
        // SAFETY: the C caller's array.
        let message = unsafe { &mut *messages.add(index as usize) };
        // SAFETY: as above.
        let received = unsafe { recvmsg(fd, &raw mut message.msg_hdr, flags & !libc::MSG_WAITFORONE) };
        if received < 0 {
            return if index > 0 { index as c_int } else { -1 };
        }
        message.msg_len = received as c_uint;
        if received == 0 {
            return index as c_int + 1;
        }
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
    }
    count as c_int
}

/// Room for control messages, aligned as they must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// The descriptors of a control message, if it carries any.
unsafe fn rights_of<'a>(header: *const cmsghdr) -> Option<&'a [c_int]> {
    // SAFETY: a header inside the control buffer.
    let header_ref = unsafe { &*header };
    if header_ref.cmsg_level != libc::SOL_SOCKET || header_ref.cmsg_type != libc::SCM_RIGHTS {
        return None;
    }
    // SAFETY: only computes.
    let data_bytes = header_ref.cmsg_len.checked_sub(unsafe { libc::CMSG_LEN(0) } as usize)?;
    // SAFETY: the kernel, or the caller for the kernel, put whole descriptors there; the buffer is aligned for them.
    Some(unsafe {
        std::slice::from_raw_parts(libc::CMSG_DATA(header).cast::<c_int>(), data_bytes / size_of::<c_int>())
    })
}

/// Calls `visit` on every control message of `message`.
unsafe fn for_each_control(message: *const msghdr, mut visit: impl FnMut(*const cmsghdr)) {
    // SAFETY: the C caller's message.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            visit(header);
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Copies control messages into a buffer of ours, with other descriptors where they carry any.
struct Rewriter<'a> {
    control: &'a mut Control,
    used: usize,
    fits: bool,
}

impl Rewriter<'_> {
    fn push(&mut self, level: c_int, kind: c_int, data: &[u8]) {
        // SAFETY: only computes.
        let (space, len) =
            unsafe { (libc::CMSG_SPACE(data.len() as c_uint) as usize, libc::CMSG_LEN(data.len() as c_uint) as usize) };
        if self.used + space > CONTROL_BYTES {
            self.fits = false;
            return;
        }
        let header = cmsghdr { cmsg_len: len as _, cmsg_level: level, cmsg_type: kind };
        let place = &mut self.control.0[self.used..self.used + space];
        place.fill(0);
        // SAFETY: the place has room for a header and is aligned by construction of `CMSG_SPACE`.
        unsafe { place.as_mut_ptr().cast::<cmsghdr>().write(header) };
        let data_at = len - data.len();
        place[data_at..data_at + data.len()].copy_from_slice(data);
        self.used += space;
    }

    unsafe fn rewrite(&mut self, header: *const cmsghdr, change: impl FnOnce(&[c_int]) -> Vec<c_int>) {
        // SAFETY: a header inside the control buffer.
        let (level, kind, len) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        // SAFETY: as above.
        if let Some(rights) = unsafe { rights_of(header) } {
            let bytes: Vec<u8> = change(rights).iter().flat_map(|fd| fd.to_ne_bytes()).collect();
            if !bytes.is_empty() {
                self.push(level, kind, &bytes);
            }
            return;
        }
        // SAFETY: the data of the message, inside the control buffer.
        let data = unsafe {
            let data_bytes = len.saturating_sub(libc::CMSG_LEN(0) as usize);
            std::slice::from_raw_parts(libc::CMSG_DATA(header), data_bytes)
        };
        self.push(level, kind, data);
    }
}

/// Sends a message whose descriptors may be connections: their memory goes with them.
unsafe fn send_with_rights(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    let mut carries_connection = false;
    // SAFETY: the C caller's message.
    unsafe {
        for_each_control(message, |header| {
            let rights = rights_of(header).unwrap_or_default();
            let is_ours = |right| matches!(table::get(right), Entry::Connection(_) | Entry::Listener(_));
            carries_connection |= rights.iter().any(|&right| is_ours(right));
        });
        if !carries_connection {
            return real::sendmsg(fd, message, flags);
        }
        let mut control = Control([0; CONTROL_BYTES]);
        let mut rewriter = Rewriter { control: &mut control, used: 0, fits: true };
        for_each_control(message, |header| {
            rewriter.rewrite(header, |rights| {
                let all = lifecycle::send_rights(rights);
                if all.len() <= RIGHTS_MAX { all } else { rights.to_vec() }
            });
        });
        let (used, fits) = (rewriter.used, rewriter.fits);
        let mut copy = *message;
        if fits {
            copy.msg_control = control.0.as_mut_ptr().cast::<c_void>();
            copy.msg_controllen = used;
        }
        real::sendmsg(fd, &raw const copy, flags)
    }
}

/// Receives a message whose descriptors may be connections: their memory is taken out before the program sees it.
unsafe fn receive_with_rights(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: the C caller's message; the copy's control buffer is ours.
    unsafe {
        let mut copy = *message;
        copy.msg_control = control.0.as_mut_ptr().cast::<c_void>();
        // The program's own room, and as much again for memory that travels with connections.
        copy.msg_controllen = ((*message).msg_controllen.saturating_mul(2) + 64).min(CONTROL_BYTES);
        let received = real::recvmsg(fd, &raw mut copy, flags);
        if received < 0 {
            return received;
        }
        let mut clean = Control([0; CONTROL_BYTES]);
        let mut rewriter = Rewriter { control: &mut clean, used: 0, fits: true };
        for_each_control(&raw const copy, |header| rewriter.rewrite(header, lifecycle::receive_rights));
        let used = rewriter.used;
        let room = (*message).msg_controllen;
        let kept = copy_control(&clean.0[..used], (*message).msg_control.cast::<u8>(), room);
        (*message).msg_controllen = kept;
        (*message).msg_namelen = copy.msg_namelen;
        (*message).msg_flags =
            copy.msg_flags | if kept < used_without_padding(&clean.0[..used]) { libc::MSG_CTRUNC } else { 0 };
        received
    }
}

/// Copies as many whole control messages as there is room for; descriptors of those left out are closed. Returns the
/// bytes used.
unsafe fn copy_control(clean: &[u8], destination: *mut u8, room: usize) -> usize {
    let mut kept = 0;
    // SAFETY: a message header over our own buffer.
    unsafe {
        let mut view: msghdr = std::mem::zeroed();
        view.msg_control = clean.as_ptr().cast_mut().cast::<c_void>();
        view.msg_controllen = clean.len();
        for_each_control(&raw const view, |header| {
            let at = header.addr() - clean.as_ptr().addr();
            let len = (*header).cmsg_len;
            let space = libc::CMSG_SPACE((len - libc::CMSG_LEN(0) as usize) as c_uint) as usize;
            if kept + len <= room {
                std::ptr::copy_nonoverlapping(clean.as_ptr().add(at), destination.add(kept), len);
                kept = (kept + space).min(room);
            } else {
                for &fd in rights_of(header).unwrap_or_default() {
                    let _ = real::close(fd);
                }
            }
        });
    }
    kept
}

fn used_without_padding(clean: &[u8]) -> usize {
    // The last message's padding may not fit where the message does.
    clean.len().saturating_sub(7)
}
