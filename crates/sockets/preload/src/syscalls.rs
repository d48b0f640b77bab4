//! System calls that programs make by number instead of libc's functions.

use crate::errno::{fail, keeping_errno};
use crate::{bytes, closing, descriptors, file_transfer, messages, processes, readiness, real, sockets};
use rustix::io::Errno;
use socket::process::memory;
use std::ffi::{c_int, c_long, c_uint, c_void};
use std::ptr::with_exposed_provenance_mut as pointer;
use stream::process;
use stream::table::{self, Entry};

/// Calls that newer architectures only have in other forms.
#[cfg(target_arch = "x86_64")]
mod older {
    use libc::c_long;

    pub const DUP2: c_long = libc::SYS_dup2;
    pub const EPOLL_WAIT: c_long = libc::SYS_epoll_wait;
    pub const FORK: c_long = libc::SYS_fork;
    pub const POLL: c_long = libc::SYS_poll;
    pub const SELECT: c_long = libc::SYS_select;
}

/// Numbers that no call has.
#[cfg(not(target_arch = "x86_64"))]
mod older {
    use libc::c_long;

    pub const DUP2: c_long = c_long::MIN;
    pub const EPOLL_WAIT: c_long = c_long::MIN + 1;
    pub const FORK: c_long = c_long::MIN + 2;
    pub const POLL: c_long = c_long::MIN + 3;
    pub const SELECT: c_long = c_long::MIN + 4;
}

/// Size of the kernel's signal mask in bytes.
const KERNEL_MASK_BYTES: usize = 8;

/// libc's `syscall`, which is variadic: all its arguments are where this definition finds them, in registers or on the
/// stack.
///
/// Calls about descriptors of the library are handled like libc's functions; libuv closes in this way. An io_uring
/// would bypass the library and is therefore refused, so that programs use epoll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
) -> c_long {
    if number == libc::SYS_io_uring_setup && !socket::process::settings::settings().off {
        return fail(Errno::NOSYS);
    }
    if number == libc::SYS_exit_group || number == libc::SYS_exit && stream::sharing::is_only_thread() {
        process::before_exit();
    }
    let arguments = [first, second, third, fourth, fifth, sixth];
    if may_concern_library(number, &arguments) {
        // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
        if let Some(result) = unsafe { call_by_name(number, arguments) } {
            return result;
        }
    }
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    let in_kernel = || unsafe { socket::process::system::call_kernel(number, arguments) as c_long };
    let puts_under_filter = match number {
        libc::SYS_prctl => socket::process::sandbox::is_filter_by_prctl(first as c_int),
        libc::SYS_seccomp => socket::process::sandbox::is_filter_by_seccomp(first),
        _ => false,
    };
    if puts_under_filter {
        keeping_errno(process::confine);
        return in_kernel();
    }
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    match unsafe { child_of(number, arguments) } {
        None => in_kernel(),
        Some(Child::WithCopy) => processes::fork_with_handlers(in_kernel),
        Some(Child::InMemory) => {
            keeping_errno(process::before_vfork);
            in_kernel()
        }
    }
}

/// A child process of a call.
enum Child {
    /// It has a copy of this process's memory, as after `fork`.
    WithCopy,
    /// It runs in this process's memory, as after `vfork`.
    InMemory,
}

/// Returns what kind of child process a call creates, if any.
unsafe fn child_of(number: c_long, [first, second, ..]: [usize; 6]) -> Option<Child> {
    let by_flags = |flags: u64| match () {
        () if flags & (libc::CLONE_VM | libc::CLONE_FILES) as u64 == libc::CLONE_FILES as u64 => {
            keeping_errno(process::before_sharing_descriptors);
            Some(Child::WithCopy)
        }
        () if flags & libc::CLONE_VM as u64 == 0 => Some(Child::WithCopy),
        () if flags & libc::CLONE_THREAD as u64 == 0 => Some(Child::InMemory),
        () => None,
    };
    match number {
        older::FORK => Some(Child::WithCopy),
        libc::SYS_clone => by_flags(first as u64),
        libc::SYS_clone3 => {
            let flags = std::ptr::with_exposed_provenance::<u64>(first);
            if second < size_of::<u64>() || !memory::is_readable(flags) {
                return None;
            }
            // SAFETY: the C program's arguments, readable as was just checked: the flags come first.
            by_flags(unsafe { flags.read_unaligned() })
        }
        _ => None,
    }
}

