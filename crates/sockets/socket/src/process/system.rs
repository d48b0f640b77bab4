//! System calls without libc, and the state that the kernel keeps for this process.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;

/// Size of the kernel's signal set, which is smaller than libc's.
pub(crate) const KERNEL_SIGSET_BYTES: usize = 8;
/// Runs `work` with all signals blocked, so that no handler interrupts it.
pub fn without_signals<R>(work: impl FnOnce() -> R) -> R {
    let before = set_signal_mask(u64::MAX);
    let result = work();
    set_signal_mask(before);
    result
}

/// Sends a signal to this thread with the `siginfo_t` of the kernel, or without it if it is unknown or no more can be
/// queued.
///
/// # Safety
/// `info` is null or points to the `siginfo_t` that the kernel has passed to a handler.
pub unsafe fn send_to_this_thread(signal: i32, info: *const libc::siginfo_t) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    // SAFETY: the kernel only reads `info`, which by this function's contract is a whole `siginfo_t` or null, of which
    // it reports an error.
    if unsafe { call!(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) } < 0 {
        // SAFETY: the call takes numbers only.
        unsafe { call!(libc::SYS_tgkill, process, thread, signal) };
    }
}

/// Blocks exactly the signals in `mask`. Returns those that were blocked before.
pub fn set_signal_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: both pointers are to local sets of the kernel's size, which is passed along.
    unsafe { call!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut before, size_of::<u64>()) };
    before
}
/// Restores a signal mask when it is dropped.
pub struct SignalMaskGuard(u64);

impl SignalMaskGuard {
    /// Sets the signal mask that a call was given, if any. `between` runs while all signals are blocked.
    ///
    /// # Safety
    /// `mask` is null or points to a signal set.
    pub unsafe fn replace(mask: *const libc::sigset_t, between: impl FnOnce()) -> Option<Self> {
        // SAFETY: the caller guarantees that `mask` is null or points to libc's set, whose first eight bytes are the
        // kernel's.
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
    /// Converts the argument to the contents of a register.
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

/// Performs a system call of the library without libc, whose `syscall` may be the library's own. Returns the kernel's
/// result, an error as a negative number ([`error_of`]), and does not touch `errno`: that belongs to the program, and a
/// successful call of the program must leave it as it was.
macro_rules! call {
    ($number:expr $(, $argument:expr)* $(,)?) => {
        $crate::process::system::raw_syscall(
            $number,
            [$($crate::process::system::SyscallArgument::register($argument)),*],
        )
    };
}
pub(crate) use call;

/// Performs a system call; the macro `call` converts the arguments.
///
/// # Safety
/// The arguments fulfil the requirements of this system call.
pub unsafe fn raw_syscall<const N: usize>(number: libc::c_long, arguments: [usize; N]) -> isize {
    let mut six = [0; 6];
    six[..N].copy_from_slice(&arguments);
    // SAFETY: the caller guarantees that these are valid arguments of this system call.
    unsafe { enter_kernel(number, six) }
}

/// Returns the error in the return value of a raw system call.
pub(crate) fn error_of(result: isize) -> Errno {
    Errno::from_raw_os_error(-result as i32)
}

/// Performs a system call on behalf of the program: sets `errno` and returns -1 on failure, as libc's `syscall` does.
///
/// # Safety
/// As the system call.
pub unsafe fn call_kernel<const N: usize>(number: libc::c_long, arguments: [usize; N]) -> isize {
    // SAFETY: the caller guarantees that these are valid arguments of this system call.
    let result = unsafe { raw_syscall(number, arguments) };
    if (-4095..0).contains(&result) {
        // SAFETY: `__errno_location` returns the address of this thread's `errno`, which is writable.
        unsafe { *libc::__errno_location() = -result as i32 };
        return -1;
    }
    result
}

/// Converts the return value of a raw system call to a count or an error.
pub fn count_or_error(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| error_of(result))
}

#[inline]
unsafe fn enter_kernel(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the registers are those of the kernel's calling convention on x86-64, `rcx` and `r11` are declared as
    // clobbered, and the caller guarantees that the arguments are valid.
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
    // SAFETY: the registers are those of the kernel's calling convention on AArch64, and the caller guarantees that the
    // arguments are valid.
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

/// Returns the error of this thread's last libc call.
pub fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Reads the beginning of a file of the kernel as text, as much as fits into `bytes`.
pub fn read_text(path: impl rustix::path::Arg, bytes: &mut [u8]) -> Option<&str> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let length = rustix::io::read(&file, &mut *bytes);
    crate::descriptor::hidden::close(file);
    std::str::from_utf8(&bytes[..length.ok()?]).ok()
}

/// Longest line that [`for_each_line`] passes on.
const LINE_BYTES_MAX: usize = 512;

/// Runs `take` on each line of a file of the kernel, and allocates nothing. Lines that are longer than
/// [`LINE_BYTES_MAX`] or no text are left out. Returns whether the file could be read.
#[inline(never)] // The buffer is on the stack of this function alone.
pub fn for_each_line(path: &CStr, take: &mut dyn FnMut(&str)) -> bool {
    let Ok(file) = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else { return false };
    let mut bytes = [0; LINE_BYTES_MAX];
    let mut filled = 0;
    let result = loop {
        match rustix::io::read(&file, &mut bytes[filled..]) {
            Ok(0) => break true,
            Ok(count) => filled += count,
            Err(Errno::INTR) => continue,
            Err(_) => break false,
        }
        let mut begin = 0;
        while let Some(length) = bytes[begin..filled].iter().position(|byte| *byte == b'\n') {
            if let Ok(line) = std::str::from_utf8(&bytes[begin..begin + length]) {
                take(line);
            }
            begin += length + 1;
        }
        // A line that fills the buffer is dropped, and its rest is taken for a line that no caller knows.
        let kept = if begin == 0 && filled == bytes.len() { filled..filled } else { begin..filled };
        filled = kept.len();
        bytes.copy_within(kept, 0);
    };
    crate::descriptor::hidden::close(file);
    result
}

/// Checks whether the process may write files of `len_bytes`: beyond its limit the kernel sends SIGXFSZ, which ends it.
///
/// # Errors
/// `FBIG` if it may not.
pub(crate) fn check_file_bytes(len_bytes: usize) -> Result<(), Errno> {
    let limit_bytes = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit_bytes.is_some_and(|limit_bytes| limit_bytes < len_bytes as u64) { Err(Errno::FBIG) } else { Ok(()) }
}

/// Returns whether every signal handler of the process has `SA_RESTART`. The kernel interrupts a wait by `poll` in any
/// case; this decides whether the call that the wait stands for would have been interrupted, where it is not recorded
/// which handler ran.
pub fn all_handlers_restart() -> bool {
    const SIGNALS: i32 = 64;
    (1..=SIGNALS).all(|signal| action_of(signal).is_none_or(|action| action.handler <= 1 || action.restarts()))
}

/// Returns whether the handler of a signal has `SA_RESTART`.
pub fn handler_restarts(signal: i32) -> bool {
    action_of(signal).is_some_and(|action| action.restarts())
}

fn action_of(signal: i32) -> Option<KernelAction> {
    let mut action = KernelAction::default();
    // SAFETY: the structure is a local of the kernel's layout, and the size of its mask is passed along.
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
