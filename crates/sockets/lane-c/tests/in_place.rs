//! Compiles the C example against the header with the system's compiler, links it statically and dynamically, and runs
//! it.

use std::path::{Path, PathBuf};
use std::process::Command;

const STREAM_BYTES: u64 = 4 << 20;

/// Returns the checksum of the example's stream, computed without a lane.
fn checksum() -> u64 {
    let (mut first, mut second) = (0_u64, 0_u64);
    for position in 0..STREAM_BYTES {
        first += position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
        second = second.wrapping_add(first);
    }
    second
}

/// Returns the folder in which cargo puts this test and the libraries.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    test.parent().expect("a folder").to_path_buf()
}

fn compile(name: &str, link: &[&str]) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The name includes the process ID, because another run of this test may be executing its own program.
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}", std::process::id()));
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg("-I")
        .arg(package.join("include"))
        .arg("-o")
        .arg(&program)
        .arg(package.join("examples/in_place.c"))
        .args(link)
        .output()
        .expect("cc: install gcc");
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    program
}

fn assert_runs(program: &Path) {
    let output = Command::new(program).arg("4").output();
    let _ = std::fs::remove_file(program);
    let output = output.expect("the compiled example");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    let expected = format!("{STREAM_BYTES} bytes in place, checksum {:016x}, the same at both endpoints\n", checksum());
    assert_eq!(stdout, expected);
}

#[test]
fn the_c_example_runs_with_the_static_library() {
    let archive = libraries().join("libcrosslane_lane.a");
    let archive = archive.to_str().expect("a path in UTF-8");
    assert_runs(&compile("in_place_static", &[archive, "-lgcc_s", "-lm"]));
}

#[test]
fn the_c_example_runs_with_the_shared_library() {
    // Installed, the library has a name with its version, and the one for the linker is a link to it.
    let folder = tempfile::tempdir().expect("a folder");
    let library = libraries().join("libcrosslane_lane.so");
    for name in ["libcrosslane_lane.so.0", "libcrosslane_lane.so"] {
        std::os::unix::fs::symlink(&library, folder.path().join(name)).expect("a link");
    }
    let folder = folder.path().to_str().expect("a path in UTF-8");
    let run_path = format!("-Wl,-rpath,{folder}");
    assert_runs(&compile("in_place_shared", &["-L", folder, "-lcrosslane_lane", &run_path]));
}
