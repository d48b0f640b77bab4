//! Whether memory that a program names in a call exists: an address that does not is the call's error, and must not be
//! a crash in this library, which reads arguments before the kernel does.
//!
//! Only the kernel knows. It is asked once for each page, and its answer is remembered while it is yes, so that calls
//! with the same arguments take a comparison. A page that is unmapped later still counts as accessible.

#![allow(unsafe_code)] // System calls on addresses of the program.

use super::sandbox;
use crate::process::system::call;
use rustix::io::Errno;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The smallest page, in which access rights are uniform.
const PAGE_BYTES: usize = 4096;
/// Number of pages that are remembered; each has one place. Stacks of threads, which are 8 MiB and a page apart, have
/// different ones.
const PAGES_REMEMBERED: usize = 1024;

// `linux/futex.h`.
const FUTEX_WAIT_PRIVATE: i32 = 128;
const FUTEX_WAKE_OP_PRIVATE: i32 = 5 | 128;
/// A value that no program is likely to have, with which the wait ends at once.
const UNLIKELY: u32 = 0x5a17_c0de;
/// `FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0x7ff)`: adds nothing.
const ADD_NOTHING: u32 = 1 << 28 | 0x7ff;

/// Numbers of pages that can be accessed, each at its number modulo [`PAGES_REMEMBERED`].
struct Pages([AtomicUsize; PAGES_REMEMBERED]);

static READABLE: Pages = Pages::new();
static WRITABLE: Pages = Pages::new();

impl Pages {
    const fn new() -> Self {
        Self([const { AtomicUsize::new(0) }; PAGES_REMEMBERED])
    }

    /// Returns whether all pages of a range can be accessed, as `find_out` says of a page.
    #[inline]
    fn covers(&self, address: usize, bytes: usize, find_out: fn(usize) -> bool) -> bool {
        let Some(last) = bytes.checked_sub(1) else { return true };
        let Some(end) = address.checked_add(last) else { return false };
        (address / PAGE_BYTES..=end / PAGE_BYTES).all(|page| {
            let place = &self.0[page % PAGES_REMEMBERED];
            (place.load(Ordering::Relaxed) == page && page != 0) || Self::ask(place, page, find_out)
        })
    }

    #[cold]
    fn ask(place: &AtomicUsize, page: usize, find_out: fn(usize) -> bool) -> bool {
        // The program's filter may end a process that makes another call than the program's, and valgrind reports calls
        // with memory that has no value yet.
        if sandbox::is_confined() || is_on_valgrind() {
            return true;
        }
        let is_accessible = page != 0 && find_out(page * PAGE_BYTES);
        if is_accessible {
            place.store(page, Ordering::Relaxed);
        }
        is_accessible
    }
}

/// Returns whether valgrind executes the program: its `RUNNING_ON_VALGRIND` request (`valgrind.h`), instructions that
/// change nothing elsewhere.
#[cfg(target_arch = "x86_64")]
fn is_on_valgrind() -> bool {
    let request = [0x1001_u64, 0, 0, 0, 0, 0];
    let result: u64;
    // SAFETY: a register is rotated by 128 bits in all and another one exchanged with itself; valgrind reads the
    // request.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            inout("rdi") 0_u64 => _,
            in("rax") request.as_ptr(),
            inout("rdx") 0_u64 => result,
            options(nostack),
        );
    }
    result != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn is_on_valgrind() -> bool {
    false
}

/// Returns whether the kernel can read the word at an address.
fn is_word_readable(address: usize) -> bool {
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel only reads the word, if it can; the time-out is a local variable.
    let result = unsafe { call!(libc::SYS_futex, address, FUTEX_WAIT_PRIVATE, UNLIKELY, &raw const no_time) };
    result != -(libc::EFAULT as isize)
}

/// Returns whether the kernel can write the word at an address.
fn is_word_writable(address: usize) -> bool {
    let unused = 0_u32;
    // SAFETY: the kernel atomically adds 0 to the word, if it can write it, which changes nothing, and wakes no thread
    // but those that wait for this local variable, on which none does.
    let result = unsafe {
        call!(libc::SYS_futex, &raw const unused, FUTEX_WAKE_OP_PRIVATE, 1_i32, 1_usize, address, ADD_NOTHING)
    };
    result != -(libc::EFAULT as isize)
}

