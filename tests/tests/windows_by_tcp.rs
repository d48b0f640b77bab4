//! The tests of `windows.rs` with the library whose connections are kernel TCP connections.

#[path = "windows.rs"]
mod windows;

fn library() -> Option<String> {
    system_tests::paths::library_of_streams().to_str().map(str::to_owned)
}
