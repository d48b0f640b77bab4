//! Lists on the stack, for calls that a signal handler of the program may leave by a jump.
//!
//! A jump out of the allocator would leave its locks held, so that a list only uses the heap while handlers are
//! deferred. Threads may have as little as 16 KiB of stack.

use socket::process::signals;

/// A list whose first `N` elements are on the stack.
pub(crate) struct ShortList<T, const N: usize> {
    short: [T; N],
    len: usize,
    /// All elements, once there are more than `N`.
    long: Vec<T>,
}

impl<T: Copy, const N: usize> ShortList<T, N> {
    /// Returns an empty list; `filler` is any value.
    pub fn new(filler: T) -> Self {
        Self { short: [filler; N], len: 0, long: Vec::new() }
    }

    pub fn push(&mut self, element: T) {
        if self.len < N {
            self.short[self.len] = element;
        } else {
            signals::without_handlers(|| {
                if self.len == N {
                    self.long.clear();
                    self.long.extend_from_slice(&self.short);
                }
                self.long.push(element);
            });
        }
        self.len += 1;
    }

    /// Removes all elements, and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    pub fn as_slice(&self) -> &[T] {
        if self.len > N { &self.long } else { &self.short[..self.len] }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        if self.len > N { &mut self.long } else { &mut self.short[..self.len] }
    }
}

impl<T, const N: usize> Drop for ShortList<T, N> {
    fn drop(&mut self) {
        if self.long.capacity() > 0 {
            signals::without_handlers(|| drop(std::mem::take(&mut self.long)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_its_elements_however_many_there_are() {
        let mut list = ShortList::<u32, 3>::new(0);
        for _ in 0..2 {
            for count in 0..10 {
                assert_eq!(list.as_slice(), (0..count).collect::<Vec<_>>());
                list.push(count);
            }
            list.as_mut_slice()[9] = 7;
            assert_eq!(list.as_slice()[8..], [8, 7]);
            list.clear();
        }
    }
}