/// Returns whether a value of the program can be read.
#[inline]
pub fn is_readable<T>(pointer: *const T) -> bool {
    are_readable(pointer, 1)
}

/// Returns whether an array of the program can be read.
#[inline]
pub fn are_readable<T>(pointer: *const T, count: usize) -> bool {
    count.checked_mul(size_of::<T>()).is_some_and(|bytes| READABLE.covers(pointer.addr(), bytes, is_word_readable))
}

/// Returns whether a value of the program can be written.
#[inline]
pub fn is_writable<T>(pointer: *const T) -> bool {
    are_writable(pointer, 1)
}

/// Returns whether an array of the program can be written.
#[inline]
pub fn are_writable<T>(pointer: *const T, count: usize) -> bool {
    count.checked_mul(size_of::<T>()).is_some_and(|bytes| WRITABLE.covers(pointer.addr(), bytes, is_word_writable))
}

/// Returns the error of a call with an argument that cannot be read.
///
/// # Errors
/// `FAULT`.
#[inline]
pub fn check_readable<T>(pointer: *const T) -> Result<(), Errno> {
    if is_readable(pointer) { Ok(()) } else { Err(Errno::FAULT) }
}

/// Returns the error of a call with an argument that cannot be written.
///
/// # Errors
/// `FAULT`.
#[inline]
pub fn check_writable<T>(pointer: *const T) -> Result<(), Errno> {
    if is_writable(pointer) { Ok(()) } else { Err(Errno::FAULT) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    #[test]
    fn memory_is_told_apart_by_its_rights() {
        let bytes = 3 * PAGE_BYTES;
        let all = ProtFlags::READ | ProtFlags::WRITE;
        // All at once: a page that is mapped where another one was counts as that one.
        // SAFETY: new mappings, which nothing else uses.
        let bases = [(); 3].map(|()| unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, all, MapFlags::PRIVATE) });
        for (base, (rights, expected)) in bases.into_iter().zip([
            (MprotectFlags::READ | MprotectFlags::WRITE, (true, true)),
            (MprotectFlags::READ, (true, false)),
            (MprotectFlags::empty(), (false, false)),
        ]) {
            let base = base.unwrap().cast::<u8>();
            // SAFETY: the second and third page of the mapping, which nothing refers to.
            unsafe { mprotect(base.wrapping_add(PAGE_BYTES).cast(), 2 * PAGE_BYTES, rights) }.unwrap();
            let rights_at = |at: usize, count| {
                let pointer = base.wrapping_add(at);
                (are_readable(pointer, count), are_writable(pointer, count))
            };
            assert_eq!(rights_at(0, PAGE_BYTES), (true, true));
            assert_eq!(rights_at(PAGE_BYTES, 1), expected);
            assert_eq!(rights_at(PAGE_BYTES - 1, 2), expected, "the range ends there");
            assert_eq!(rights_at(0, bytes), expected);
            assert_eq!(rights_at(PAGE_BYTES - 1, 0), (true, true));
            // SAFETY: the first page is readable.
            assert_eq!(unsafe { base.read() }, 0, "nothing was changed");
        }
        // SAFETY: the mappings above, which nothing refers to any more.
        bases.into_iter().for_each(|base| unsafe { munmap(base.unwrap(), bytes) }.unwrap());
    }

    #[test]
    fn null_and_addresses_beyond_user_space_are_not_accessible() {
        for address in [0, 8, usize::MAX, usize::MAX - 4096, 1 << 63] {
            let pointer = std::ptr::without_provenance::<u64>(address);
            assert!(!is_readable(pointer) && !is_writable(pointer), "{address:#x}");
        }
        assert!(!are_readable(std::ptr::null::<u64>(), usize::MAX));
    }

    #[test]
    fn constants_are_readable_and_not_writable() {
        static CONSTANT: [u8; 2] = *b"ab";
        assert!(is_readable(&raw const CONSTANT));
        let code = memory_is_told_apart_by_its_rights as fn() as *const u8;
        assert!(is_readable(code) && !is_writable(code));
    }
}
