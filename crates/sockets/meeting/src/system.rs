//! Descriptors and the system calls that rustix lacks, without libc symbols.
//!
//! The library runs inside of programs as the definition of `close`, `getsockopt` and others, so a call of libc's would
//! reach the library itself. rustix performs system calls by itself (its backend `linux_raw`); the standard library's
//! [`OwnedFd`] closes by libc, so [`Descriptor`] takes its place.

#![allow(unsafe_code)] // Raw system calls, and the ownership of descriptors.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode};

/// Where a process keeps descriptors that its program must not see. A program is given the lowest free numbers, relies
/// on that, and closes or replaces numbers that it believes to be free.
#[derive(Debug)]
pub struct HiddenNumbers {
    /// Moves a descriptor to a number that the program does not use; returns a slot for it.
    pub hide: fn(OwnedFd) -> Result<u16, Errno>,
    /// Returns the number of a slot, which may change; -1 if there is none.
    pub number: fn(u16) -> RawFd,
    /// Gives up a slot and returns its descriptor.
    pub release: fn(u16) -> Option<OwnedFd>,
}

static HIDDEN_NUMBERS: OnceLock<HiddenNumbers> = OnceLock::new();

/// Sets where descriptors that a meeting keeps for longer than one call are hidden from now on.
pub fn hide_descriptors(numbers: HiddenNumbers) {
    let _ = HIDDEN_NUMBERS.set(numbers);
}

/// An open descriptor, which is closed by a raw system call when it is dropped.
#[derive(Debug)]
pub struct Descriptor(ManuallyDrop<Place>);

#[derive(Debug)]
enum Place {
    Number(OwnedFd),
    Hidden(u16, &'static HiddenNumbers),
}

impl Descriptor {
    /// Hides a descriptor that is kept for longer than one call, if the process hides such.
    ///
    /// # Errors
    /// Those of [`HiddenNumbers::hide`].
    pub(crate) fn kept(fd: OwnedFd) -> Result<Self, Errno> {
        let Some(numbers) = HIDDEN_NUMBERS.get() else { return Ok(Self::from(fd)) };
        Ok(Self(ManuallyDrop::new(Place::Hidden((numbers.hide)(fd)?, numbers))))
    }

    /// Returns the slot of a descriptor that is hidden, for an owner that closes it otherwise.
    ///
    /// # Errors
    /// The descriptor, if it is not hidden.
    pub fn into_hidden_slot(self) -> Result<u16, OwnedFd> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, and its place is not used again.
        match unsafe { ManuallyDrop::take(&mut this.0) } {
            Place::Number(fd) => Err(fd),
            Place::Hidden(slot, _) => Ok(slot),
        }
    }

    /// Returns the descriptor for an owner that closes it otherwise.
    ///
    /// # Panics
    /// If a slot has no descriptor.
    pub fn into_fd(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, and its place is not used again.
        match unsafe { ManuallyDrop::take(&mut this.0) } {
            Place::Number(fd) => fd,
            Place::Hidden(slot, numbers) => (numbers.release)(slot).expect("a slot in use has a descriptor"),
        }
    }
}

/// A descriptor that is kept between uses, of which there is one at a time.
#[derive(Debug)]
pub(crate) struct Kept {
    /// The slot of a hidden descriptor plus one, or 0.
    slot: AtomicU32,
}

impl Kept {
    pub(crate) const fn new() -> Self {
        Self { slot: AtomicU32::new(0) }
    }

    /// Takes the descriptor, if there is one and no other thread uses it.
    pub(crate) fn take(&self) -> Option<Descriptor> {
        let slot = self.slot.swap(0, Ordering::AcqRel).checked_sub(1)?;
        HIDDEN_NUMBERS.get().map(|numbers| Descriptor(ManuallyDrop::new(Place::Hidden(slot as u16, numbers))))
    }

    /// Keeps a descriptor if the process hides such and keeps none. Otherwise it is closed.
    pub(crate) fn keep(&self, descriptor: Descriptor) {
        if let Place::Hidden(slot, _) = &*descriptor.0
            && self.slot.compare_exchange(0, u32::from(*slot) + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            std::mem::forget(descriptor);
        }
    }
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(Place::Number(fd)))
    }
}

