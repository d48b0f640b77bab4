//! Checks of parsed values, and their errors.

/// Longest name in bytes: names are parts of paths of Unix sockets, which are short.
const NAME_BYTES_MAX: usize = 24;

/// A key whose value was refused.
#[derive(Debug, PartialEq, Eq)]
pub struct InvalidKey {
    /// Path of the key, such as `nodes[1].name`.
    pub key: String,
    /// The defect and the remedy.
    pub what: String,
}

impl InvalidKey {
    /// Returns the report for `key`.
    pub fn new(key: impl Into<String>, what: impl Into<String>) -> Self {
        Self { key: key.into(), what: what.into() }
    }
}

/// The result of a check.
pub type CheckResult = Result<(), InvalidKey>;

/// Checks that the value of `key` can be part of a path and of a line of output; `example` is a valid name.
///
/// # Errors
/// The name has other characters, or too many.
pub fn check_name(key: &str, name: &str, example: &str) -> CheckResult {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_good = name.bytes().all(is_allowed) && name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if is_good && name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    let what = format!(
        "{name:?} is not a name; use 1 to {NAME_BYTES_MAX} of a to z, 0 to 9 and -, as in \"a\" or \"{example}\""
    );
    Err(InvalidKey::new(key, what))
}
