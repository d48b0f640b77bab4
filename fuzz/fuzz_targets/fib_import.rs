//! Imports arbitrary bytes as an MRT dump and as a list of prefixes: the import must not panic, imported prefixes must
//! have no bits beyond their length, and nothing may follow an error.
#![no_main]

use fib::import::{Error, Route, mrt, prefixes};
use libfuzzer_sys::fuzz_target;

fn check(routes: impl Iterator<Item = Result<Route, Error>>, bytes: usize) {
    let mut has_ended = false;
    for (index, route) in routes.enumerate() {
        assert!(!has_ended && index <= bytes, "nothing is read after an error");
        match route {
            Ok(route) => assert_eq!(route.prefix, route.prefix.trunc()),
            Err(error) => has_ended = !error.to_string().is_empty(),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(mrt(bytes), bytes.len());
    check(prefixes(bytes), bytes.len());
});
