//! System calls without libc, and state that the kernel keeps for this process.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of the kernel's signal set, which is shorter than libc's.
pub(crate) const KERNEL_SIGSET_BYTES: usize = 8;

/// Grows with every `fork`, `vfork` and `posix_spawn` of this process: what was opened before one may be held by a
/// child.
static SPAWNS: AtomicU32 = AtomicU32::new(0);

/// Notes that a child is about to be made.
pub fn note_spawn() {
    SPAWNS.fetch_add(1, Ordering::Relaxed);
    // A child that borrows our memory must find the marker made: it cannot make one that its parent would know.
    crate::descriptor::hidden::prepare_inheritance();
}

/// How often this process has made children.
pub fn spawns() -> u32 {
    SPAWNS.load(Ordering::Relaxed)
}

/// Runs `work` with all signals blocked: no handler finds it half done.
pub fn without_signals<R>(work: impl FnOnce() -> R) -> R {
    let before = set_signal_mask(u64::MAX);
    let result = work();
    set_signal_mask(before);
    result
}

/// Sends a signal to this thread, with what the kernel has said of it; without that where no more can be queued.
///
/// # Safety
/// `info` is what the kernel has called a handler with.
pub unsafe fn send_to_this_thread(signal: i32, info: *const libc::siginfo_t) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    // SAFETY: our caller says that `info` is a whole structure of the kernel's, which only reads it.
    if unsafe { call!(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) } < 0 {
        // SAFETY: no pointers.
        unsafe { call!(libc::SYS_tgkill, process, thread, signal) };
    }
}

/// Blocks exactly the signals in `mask`; returns those that were blocked before.
pub fn set_signal_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: both sets have the kernel's size.
    unsafe { call!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut before, size_of::<u64>()) };
    before
}

/// `sendfile(2)`.
pub(crate) fn send_file(
    to: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    offset: Option<&mut i64>,
    len_bytes: usize,
) -> Result<usize, Errno> {
    let offset = offset.map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: the offset is null or writable.
    count_or_error(unsafe { call!(libc::SYS_sendfile, to.as_raw_fd(), file.as_raw_fd(), offset, len_bytes) })
}

/// A signal mask in force for as long as this lives.
pub struct SignalMaskGuard(u64);

impl SignalMaskGuard {
    /// The mask that a call was given, if any; `between` runs where no signal can come.
    ///
    /// # Safety
    /// `mask` is null or a signal set.
    pub unsafe fn replace(mask: *const libc::sigset_t, between: impl FnOnce()) -> Option<Self> {
        // SAFETY: the kernel's set is the beginning of libc's.
        let mask = unsafe { mask.cast::<u64>().as_ref() }?;
        let before = set_signal_mask(u64::MAX);
        between();
        set_signal_mask(*mask);
        Some(Self(before))
    }
}

impl Drop for SignalMaskGuard {
    fn drop(&mut self) {
        set_signal_mask(self.0);
    }
}

/// An argument of a system call.
pub trait SyscallArgument {
    /// As a register holds it.
    fn register(self) -> usize;
}

macro_rules! words {
    ($($number:ty)*) => {$(
        impl SyscallArgument for $number {
            fn register(self) -> usize {
                self as usize
            }
        }
    )*};
}

words! { i32 u32 u64 usize }

impl<T> SyscallArgument for *const T {
    fn register(self) -> usize {
        self.expose_provenance()
    }
}

impl<T> SyscallArgument for *mut T {
    fn register(self) -> usize {
        self.expose_provenance()
    }
}

/// A system call of our own, around libc, whose `syscall` may be ours. Answers what the kernel does, an error as a
/// negative number ([`error_of`]), and leaves `errno` alone: that is the program's, and a call of the program's that
/// succeeds keeps what it holds.
macro_rules! call {
    ($number:expr $(, $argument:expr)* $(,)?) => {
        $crate::process::system::raw_syscall(
            $number,
            [$($crate::process::system::SyscallArgument::register($argument)),*],
        )
    };
}
pub(crate) use call;

/// As the macro of the same name.
///
/// # Safety
/// As the system call.
pub(crate) unsafe fn raw_syscall<const N: usize>(number: libc::c_long, arguments: [usize; N]) -> isize {
    let mut six = [0; 6];
    six[..N].copy_from_slice(&arguments);
    // SAFETY: the caller's.
    unsafe { enter_kernel(number, six) }
}

