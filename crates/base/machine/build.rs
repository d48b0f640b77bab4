//! Records the commit and the version that the program is built from, and the target that it is built for.

use std::path::Path;
use std::process::Command;

fn main() {
    watch_head();
    // A change there makes the tree dirty, and its programs print the commit.
    for folder in ["src", "../../tools/bench", "../../tools/cli/src"] {
        println!("cargo:rerun-if-changed={folder}");
    }
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let described =
        Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]).output();
    let (commit, version) = match described {
        Ok(output) if output.status.success() => {
            let commit = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            (commit.clone(), format!("{version} ({commit})"))
        }
        _ => ("unknown".to_owned(), version),
    };
    let target = std::env::var("TARGET").unwrap_or_default();
    println!("cargo:rustc-env=CROSSLANE_TARGET={target}");
    println!("cargo:rustc-env=CROSSLANE_COMMIT={commit}");
    println!("cargo:rustc-env=CROSSLANE_VERSION={version}");
}

/// Reruns this script after each commit and checkout, when the reflog of HEAD grows. The reflog has another path in a
/// linked worktree. Without the check, cargo would take a missing file for one that changes with each build.
fn watch_head() {
    let found = Command::new("git").args(["rev-parse", "--git-path", "logs/HEAD"]).output();
    let path = found.map_or_else(|_| Vec::new(), |output| output.stdout);
    let path = String::from_utf8_lossy(&path).trim().to_owned();
    if Path::new(&path).is_file() {
        println!("cargo:rerun-if-changed={path}");
    }
}
