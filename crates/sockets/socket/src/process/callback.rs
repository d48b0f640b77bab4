//! A function that a module above registers with one below.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A cell for one function pointer. Signal handlers may use it: no access waits for another one.
pub(crate) struct Callback<F>(AtomicPtr<c_void>, PhantomData<F>);

impl<F: Copy + Send + 'static> Callback<F> {
    pub(crate) const fn new() -> Self {
        const { assert!(mem::size_of::<F>() == mem::size_of::<*mut c_void>()) };
        Self(AtomicPtr::new(std::ptr::null_mut()), PhantomData)
    }

    pub(crate) fn set(&self, function: F) {
        // SAFETY: `new` checks that `F` has the size of a pointer, and a function pointer has no other validity demands
        // that a raw pointer lacks.
        let pointer = unsafe { mem::transmute_copy::<F, *mut c_void>(&function) };
        self.0.store(pointer, Ordering::Release);
    }

    /// Removes the function.
    pub(crate) fn clear(&self) {
        self.0.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Returns whether a function was set.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        !self.0.load(Ordering::Relaxed).is_null()
    }

    /// Returns the function, if one was set.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        let pointer = self.0.load(Ordering::Acquire);
        // SAFETY: `set` is the only one that stores a pointer that is not null, and it stores the bytes of an `F`.
        (!pointer.is_null()).then(|| unsafe { mem::transmute_copy::<*mut c_void, F>(&pointer) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callback_is_what_was_set_last() {
        static CALLBACK: Callback<fn(u32) -> u32> = Callback::new();
        assert!(!CALLBACK.is_set() && CALLBACK.get().is_none());
        CALLBACK.set(|number| number + 1);
        CALLBACK.set(|number| number + 2);
        assert_eq!(CALLBACK.get().map(|function| function(5)), Some(7));
        CALLBACK.clear();
        assert!(!CALLBACK.is_set());
    }
}
