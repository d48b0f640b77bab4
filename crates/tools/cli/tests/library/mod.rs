//! Libraries that do nothing and that the command takes for Crosslane's.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Compiles a shared library with the note by which the command knows the library and its release.
pub fn compile(path: &Path, release: &str) {
    let section = r#".pushsection .note.crosslane,\"a\",@note\n"#;
    let head = format!(r#".long 10, {}, 1\n.asciz \"Crosslane\"\n.balign 4\n"#, release.len());
    let source = format!(r#"__asm__("{section}{head}.ascii \"{release}\"\n.balign 4\n.popsection");"#);
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-x", "c", "-", "-o"]).arg(path).stdin(Stdio::piped());
    let mut compiler = command.spawn().expect("the tests need a C compiler");
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    assert!(compiler.wait().unwrap().success());
}
