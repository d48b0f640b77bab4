//! Model checks of `connection::lifetime`: loom runs every interleaving of a close and of calls that return. The flawed
//! versions must fail: otherwise the property would not be checked.

#[path = "../src/connection/lifetime.rs"]
mod lifetime;

use lifetime::{Lifetime, Word};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::panic::{self, AssertUnwindSafe};

/// loom does not model a single order of all sequentially consistent accesses. A read-modify-write reads the latest
/// value, so every load is one here.
#[derive(Debug)]
struct ModelWord(AtomicU32);

impl Default for ModelWord {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Word for ModelWord {
    fn load(&self) -> u32 {
        self.0.fetch_add(0, Ordering::SeqCst)
    }

    fn swap(&self, value: u32) -> u32 {
        self.0.swap(value, Ordering::SeqCst)
    }

    fn add(&self, summand: u32) -> u32 {
        self.0.fetch_add(summand, Ordering::SeqCst)
    }
}

/// Checks that exactly one of a close and `calls` calls that have slept ends the connection. `close` and `end_call` are
/// those of the library, or flawed ones; each returns whether it ends the connection.
fn check(
    calls: usize,
    end_call: impl Fn(&Lifetime<ModelWord>) -> bool + Copy + Send + Sync + 'static,
    close: impl Fn(&Lifetime<ModelWord>) -> bool + Copy + Send + Sync + 'static,
) {
    loom::model(move || {
        let lifetime = Arc::new(Lifetime::<ModelWord>::default());
        (0..calls).for_each(|_| lifetime.begin_call());
        let ends: Vec<_> = (0..calls)
            .map(|_| {
                let lifetime = Arc::clone(&lifetime);
                thread::spawn(move || u32::from(end_call(&lifetime)))
            })
            .collect();
        let by_close = u32::from(lifetime.calls() == 0 || close(&lifetime));
        let by_calls: u32 = ends.into_iter().map(|end| end.join().unwrap()).sum();
        assert_eq!(by_close + by_calls, 1, "ends of the connection");
    });
}

#[test]
fn one_of_them_ends_the_connection() {
    for calls in 0..=2 {
        check(calls, Lifetime::end_call, Lifetime::close);
    }
}

#[test]
fn flaws_are_found() {
    let is_found = |flawed: &dyn Fn()| panic::catch_unwind(AssertUnwindSafe(flawed)).is_err();
    assert!(is_found(&|| check(1, Lifetime::end_call, |lifetime| !lifetime.close() && lifetime.calls() == 0)));
    assert!(is_found(&|| check(1, |lifetime| lifetime.end_call() || lifetime.calls() == 0, Lifetime::close)));
    assert!(is_found(&|| check(
        2,
        |lifetime| {
            lifetime.forget_call();
            false
        },
        Lifetime::close
    )));
}

#[test]
fn a_child_of_a_fork_has_neither_calls_nor_a_close() {
    loom::model(|| {
        let lifetime = Lifetime::<ModelWord>::default();
        lifetime.begin_call();
        assert!(!lifetime.close(), "the call does");
        lifetime.reset();
        lifetime.begin_call();
        assert!(!lifetime.end_call(), "nothing was closed");
        assert_eq!(lifetime.calls(), 0);
    });
}