/// Returns whether a call may concern a descriptor of the library. Allocates nothing, because allocators make system
/// calls when they cannot be called themselves.
fn may_concern_library(number: c_long, arguments: &[usize; 6]) -> bool {
    let is_ours = |argument: usize| {
        let fd = argument as c_int;
        !matches!(table::get(fd), Entry::None) || socket::descriptor::hidden::is_hidden(fd)
    };
    let [first, second, third, ..] = *arguments;
    match number {
        libc::SYS_socket | libc::SYS_connect | libc::SYS_accept | libc::SYS_accept4 | libc::SYS_sendto => true,
        libc::SYS_close | libc::SYS_close_range | libc::SYS_pidfd_getfd => true,
        libc::SYS_execve | libc::SYS_execveat | libc::SYS_epoll_ctl => true,
        older::POLL | libc::SYS_ppoll | older::SELECT | libc::SYS_pselect6 => true,
        libc::SYS_sendmsg | libc::SYS_sendmmsg => true,
        older::DUP2 | libc::SYS_dup3 | libc::SYS_sendfile => is_ours(first) || is_ours(second),
        libc::SYS_splice => is_ours(first) || is_ours(third),
        _ => is_ours(first),
    }
}

/// Handles a call like libc's function. Returns `None` for a call that the library does not interpose.
unsafe fn call_by_name(number: c_long, arguments: [usize; 6]) -> Option<c_long> {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    let fd = first as c_int;
    let (int2, int3, int4) = (second as c_int, third as c_int, fourth as c_int);
    // SAFETY: the C program's arguments of the call of this number.
    Some(unsafe {
        match number {
            libc::SYS_read => bytes::read(fd, pointer(second), third) as c_long,
            libc::SYS_write => bytes::write(fd, pointer(second), third) as c_long,
            libc::SYS_readv => bytes::readv(fd, pointer(second), int3) as c_long,
            libc::SYS_writev => bytes::writev(fd, pointer(second), int3) as c_long,
            // The kernel takes a position as two words, of which the second is unused here.
            libc::SYS_preadv2 => bytes::preadv2(fd, pointer(second), int3, fourth as i64, sixth as c_int) as c_long,
            libc::SYS_pwritev2 => bytes::pwritev2(fd, pointer(second), int3, fourth as i64, sixth as c_int) as c_long,
            libc::SYS_recvfrom => {
                bytes::recvfrom(fd, pointer(second), third, int4, pointer(fifth), pointer(sixth)) as c_long
            }
            libc::SYS_sendto => bytes::sendto(fd, pointer(second), third, int4, pointer(fifth), sixth as u32) as c_long,
            libc::SYS_recvmsg => messages::recvmsg(fd, pointer(second), int3) as c_long,
            libc::SYS_sendmsg => messages::sendmsg(fd, pointer(second), int3) as c_long,
            libc::SYS_recvmmsg => messages::recvmmsg(fd, pointer(second), third as u32, int4, pointer(fifth)).into(),
            libc::SYS_sendmmsg => messages::sendmmsg(fd, pointer(second), third as u32, int4).into(),
            libc::SYS_sendfile => file_transfer::sendfile(fd, int2, pointer(third), fourth) as c_long,
            libc::SYS_splice => {
                file_transfer::splice(fd, pointer(second), int3, pointer(fourth), fifth, sixth as c_uint) as c_long
            }
            libc::SYS_close => closing::close(fd).into(),
            libc::SYS_close_range => closing::close_range(first as u32, second as u32, int3).into(),
            libc::SYS_dup => descriptors::dup(fd).into(),
            older::DUP2 => descriptors::dup2(fd, int2).into(),
            libc::SYS_dup3 => descriptors::dup3(fd, int2, int3).into(),
            libc::SYS_fcntl => descriptors::fcntl(fd, int2, third).into(),
            libc::SYS_ioctl => descriptors::ioctl(fd, second as _, third).into(),
            libc::SYS_socket => sockets::socket(fd, int2, int3).into(),
            libc::SYS_connect => sockets::connect(fd, pointer(second), third as u32).into(),
            libc::SYS_accept => sockets::accept(fd, pointer(second), pointer(third)).into(),
            libc::SYS_accept4 => sockets::accept4(fd, pointer(second), pointer(third), int4).into(),
            libc::SYS_shutdown => sockets::shutdown(fd, int2).into(),
            libc::SYS_getsockname => sockets::getsockname(fd, pointer(second), pointer(third)).into(),
            libc::SYS_getpeername => sockets::getpeername(fd, pointer(second), pointer(third)).into(),
            libc::SYS_getsockopt => sockets::getsockopt(fd, int2, int3, pointer(fourth), pointer(fifth)).into(),
            libc::SYS_setsockopt => sockets::setsockopt(fd, int2, int3, pointer(fourth), fifth as u32).into(),
            libc::SYS_execve => processes::execve(pointer(first), pointer(second), pointer(third)).into(),
            libc::SYS_execveat => {
                processes::execveat(fd, pointer(second), pointer(third), pointer(fourth), fifth as c_int).into()
            }
            libc::SYS_pidfd_getfd => descriptors::pidfd_getfd(fd, int2, third as c_uint).into(),
            _ => return wait_by_name(number, arguments),
        }
    })
}

