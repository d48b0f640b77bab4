//! The tests of `windows.rs` with the library whose connections are kernel TCP connections.

#[path = "windows.rs"]
mod windows;

/// Skips the tests that do not pass with this library.
fn is_pending(reason: &str) -> bool {
    println!("pending: {reason}");
    true
}

fn library() -> Option<String> {
    system_tests::paths::library_of_streams().to_str().map(str::to_owned)
}
