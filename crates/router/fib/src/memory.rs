//! Memory of tables: zeroed, in large pages where the kernel has them, and fetched ahead.
#![allow(unsafe_code)] // A mapping seen as atomics, and a hint to the processor: nothing else.

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use memmap2::{MmapMut, MmapOptions};

/// A page of the larger size: a table of 32 MiB has 16 of them, where small ones would be 8,192, more than a processor
/// keeps translations of.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What a table is made of: atomics without padding, for which every pattern of bits is a value, and zeros are 0.
pub(crate) trait Atomic: Sync + private::Sealed {}

mod private {
    /// Only the atomics of this module.
    pub trait Sealed {}
}

macro_rules! atomics {
    ($($atomic:ty),*) => { $(impl Atomic for $atomic {} impl private::Sealed for $atomic {})* };
}
atomics!(AtomicU16, AtomicU32, AtomicU64);

/// `len` atomics, zero at first. Memory is taken when it is first written to.
pub(crate) struct AtomicArray<A> {
    map: MmapMut,
    /// Where in the mapping the first one is.
    offset: usize,
    len: usize,
    atomics: PhantomData<A>,
}

impl<A: Atomic> AtomicArray<A> {
    /// Maps `len` atomics, at least one.
    pub fn new(len: usize) -> io::Result<AtomicArray<A>> {
        let bytes = len * size_of::<A>();
        // The start is moved to a page of the larger size, where it takes one.
        let spare = if bytes < HUGE_PAGE_BYTES { 0 } else { HUGE_PAGE_BYTES };
        let map = MmapOptions::new().len(bytes + spare).no_reserve_swap().map_anon()?;
        let offset = if spare == 0 { 0 } else { map.as_ptr().align_offset(HUGE_PAGE_BYTES) };
        assert!(offset <= spare, "a mapping that cannot be aligned");
        if spare > 0 {
            // A kernel without them says so, and the table is the same with small ones, only slower.
            let _ = map.advise_range(memmap2::Advice::HugePage, offset, bytes);
        }
        Ok(AtomicArray { map, offset, len, atomics: PhantomData })
    }
}

impl<A: Atomic> Deref for AtomicArray<A> {
    type Target = [A];

    #[inline]
    fn deref(&self) -> &[A] {
        // SAFETY: the mapping has `offset + len * size_of::<A>()` bytes (`new`), and is aligned to a page and `offset`
        // to a larger one, which is more than any `A` asks for. It lives as long as `self`, every pattern of bits is
        // an `A` (`Atomic`), and after `new` nobody reaches the mapping but through this slice of atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.offset).cast(), self.len) }
    }
}

/// Asks for the cache line of what `slice` has at `index`, without waiting for it; of anything that it has not, for no
/// line that matters.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address never faults and changes nothing that a program can see; every x86-64 has
        // it.
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
    fn memory_is_zero_at_first_and_holds_what_is_stored() {
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
    fn large_memory_begins_at_a_large_page() {
        let memory = AtomicArray::<AtomicU16>::new(HUGE_PAGE_BYTES).expect("memory");
        assert_eq!(memory.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
    }
}