/// As [`call_by_name`], for the calls that wait for readiness.
unsafe fn wait_by_name(number: c_long, [first, second, third, fourth, fifth, sixth]: [usize; 6]) -> Option<c_long> {
    let fd = first as c_int;
    let (int3, int4) = (third as c_int, fourth as c_int);
    let (mask, mask_bytes): (*const libc::sigset_t, usize) = match number {
        libc::SYS_ppoll => (pointer(fourth), fifth),
        libc::SYS_pselect6 => mask_behind(sixth),
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => (pointer(fifth), sixth),
        _ => (std::ptr::null(), 0),
    };
    if !mask.is_null() && mask_bytes != KERNEL_MASK_BYTES {
        return Some(fail(Errno::INVAL));
    }
    let in_kernel = |first| {
        let arguments = [first, second, third, fourth, fifth, sixth];
        // SAFETY: the C program's arguments of the call of this number.
        unsafe { socket::process::system::call_kernel(number, arguments) as c_int }
    };
    // SAFETY: the C program's arguments of the call of this number.
    let ready = unsafe {
        match number {
            older::POLL => readiness::poll(pointer(first), second as _, int3),
            libc::SYS_ppoll => {
                readiness::ppoll_by_number(pointer(first), second as _, pointer(third), mask, || in_kernel(first))
            }
            older::SELECT => readiness::select(fd, pointer(second), pointer(third), pointer(fourth), pointer(fifth)),
            libc::SYS_pselect6 => {
                let sets = [second, third, fourth].map(pointer);
                readiness::pselect_by_number(fd, sets, pointer(fifth), mask, |count| in_kernel(count as usize))
            }
            libc::SYS_epoll_ctl => readiness::epoll_ctl(fd, second as c_int, int3, pointer(fourth)),
            older::EPOLL_WAIT => readiness::epoll_wait(fd, pointer(second), int3, int4),
            libc::SYS_epoll_pwait => readiness::epoll_pwait(fd, pointer(second), int3, int4, mask),
            libc::SYS_epoll_pwait2 => readiness::epoll_pwait2(fd, pointer(second), int3, pointer(fourth), mask),
            _ => return None,
        }
    };
    Some(ready.into())
}

/// The struct that the sixth argument of a `pselect6` points to.
#[repr(C)]
struct MaskArgument {
    mask: *const libc::sigset_t,
    mask_bytes: usize,
}

/// Returns the mask of a `pselect6` and its size, to which the sixth argument points unless it is null.
fn mask_behind(argument: usize) -> (*const libc::sigset_t, usize) {
    let argument = std::ptr::with_exposed_provenance::<MaskArgument>(argument);
    if !memory::is_readable(argument) {
        return (std::ptr::null(), 0);
    }
    // SAFETY: readable, as was just checked.
    let MaskArgument { mask, mask_bytes } = unsafe { argument.read() };
    (mask, mask_bytes)
}

/// liburing's function, which makes its own system calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint) -> c_int {
    if !socket::process::settings::settings().off {
        return -libc::ENOSYS;
    }
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { real::io_uring_queue_init(entries, ring, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init_params(
    entries: c_uint,
    ring: *mut c_void,
    parameters: *mut c_void,
) -> c_int {
    if !socket::process::settings::settings().off {
        return -libc::ENOSYS;
    }
    // SAFETY: the C program's arguments, passed on to libc unchanged; its call requires them to be valid.
    unsafe { real::io_uring_queue_init_params(entries, ring, parameters) }
}
