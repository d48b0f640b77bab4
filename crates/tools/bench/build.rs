//! Tells the report which commit it was built from.

use std::path::Path;
use std::process::Command;

fn main() {
    watch_head();
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=probes");
    let described =
        Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]).output();
    let commit = match described {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    };
    println!("cargo:rustc-env=CROSSLANE_COMMIT={commit}");
}

/// The reflog of HEAD grows with every commit and checkout, so the answer is never older than the last of these. It
/// lies elsewhere in a worktree; and a file that is not there is one that changes all the time, for cargo.
fn watch_head() {
    let found = Command::new("git").args(["rev-parse", "--git-path", "logs/HEAD"]).output();
    let path = found.map_or_else(|_| Vec::new(), |output| output.stdout);
    let path = String::from_utf8_lossy(&path).trim().to_owned();
    if Path::new(&path).is_file() {
        println!("cargo:rerun-if-changed={path}");
    }
}
