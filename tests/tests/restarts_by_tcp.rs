//! The tests of `restarts.rs` with the library whose connections are kernel TCP connections.

use std::path::PathBuf;

#[path = "restarts.rs"]
mod restarts;

/// Skips the tests that do not pass with this library.
fn is_pending(reason: &str) -> bool {
    println!("pending: {reason}");
    true
}

fn library() -> Option<PathBuf> {
    Some(system_tests::paths::library_of_streams())
}