impl IntoRawFd for Descriptor {
    fn into_raw_fd(self) -> RawFd {
        self.into_fd().into_raw_fd()
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &*self.0 {
            Place::Number(fd) => fd.as_fd(),
            Place::Hidden(slot, numbers) => {
                let number = (numbers.number)(*slot);
                // SAFETY: the number is not -1. It is open while `self` owns the slot, unless a `dup2` of the
                // program moves it now; a system call on it then fails, without touching memory.
                unsafe { BorrowedFd::borrow_raw(if number < 0 { RawFd::MAX } else { number }) }
            }
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the place is not used again.
        let fd = match unsafe { ManuallyDrop::take(&mut self.0) } {
            Place::Number(fd) => Some(fd),
            Place::Hidden(slot, numbers) => (numbers.release)(slot),
        };
        if let Some(fd) = fd {
            // SAFETY: the number was owned by `self`, and is not used after this.
            unsafe { rustix::io::close(fd.into_raw_fd()) };
        }
    }
}

/// Performs `getsockopt(2)`. Returns the number of bytes that the kernel has written.
pub(crate) fn option_bytes(socket: BorrowedFd<'_>, level: i32, name: i32, value: &mut [u8]) -> Result<usize, Errno> {
    let mut length = value.len() as libc::socklen_t;
    let arguments = [
        socket.as_raw_fd() as usize,
        level as usize,
        name as usize,
        address_mut(value),
        (&raw mut length).expose_provenance(),
    ];
    // SAFETY: `value` is writable for `length` bytes, and `length` is a local.
    let result = unsafe { enter_kernel(libc::SYS_getsockopt, arguments) };
    if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok((length as usize).min(value.len())) }
}

/// Performs `getsockopt(2)` for a value of `N` bytes; `None` if the kernel has another size or does not know the
/// option.
pub(crate) fn option<const N: usize>(socket: BorrowedFd<'_>, level: i32, name: i32) -> Option<[u8; N]> {
    let mut value = [0; N];
    option_bytes(socket, level, name, &mut value).is_ok_and(|length| length == N).then_some(value)
}

/// Performs `setsockopt(2)` for a number.
pub(crate) fn set_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> Result<(), Errno> {
    let value = value.to_ne_bytes();
    let arguments = [socket.as_raw_fd() as usize, level as usize, name as usize, address(&value), value.len()];
    // SAFETY: `value` is readable for its length.
    let result = unsafe { enter_kernel(libc::SYS_setsockopt, arguments) };
    if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok(()) }
}

/// Performs an `ioctl(2)` whose result is one number.
///
/// `REQUEST` must be `FIONREAD`, `SIOCOUTQ` or `SIOCATMARK`.
pub(crate) fn number<const REQUEST: Opcode>(socket: BorrowedFd<'_>) -> Result<i32, Errno> {
    const { assert!(REQUEST == FIONREAD || REQUEST == SIOCOUTQ || REQUEST == SIOCATMARK) };
    // SAFETY: each of these requests stores one `int` and has no other effect (`tcp(7)`, `unix(7)`).
    unsafe { rustix::ioctl::ioctl(socket, Getter::<REQUEST, i32>::new()) }
}

/// A call in a directory, as the thread that makes it reads and writes it.
#[repr(C)]
struct CallInDirectory {
    directory: usize,
    number: usize,
    socket: usize,
    address: usize,
    address_bytes: usize,
    result: isize,
}

/// Performs `bind(2)` or `connect(2)` with an AF_UNIX path relative to a directory, which these calls cannot name.
///
/// # Errors
/// Those of the call, of `fchdir(2)` and of `clone(2)`.
pub(crate) fn bind_in(directory: BorrowedFd<'_>, socket: BorrowedFd<'_>, path: &[u8]) -> Result<(), Errno> {
    call_in(directory, libc::SYS_bind, socket, path)
}

/// As [`bind_in`], for `connect(2)`.
pub(crate) fn connect_in(directory: BorrowedFd<'_>, socket: BorrowedFd<'_>, path: &[u8]) -> Result<(), Errno> {
    call_in(directory, libc::SYS_connect, socket, path)
}

