//! Checks of Rust that clippy does not have: which crates may contain `unsafe` and which atomics the lane uses.

use crate::{Source, Violation};

/// Crates that may contain `unsafe`: memory that another party can write, pointers of callers, the C interface, and
/// the benchmarks and attacks on these.
pub const UNSAFE_CRATES: [&str; 16] = [
    "volmem",
    "fabric",
    "lane",
    "lane-c",
    "wait",
    "segment",
    "socket",
    "stream",
    "preload",
    "meeting",
    "stats-page",
    "fib",
    "bench",
    "pcie-bench",
    "router-ports",
    "system-tests",
];

/// Crates whose atomics come from volmem's facade, so that a model checker can replace them.
pub const MODELLED_CRATES: [&str; 1] = ["lane"];

/// Runs all checks of Rust. The workspace denies `unsafe_code`, so a crate contains `unsafe` only where it lifts that
/// lint.
pub fn check(source: &Source) -> Vec<Violation> {
    let krate = source.crate_name();
    let code = source.text.lines().map(|line| line.split("//").next().unwrap_or_default()).enumerate();
    let mut violations = Vec::new();
    for (index, line) in code {
        let is_lifted = line.trim_start().starts_with('#')
            && ["allow(unsafe_code", "expect(unsafe_code"].iter().any(|lift| line.contains(lift));
        if is_lifted && !UNSAFE_CRATES.contains(&krate) {
            let what = format!("unsafe in crate {krate}: only in {}", UNSAFE_CRATES.join(", "));
            violations.push(source.violation(index + 1, what));
        }
        let is_std = ["std::", "core::"].iter().any(|root| line.contains(root)) && line.contains("atomic");
        if is_std && MODELLED_CRATES.contains(&krate) {
            let what =
                format!("an atomic of the standard library in crate {krate}: use volmem's, which loom can model");
            violations.push(source.violation(index + 1, what));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    fn check_in(path: &str, text: &str) -> String {
        report(&check(&Source::new(path, text)))
    }

    #[test]
    fn only_listed_crates_lift_the_lint_against_unsafe_code() {
        for lift in ["#![allow(unsafe_code)]", "#[expect(unsafe_code, reason = \"a call\")]"] {
            let text = format!("//! allow(unsafe_code)\n{lift}\n");
            let found = check_in("crates/tools/cli/src/a.rs", &text);
            assert!(found.starts_with("crates/tools/cli/src/a.rs:2: unsafe in crate cli: only in volmem, "), "{found}");
            assert_eq!(check_in("crates/base/volmem/src/a.rs", &text), "");
            assert_eq!(check_in("tests/tests/a.rs", &text), "");
        }
    }

    #[test]
    fn atomics_of_the_standard_library_are_found_in_the_lane() {
        let lines = [
            "use std::sync::atomic::AtomicU64;",
            "use std::sync::{Arc, atomic::{AtomicU32, Ordering}};",
            "use core::{sync::atomic, mem};",
            "fn f() { ::std::sync::atomic::fence(Ordering::SeqCst) }",
        ];
        for line in lines {
            assert_eq!(check_in("crates/sockets/lane/src/a.rs", line).lines().count(), 1, "{line}");
            assert_eq!(check_in("crates/base/volmem/src/a.rs", line), "");
        }
        let text = "use volmem::sync::{AtomicU64, atomic};\nuse loom::sync::atomic::AtomicBool;\n\
                    use std::sync::Arc; // no atomic\n";
        assert_eq!(check_in("crates/sockets/lane/src/a.rs", text), "");
    }
}
