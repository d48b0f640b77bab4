//! No bytes make the import of an MRT dump or of a list of prefixes panic; imported prefixes have no bits beyond their
//! length, and nothing follows an error.
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
