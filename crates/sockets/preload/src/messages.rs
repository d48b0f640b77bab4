//! `sendmsg`, `recvmsg`, `sendmmsg` and `recvmmsg`.
//!
//! A message with control data is the kernel's. Descriptors that it carries go back to TCP first, because their new
//! owner may not load this library.

use crate::bytes::{KERNEL_ONLY, Spans, receive_by_path, send_by_path, spans};
use crate::errno::fail;
use crate::real;
use libc::{cmsghdr, mmsghdr, msghdr, timespec};
use rustix::io::Errno;
use socket::process::memory;
use std::ffi::{c_int, c_uint};
use stream::lifecycle;
use stream::spans::total_bytes;
use stream::table::{self, Entry};

unsafe fn spans_of<'a>(message: *const msghdr) -> Spans<'a> {
    memory::check_readable(message)?;
    // SAFETY: the message is readable, as was just checked.
    unsafe { spans((*message).msg_iov, (*message).msg_iovlen, Errno::MSGSIZE) }
}

/// Returns whether a message has control data that can be read. What cannot be read is the kernel's to refuse.
unsafe fn has_control(message: *const msghdr) -> bool {
    // SAFETY: the message is readable, as is checked first.
    memory::is_readable(message)
        && unsafe {
            let (control, bytes) = ((*message).msg_control.cast::<u8>(), (*message).msg_controllen);
            bytes > 0 && memory::are_readable(control, bytes)
        }
}

/// Calls `visit` on each descriptor that a message carries.
///
/// # Safety
/// The message has control data that can be read.
unsafe fn for_each_right(message: *const msghdr, visit: impl Fn(c_int)) {
    // SAFETY: the control data are readable, by this function's contract, and the macros stay inside them.
    unsafe {
        let mut header: *const cmsghdr = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (*header).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let rights = libc::CMSG_DATA(header).cast::<c_int>();
                (0..bytes / size_of::<c_int>()).for_each(|index| visit(rights.add(index).read_unaligned()));
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        let has_control = has_control(message);
        if has_control && matches!(table::get(fd), Entry::None) {
            for_each_right(message, lifecycle::before_passing);
        }
        let spans = || if has_control { Err(KERNEL_ONLY) } else { spans_of(message) };
        send_by_path(fd, flags, spans, || real::sendmsg(fd, message, flags))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    let mut is_kernels = false;
    if matches!(table::get(fd), Entry::Connection(_)) && !memory::is_writable(message) {
        return fail(Errno::FAULT);
    }
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe {
        let received = receive_by_path(
            fd,
            flags,
            || spans_of(message),
            || {
                is_kernels = true;
                real::recvmsg(fd, message, flags)
            },
        );
        if received >= 0 && !is_kernels {
            (*message).msg_namelen = 0;
            (*message).msg_controllen = 0;
            (*message).msg_flags = 0;
        }
        received
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    // The kernel accepts no more.
    let count = count.min(libc::UIO_MAXIOV as c_uint);
    if matches!(table::get(fd), Entry::None) {
        for index in 0..count as usize {
            // SAFETY: the C program's array, valid as its call requires (manual page); each element is checked first.
            unsafe {
                let message = &raw const (*messages.wrapping_add(index)).msg_hdr;
                if has_control(message) {
                    for_each_right(message, lifecycle::before_passing);
                }
            }
        }
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if matches!(table::get(fd), Entry::None) {
        // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    // The kernel accepts no more.
    let count = count.min(libc::UIO_MAXIOV as c_uint);
    let deadline = match Deadline::of(timeout) {
        Ok(deadline) => deadline,
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
        if deadline.has_passed() {
            return index as c_int + 1;
        }
    }
    count as c_int
}

/// The time-out of a `recvmmsg`. As in the kernel, it is only checked after each message, and does not end a wait.
struct Deadline {
    timeout: *mut timespec,
    at_ns: u64,
}

impl Deadline {
    fn of(timeout: *mut timespec) -> Result<Self, Errno> {
        if timeout.is_null() {
            return Ok(Self { timeout, at_ns: u64::MAX });
        }
        if !memory::is_writable(timeout) {
            return Err(Errno::FAULT);
        }
        // SAFETY: the time is readable, as was just checked.
        let time = unsafe { *timeout };
        match (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec)) {
            (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => {
                let wait_ns = seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
                Ok(Self { timeout, at_ns: socket::process::clock::now_ns().saturating_add(wait_ns) })
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Stores the time left, as the system call does, and returns whether there is none.
    fn has_passed(&self) -> bool {
        if self.timeout.is_null() {
            return false;
        }
        let left_ns = self.at_ns.saturating_sub(socket::process::clock::now_ns());
        let left = timespec { tv_sec: (left_ns / 1_000_000_000) as _, tv_nsec: (left_ns % 1_000_000_000) as _ };
        // SAFETY: the time was writable when the call began, as its manual page requires.
        unsafe { self.timeout.write(left) };
        left_ns == 0
    }
}