/// The error that a call without `errno` has answered.
pub(crate) fn error_of(answer: isize) -> Errno {
    Errno::from_raw_os_error(-answer as i32)
}

/// A system call of the program's: as libc's `syscall`, sets `errno` and answers -1.
///
/// # Safety
/// As the system call.
pub unsafe fn call_kernel<const N: usize>(number: libc::c_long, arguments: [usize; N]) -> isize {
    // SAFETY: our caller says that these are arguments of that system call.
    let result = unsafe { raw_syscall(number, arguments) };
    if (-4095..0).contains(&result) {
        // SAFETY: libc's own variable of this thread.
        unsafe { *libc::__errno_location() = -result as i32 };
        return -1;
    }
    result
}

/// A count, or the error that a call without `errno` has answered.
pub(crate) fn count_or_error(answer: isize) -> Result<usize, Errno> {
    usize::try_from(answer).map_err(|_| error_of(answer))
}

#[inline]
unsafe fn enter_kernel(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's calling convention; what the call does is the caller's affair.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") arguments[0] as isize => result,
            in("x1") arguments[1],
            in("x2") arguments[2],
            in("x3") arguments[3],
            in("x4") arguments[4],
            in("x5") arguments[5],
            options(nostack)
        );
    }
    result
}

/// What the last system call of this thread failed with.
pub fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// What fits of a file in which the kernel says something.
pub fn read_text(path: impl rustix::path::Arg, bytes: &mut [u8]) -> Option<&str> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let length = rustix::io::read(&file, &mut *bytes);
    crate::descriptor::hidden::close(file);
    std::str::from_utf8(&bytes[..length.ok()?]).ok()
}

