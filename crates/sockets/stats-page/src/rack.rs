//! The location of a rack's files.

use std::ffi::OsString;
use std::path::PathBuf;

/// Returns the rack directory for an environment: `$CROSSLANE_RACK`, else `$XDG_RUNTIME_DIR/crosslane`, else
/// `/dev/shm/crosslane-UID`.
pub fn rack_dir(variable: impl Fn(&str) -> Option<OsString>, uid: u32) -> PathBuf {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("CROSSLANE_RACK")
        .or_else(|| set("XDG_RUNTIME_DIR").map(|runtime| runtime.join("crosslane")))
        .unwrap_or_else(|| PathBuf::from(format!("/dev/shm/crosslane-{uid}")))
}

/// The folder of the pages in a rack directory.
pub const STAT_FOLDER: &str = "v1/stat";

/// The bit in the mode of a folder of pages that says that its pages stay when their programs have ended:
/// `crosslane compare` reads them afterwards, in a folder of its own.
pub const KEEP_PAGES: u32 = 0o1000;

/// The file in a rack directory that switches its lanes off: while it exists, new connections use kernel TCP.
pub const OFF_FILE: &str = "lanes-off";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rack_is_the_first_of_three_places_that_is_set() {
        let given = |rack: &'static str, runtime: &'static str| {
            move |name: &str| match name {
                "CROSSLANE_RACK" => Some(rack.into()),
                "XDG_RUNTIME_DIR" => Some(runtime.into()),
                _ => None,
            }
        };
        assert_eq!(rack_dir(given("/r", "/x"), 7), PathBuf::from("/r"));
        assert_eq!(rack_dir(given("", "/x"), 7), PathBuf::from("/x/crosslane"));
        assert_eq!(rack_dir(given("", ""), 7), PathBuf::from("/dev/shm/crosslane-7"));
        assert_eq!(rack_dir(|_| None, 7), PathBuf::from("/dev/shm/crosslane-7"));
    }
}
