//! Descriptors and the system calls that rustix lacks, without libc symbols.
//!
//! The library runs inside of programs as the definition of `close`, `getsockopt` and others, so a call of libc's would
//! reach the library itself. rustix performs system calls by itself (its backend `linux_raw`); the standard library's
//! [`OwnedFd`] closes by libc, so [`Descriptor`] takes its place.

#![allow(unsafe_code)] // Raw system calls, and the ownership of descriptors.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode};

/// An open descriptor, which is closed by a raw system call when it is dropped.
#[derive(Debug)]
pub struct Descriptor(ManuallyDrop<OwnedFd>);

impl Descriptor {
    /// Returns the descriptor for an owner that closes it otherwise.
    pub fn into_fd(self) -> OwnedFd {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the number has no other owner from now on.
        unsafe { OwnedFd::from_raw_fd(this.0.as_raw_fd()) }
    }
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(fd))
    }
}

impl IntoRawFd for Descriptor {
    fn into_raw_fd(self) -> RawFd {
        self.into_fd().into_raw_fd()
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the number is owned by `self`, which is not used after this.
        unsafe { rustix::io::close(self.0.as_raw_fd()) };
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