/// Returns the inode of a socket, which identifies it. `None` where `fd` is not a socket.
pub(crate) fn inode_of(fd: std::os::fd::RawFd) -> Option<u64> {
    // SAFETY: only asks; a closed number is answered with an error.
    let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()?;
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// Returns whether a descriptor stays open through `exec`.
pub(crate) fn is_inheritable(fd: std::os::fd::RawFd) -> bool {
    // SAFETY: the program's descriptor, in a call about it.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    flags.is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC))
}

/// Whether the process may write files of `len_bytes`: the kernel ends one by SIGXFSZ that goes beyond its limit.
///
/// # Errors
/// `FBIG`: it may not.
pub(crate) fn check_file_bytes(len_bytes: usize) -> Result<(), Errno> {
    let limit_bytes = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit_bytes.is_some_and(|limit_bytes| limit_bytes < len_bytes as u64) { Err(Errno::FBIG) } else { Ok(()) }
}

/// What wakes a sleeper; no other byte is ever sent on a lifeline whose handshake has come.
pub(crate) const RING: u8 = 1;

/// Sends one byte to wake the other end of a lifeline. A full queue is as good as a byte in it.
pub fn ring(fd: i32) -> Result<(), Errno> {
    ring_with(fd, 0)
}

/// As [`ring`], with a byte for which the kernel sends `SIGURG` to whom the other end has named.
///
/// # Errors
/// As `sendto`; `OPNOTSUPP` of a kernel before Linux 5.15.
pub fn ring_urgently(fd: i32) -> Result<(), Errno> {
    ring_with(fd, libc::MSG_OOB)
}

fn ring_with(fd: i32, flags: i32) -> Result<(), Errno> {
    let byte = [RING];
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: one byte is readable.
    let sent = unsafe { call!(libc::SYS_sendto, fd, byte.as_ptr(), 1, flags, 0, 0) };
    match if sent < 0 { error_of(sent) } else { return Ok(()) } {
        Errno::AGAIN => Ok(()),
        error => Err(error),
    }
}

/// How often 64 bytes are taken out of a lifeline at once: a peer that goes on ringing is not waited for.
const DRAINS_MAX: usize = 64;

/// So many wake-up bytes may stay in a lifeline that several processes listen to: far fewer than its buffer holds. So
/// many processes may thin it out at the same time, too.
const RINGS_LEFT_MAX: i32 = 32;

/// Takes wake-up bytes out of a lifeline that others listen to, by edges: they find it readable still, as they must
/// when they come to look, and it never fills.
pub fn drain_surplus_rings(fd: i32) {
    for _ in 0..DRAINS_MAX {
        if !has_surplus_rings(fd) || !take_surplus_ring(fd) {
            return;
        }
    }
}

fn has_surplus_rings(fd: i32) -> bool {
    let mut unread_bytes = 0_i32;
    // SAFETY: the number is writable.
    let result = unsafe { call!(libc::SYS_ioctl, fd, libc::FIONREAD, &raw mut unread_bytes) };
    result >= 0 && unread_bytes > RINGS_LEFT_MAX
}

/// One at a time: others may have seen the same surplus, and each of them takes one as well.
fn take_surplus_ring(fd: i32) -> bool {
    let mut byte = [0_u8];
    // SAFETY: the array is writable.
    let received = unsafe { call!(libc::SYS_recvfrom, fd, byte.as_mut_ptr(), byte.len(), libc::MSG_DONTWAIT, 0, 0) };
    received > 0
}

/// Takes the wake-up bytes out of a lifeline; `Ok(false)`, and `CONNRESET` once, at the end of the stream. `PROTO`:
/// there were others among them.
pub fn drain(fd: i32) -> Result<bool, Errno> {
    let mut bytes = [0_u8; 64];
    for _ in 0..DRAINS_MAX {
        // SAFETY: the array is writable.
        let received =
            unsafe { call!(libc::SYS_recvfrom, fd, bytes.as_mut_ptr(), bytes.len(), libc::MSG_DONTWAIT, 0, 0) };
        match received {
            0 => return Ok(false),
            1.. if bytes[..received as usize].iter().any(|byte| *byte != RING) => return Err(Errno::PROTO),
            64 => {}
            1.. => return Ok(true),
            _ if matches!(error_of(received), Errno::AGAIN | Errno::INTR) => return Ok(true),
            _ => return Err(error_of(received)),
        }
    }
    Ok(true)
}

/// Whether every signal handler of the process asks for interrupted calls to be restarted. A call that waits by `poll`
/// is always interrupted; this decides whether the call it stands for would have been, where nobody has noted which
/// handler ran.
pub fn all_handlers_restart() -> bool {
    const SIGNALS: i32 = 64;
    (1..=SIGNALS).all(|signal| action_of(signal).is_none_or(|action| action.handler <= 1 || action.restarts()))
}

/// Whether the handler of a signal asks for interrupted calls to be restarted.
pub fn handler_restarts(signal: i32) -> bool {
    action_of(signal).is_some_and(|action| action.restarts())
}

fn action_of(signal: i32) -> Option<KernelAction> {
    let mut action = KernelAction::default();
    // SAFETY: the structure is writable and as large as the kernel's; the mask is eight bytes.
    let result = unsafe { call!(libc::SYS_rt_sigaction, signal, 0, &raw mut action, KERNEL_SIGSET_BYTES) };
    (result == 0).then_some(action)
}

impl KernelAction {
    fn restarts(&self) -> bool {
        self.flags & libc::SA_RESTART as u64 != 0
    }
}

/// The kernel's `struct sigaction`, which is not libc's.
#[repr(C)]
#[derive(Default)]
struct KernelAction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::blocking::poll_now;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn processes_that_thin_out_the_same_rings_at_the_same_time_leave_one() {
        let (bell, mut lifeline) = UnixStream::pair().unwrap();
        let fd = lifeline.as_raw_fd();
        for _ in 0..=RINGS_LEFT_MAX {
            ring(bell.as_raw_fd()).unwrap();
        }
        // All have looked before the first takes anything.
        assert!((0..RINGS_LEFT_MAX).all(|_| has_surplus_rings(fd)));
        assert!((0..RINGS_LEFT_MAX).all(|_| take_surplus_ring(fd)));
        assert_eq!(poll_now(fd, libc::POLLIN), libc::POLLIN);
        drain_surplus_rings(fd);
        lifeline.set_nonblocking(true).unwrap();
        assert_eq!(lifeline.read(&mut [0; 100]).unwrap(), 1);
    }

    #[test]
    fn a_lifeline_that_is_thinned_out_keeps_rings_and_never_fills() {
        let (bell, lifeline) = UnixStream::pair().unwrap();
        for _ in 0..100_000 {
            let mut byte = [RING];
            // SAFETY: one byte is readable.
            let sent =
                unsafe { call!(libc::SYS_sendto, bell.as_raw_fd(), byte.as_mut_ptr(), 1, libc::MSG_DONTWAIT, 0, 0) };
            assert_eq!(sent, 1, "full");
            drain_surplus_rings(lifeline.as_raw_fd());
            assert_eq!(poll_now(lifeline.as_raw_fd(), libc::POLLIN), libc::POLLIN);
        }
    }
}
