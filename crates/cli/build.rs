//! Tells `crosslane --version` which commit it was built from, where there is one.

use std::process::Command;

fn main() {
    // The reflog of HEAD grows with every commit and checkout, so the answer is never older than the last of these.
    println!("cargo:rerun-if-changed=../../.git/logs/HEAD");
    println!("cargo:rerun-if-changed=src");
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let described =
        Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]).output();
    let version = match described {
        Ok(output) if output.status.success() => {
            format!("{version} ({})", String::from_utf8_lossy(&output.stdout).trim())
        }
        _ => version,
    };
    println!("cargo:rustc-env=CROSSLANE_VERSION={version}");
}