fn call_in(directory: BorrowedFd<'_>, number: libc::c_long, socket: BorrowedFd<'_>, path: &[u8]) -> Result<(), Errno> {
    let mut address = [0_u8; size_of::<libc::sockaddr_un>()];
    address[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    let room = address.get_mut(2..2 + path.len()).ok_or(Errno::NAMETOOLONG)?;
    room.copy_from_slice(path);
    let mut call = CallInDirectory {
        directory: directory.as_raw_fd() as usize,
        number: number as usize,
        socket: socket.as_raw_fd() as usize,
        address: address_mut(&mut address),
        address_bytes: (2 + path.len() + 1).min(address.len()),
        result: 0,
    };
    // All of them: no handler may run in the other directory. `KILL` and `STOP` have none.
    let (all, mut before) = (u64::MAX.to_ne_bytes(), [0_u8; 8]);
    let mask = |set: usize, old: usize| [libc::SIG_SETMASK as usize, set, old, all.len(), 0];
    // SAFETY: both sets are locals of the size that the kernel has for one.
    unsafe { enter_kernel(libc::SYS_rt_sigprocmask, mask(self::address(&all), address_mut(&mut before))) };
    // SAFETY: the call and its address live until the thread has ended, which this thread waits for.
    let started = unsafe { run_in_directory(&raw mut call) };
    let result = if started == -(libc::EAGAIN as isize) {
        call_in_by_this_thread(&call)
    } else {
        // SAFETY: a volatile read of a local, which another thread has written.
        let result = unsafe { (&raw const call.result).read_volatile() };
        as_result(started.min(result))
    };
    // SAFETY: the set is a local of the kernel's size, which the first call has filled; without a second one, the
    // kernel stores nothing.
    unsafe { enter_kernel(libc::SYS_rt_sigprocmask, mask(self::address(&before), 0)) };
    result
}

/// Performs the call in this thread, for a process that may not start another one (`RLIMIT_NPROC`). The thread gets a
/// working directory of its own (`unshare(2)`), and does not follow later changes of the others': a process that has
/// changed its root directory and given up threads has no reason to make any.
#[cold]
fn call_in_by_this_thread(call: &CallInDirectory) -> Result<(), Errno> {
    let before = rustix::fs::open(".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let before = Descriptor::from(before);
    // SAFETY: the call takes a number. Memory and descriptors stay shared.
    as_result(unsafe { enter_kernel(libc::SYS_unshare, [libc::CLONE_FS as usize, 0, 0, 0, 0]) })?;
    // SAFETY: the call takes the number of a descriptor.
    as_result(unsafe { enter_kernel(libc::SYS_fchdir, [call.directory, 0, 0, 0, 0]) })?;
    let arguments = [call.socket, call.address, call.address_bytes, 0, 0];
    // SAFETY: the address is a buffer of the caller's, readable for its length.
    let result = unsafe { enter_kernel(call.number as libc::c_long, arguments) };
    rustix::process::fchdir(&before)?;
    as_result(result)
}

fn as_result(result: isize) -> Result<(), Errno> {
    if result < 0 { Err(Errno::from_raw_os_error(-result as i32)) } else { Ok(()) }
}

/// The parent sleeps until the thread has ended, so that both may have one stack, which the thread does not use.
const IN_DIRECTORY: i32 =
    libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_VFORK;

/// Runs a call in a thread with a working directory of its own (`clone(2)` without `CLONE_FS`), and waits for it: all
/// threads of the program share theirs. Returns 0, or an error of `clone` as a negative number.
///
/// # Safety
/// `call` is valid for reads and writes, and so is what it points to. All signals are blocked.
#[cfg(target_arch = "x86_64")]
unsafe fn run_in_directory(call: *mut CallInDirectory) -> isize {
    let started: isize;
    // SAFETY: the thread executes the instructions between the two labels and ends. It has the registers of its parent,
    // makes system calls with arguments that the caller guarantees, and writes only the call's result.
    unsafe {
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 3f",
            "mov rdi, [r12]",
            "mov eax, {fchdir}",
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov rax, [r12 + 8]",
            "mov rdi, [r12 + 16]",
            "mov rsi, [r12 + 24]",
            "mov rdx, [r12 + 32]",
            "syscall",
            "2:",
            "mov [r12 + 40], rax",
            "xor edi, edi",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "3:",
            fchdir = const libc::SYS_fchdir,
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone as isize => started,
            in("rdi") IN_DIRECTORY as usize,
            in("rsi") 0,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            in("r12") call,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    started.min(0)
}

/// Runs a call as on x86-64.
///
/// # Safety
/// `call` is valid for reads and writes, and so is what it points to. All signals are blocked.
#[cfg(target_arch = "aarch64")]
unsafe fn run_in_directory(call: *mut CallInDirectory) -> isize {
    let started: isize;
    // SAFETY: the thread executes the instructions between the two labels and ends. It has the registers of its parent,
    // makes system calls with arguments that the caller guarantees, and writes only the call's result.
    unsafe {
        core::arch::asm!(
            "svc 0",
            "cbnz x0, 3f",
            "ldr x0, [x20]",
            "mov x8, {fchdir}",
            "svc 0",
            "cbnz x0, 2f",
            "ldr x8, [x20, 8]",
            "ldr x0, [x20, 16]",
            "ldr x1, [x20, 24]",
            "ldr x2, [x20, 32]",
            "svc 0",
            "2:",
            "str x0, [x20, 40]",
            "mov x0, 0",
            "mov x8, {exit}",
            "svc 0",
            "brk 0",
            "3:",
            fchdir = const libc::SYS_fchdir,
            exit = const libc::SYS_exit,
            in("x8") libc::SYS_clone,
            inlateout("x0") IN_DIRECTORY as isize => started,
            in("x1") 0,
            in("x2") 0,
            in("x3") 0,
            in("x4") 0,
            in("x20") call,
        );
    }
    started.min(0)
}

/// Unread bytes of a socket (`tcp(7)`: `SIOCINQ`).
pub(crate) const FIONREAD: Opcode = libc::FIONREAD as Opcode;
/// Bytes of a TCP socket that its peer has not acknowledged (`tcp(7)`).
pub(crate) const SIOCOUTQ: Opcode = libc::TIOCOUTQ as Opcode;
/// Whether the next byte of a TCP socket is behind the urgent mark (`tcp(7)`).
pub(crate) const SIOCATMARK: Opcode = 0x8905;

fn address(bytes: &[u8]) -> usize {
    bytes.as_ptr().expose_provenance()
}

fn address_mut(bytes: &mut [u8]) -> usize {
    bytes.as_mut_ptr().expose_provenance()
}

/// Performs a system call. Returns the kernel's result, an error as a negative number.
///
/// # Safety
/// The arguments fulfil the requirements of this system call.
#[inline]
unsafe fn enter_kernel(number: libc::c_long, arguments: [usize; 5]) -> isize {
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
            options(nostack)
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn socket() -> OwnedFd {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        rustix::net::socket_with(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, flags, None)
            .unwrap()
    }

    #[test]
    fn sockets_are_bound_and_reached_in_a_directory_without_a_change_of_this_process() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::create_dir(scratch.path().join("users")).unwrap();
        let directory = std::fs::File::open(scratch.path()).unwrap();
        let before = std::env::current_dir().unwrap();
        let (listener, client) = (socket(), socket());
        assert_eq!(connect_in(directory.as_fd(), client.as_fd(), b"users/here"), Err(Errno::NOENT));
        assert_eq!(bind_in(directory.as_fd(), listener.as_fd(), b"users/here"), Ok(()));
        assert!(scratch.path().join("users/here").exists());
        rustix::net::listen(&listener, 1).unwrap();
        assert_eq!(connect_in(directory.as_fd(), client.as_fd(), b"users/here"), Ok(()));
        drop(UnixListener::from(listener).accept().unwrap());
        assert_eq!(UnixStream::from(client).read(&mut [0]).unwrap(), 0);
        assert_eq!(std::env::current_dir().unwrap(), before);
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert_eq!(bind_in(file.as_fd(), socket().as_fd(), b"x"), Err(Errno::NOTDIR));
        assert_eq!(bind_in(directory.as_fd(), socket().as_fd(), &[b'x'; 200]), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn a_process_without_the_right_to_start_threads_reaches_them_too() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(scratch.path()).unwrap();
        let before = std::env::current_dir().unwrap();
        let address = b"\x01\x00here\0";
        let listener = socket();
        let call = CallInDirectory {
            directory: directory.as_raw_fd() as usize,
            number: libc::SYS_bind as usize,
            socket: listener.as_raw_fd() as usize,
            address: super::address(address),
            address_bytes: address.len(),
            result: 0,
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(call_in_by_this_thread(&call), Ok(()));
                assert_eq!(std::env::current_dir().unwrap(), before);
            });
        });
        assert!(scratch.path().join("here").exists());
    }

    #[test]
    fn threads_share_their_directory_meanwhile() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(scratch.path()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let directory = &directory;
                scope.spawn(move || {
                    for round in 0..200 {
                        let path = format!("{thread}-{round}");
                        assert_eq!(bind_in(directory.as_fd(), socket().as_fd(), path.as_bytes()), Ok(()));
                        assert!(!std::path::Path::new(&path).exists(), "it is not in this process's directory");
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 800);
    }
}
