//! Tells the report which commit it was built from.

use std::process::Command;

fn main() {
    // The reflog of HEAD grows with every commit and checkout, so the answer is never older than the last of these.
    println!("cargo:rerun-if-changed=../../.git/logs/HEAD");
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
