//! Memory of tables: zeroed arrays of atomics, in huge pages where the kernel provides them, and prefetching.
#![allow(unsafe_code)] // Views a mapping as atomics, and executes a prefetch instruction.

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use memmap2::{MmapMut, MmapOptions};

/// Size of a huge page. A table of 32 MiB takes 16 huge pages instead of 8,192 small ones, which exceed the TLB of a
/// processor.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The element of a table: an atomic integer, which has no padding and for which every bit pattern is valid.
pub(crate) trait Atomic: Sync + private::Sealed {}

mod private {
    /// Restricts `Atomic` to the types of this module.
    pub trait Sealed {}
}

macro_rules! atomics {
    ($($atomic:ty),*) => { $(impl Atomic for $atomic {} impl private::Sealed for $atomic {})* };
}
atomics!(AtomicU16, AtomicU32, AtomicU64);

/// An array of `len` atomics, initially zero. The kernel allocates its pages at the first write.
pub(crate) struct AtomicArray<A> {
    map: MmapMut,
    /// Offset of the first element in the mapping, in bytes.
    offset: usize,
    len: usize,
    atomics: PhantomData<A>,
}

impl<A: Atomic> AtomicArray<A> {
    /// Maps an array of `len` elements, at least one.
    pub fn new(len: usize) -> io::Result<AtomicArray<A>> {
        let bytes = len * size_of::<A>();
        // Arrays of at least a huge page begin at a huge-page boundary.
        let spare = if bytes < HUGE_PAGE_BYTES { 0 } else { HUGE_PAGE_BYTES };
        let map = MmapOptions::new().len(bytes + spare).no_reserve_swap().map_anon()?;
        let offset = if spare == 0 { 0 } else { map.as_ptr().align_offset(HUGE_PAGE_BYTES) };
        assert!(offset <= spare, "the mapping cannot be aligned to a huge page");
        if spare > 0 {
            // A kernel without huge pages returns an error; the table then works with small pages, only slower.
            let _ = map.advise_range(memmap2::Advice::HugePage, offset, bytes);
        }
        Ok(AtomicArray { map, offset, len, atomics: PhantomData })
    }
}

impl<A: Atomic> Deref for AtomicArray<A> {
    type Target = [A];

    #[inline]
    fn deref(&self) -> &[A] {
        // SAFETY: `new` mapped at least `offset + len * size_of::<A>()` bytes, and the first element is aligned to a
        // page, which exceeds the alignment of every `A`. The mapping lives as long as `self`. Every bit pattern is a
        // valid `A`, an atomic integer, and `map` is private and never written except through this slice of atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.offset).cast(), self.len) }
    }
}

/// Prefetches the cache line of `slice[index]`. An index outside of the slice has no effect on the program.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction. It never faults, whatever the address, and changes
        // nothing that a program can observe.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_add(index).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn an_array_is_initially_zero_and_holds_what_is_stored() {
        for len in [1, 100, (HUGE_PAGE_BYTES / 8) + 3] {
            let memory = AtomicArray::<AtomicU64>::new(len).expect("memory");
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|word| word.load(Ordering::Relaxed) == 0));
            memory[len - 1].store(7, Ordering::Relaxed);
            assert_eq!(memory[len - 1].load(Ordering::Relaxed), 7);
            prefetch(&memory, len - 1);
            prefetch(&memory, usize::MAX);
        }
    }

    #[test]
    fn a_large_array_begins_at_a_huge_page() {
        let memory = AtomicArray::<AtomicU16>::new(HUGE_PAGE_BYTES).expect("memory");
        assert_eq!(memory.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
    }
}
