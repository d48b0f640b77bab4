//! libc's own functions, found behind this library by the dynamic linker.

use libc::{
    FILE, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pollfd, sigset_t, sockaddr, socklen_t, timespec,
    timeval,
};
use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

macro_rules! real {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        /// Calls libc's function of this name.
        #[inline]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            type Function = unsafe extern "C" fn($($type),*) -> $result;
            static ADDRESS: std::sync::atomic::AtomicPtr<std::ffi::c_void> =
                std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
            let mut address = ADDRESS.load(std::sync::atomic::Ordering::Relaxed);
            if address.is_null() {
                address = $crate::real::find(concat!(stringify!($name), "\0"));
                ADDRESS.store(address, std::sync::atomic::Ordering::Relaxed);
            }
            // SAFETY: the dynamic linker returned the function of this name, whose signature is that of its manual
            // page.
            let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Function>(address) };
            // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
            unsafe { function($($argument),*) }
        }
    )*};
}

#[cold]
pub(crate) fn find(name: &str) -> *mut c_void {
    // SAFETY: all callers pass a name that ends with a zero byte.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
    // libc does not have the function. A program that calls it could not have been linked against this libc.
    if address.is_null() { missing as *mut c_void } else { address }
}

extern "C" fn missing() -> isize {
    crate::errno::fail(rustix::io::Errno::NOSYS)
}

real! {
    __sysv_signal(signal: c_int, handler: usize) -> usize;
    accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    chroot(path: *const c_char) -> c_int;
    clone(run: extern "C" fn(*mut c_void) -> c_int, stack: *mut c_void, flags: c_int, argument: *mut c_void,
        parent_tid: *mut c_int, tls: *mut c_void, child_tid: *mut c_int) -> c_int;
    close(fd: c_int) -> c_int;
    connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(old: c_int, new: c_int) -> c_int;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(epfd: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_pwait(fd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    epoll_pwait2(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t)
        -> c_int;
    epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
    execve(path: *const c_char, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    execveat(dir: c_int, path: *const c_char, arguments: *const *mut c_char, environment: *const *mut c_char,
        flags: c_int) -> c_int;
    execvpe(name: *const c_char, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    fcntl(fd: c_int, command: c_int, argument: usize) -> c_int;
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    fexecve(fd: c_int, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    fileno(file: *mut FILE) -> c_int;
    fork() -> c_int;
    getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint) -> c_int;
    io_uring_queue_init_params(entries: c_uint, ring: *mut c_void, parameters: *mut c_void) -> c_int;
    ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int;
    pidfd_spawn(pidfd: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    pidfd_spawnp(pidfd: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    posix_spawn(pid: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, new: c_int) -> c_int;
    posix_spawnp(pid: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    preadv2(fd: c_int, spans: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t) -> c_int;
    pwritev2(fd: c_int, spans: *const iovec, count: c_int, position: off_t, flags: c_int) -> isize;
    quick_exit(status: c_int) -> ();
    read(fd: c_int, buffer: *mut c_void, len: usize) -> isize;
    readv(fd: c_int, spans: *const iovec, count: c_int) -> isize;
    recv(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> isize;
    recvfrom(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int, address: *mut sockaddr,
        address_len: *mut socklen_t) -> isize;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    send(fd: c_int, buffer: *const c_void, len: usize, flags: c_int) -> isize;
    sendfile(out: c_int, input: c_int, offset: *mut off_t, count: usize) -> isize;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize;
    sendto(fd: c_int, buffer: *const c_void, len: usize, flags: c_int, address: *const sockaddr,
        address_len: socklen_t) -> isize;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    signal(signal: c_int, handler: usize) -> usize;
    sockatmark(fd: c_int) -> c_int;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    splice(input: c_int, input_offset: *mut i64, output: c_int, output_offset: *mut i64, len: usize,
        flags: c_uint) -> isize;
    system(command: *const c_char) -> c_int;
    write(fd: c_int, buffer: *const c_void, len: usize) -> isize;
    writev(fd: c_int, spans: *const iovec, count: c_int) -> isize;
}

/// Calls libc's `_Fork`.
pub unsafe fn bare_fork() -> c_int {
    // SAFETY: the dynamic linker returned the function of this name, which takes no arguments and returns an integer.
    let function = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(find("_Fork\0")) };
    // SAFETY: the C program's call requires these pointers to be valid as its manual page says.
    unsafe { function() }
}

/// Returns the address of libc's `dlopen`, which must be jumped to, not called.
pub fn dlopen_address() -> *mut c_void {
    find("dlopen\0")
}

/// Returns the address of libc's `dlmopen`, which must be jumped to, not called.
pub fn dlmopen_address() -> *mut c_void {
    find("dlmopen\0")
}

/// Returns the address of libc's `vfork`, which must be jumped to, not called.
pub extern "C" fn vfork_address() -> *mut c_void {
    find("vfork\0")
}
