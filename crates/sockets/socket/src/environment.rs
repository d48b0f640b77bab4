//! The environment of the program, which is checked before the program runs.

use crate::process::settings::settings;
use crate::process::warning::warn_user;
use crate::rack::location;

/// The exit status of a program whose environment is not valid.
const EXIT_WRONG_USE: i32 = 2;

/// Reports errors in the environment. An invalid value ends the process, because a program must not run without what
/// the value was to guarantee. Called once, before the program runs.
pub fn check() {
    if settings().off {
        return;
    }
    settings().mistakes.iter().for_each(|mistake| warn_user(&format_args!("{mistake}")));
    if !settings().mistakes.is_empty() {
        // SAFETY: `_exit` ends the process without running any other code, and the program has not started yet.
        unsafe { libc::_exit(EXIT_WRONG_USE) };
    }
    if let Some(line) = location::missing_configured_directory() {
        warn_user(&format_args!("{line}; there are no lanes without it"));
    }
}
