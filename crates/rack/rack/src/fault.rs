//! What is wrong in a file that names nodes: this one, and others of the same kind.

/// Letters of a name: names are parts of socket paths, which are short.
const NAME_BYTES_MAX: usize = 24;

/// What is wrong, and with which key.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    /// Dotted, as in `nodes[1].name`.
    pub key: String,
    /// What is wrong and what would be right.
    pub what: String,
}

impl Fault {
    /// Of this key.
    pub fn new(key: impl Into<String>, what: impl Into<String>) -> Self {
        Self { key: key.into(), what: what.into() }
    }
}

/// Of a check.
pub type Checked = Result<(), Fault>;

/// That a name can be part of a path and of a line; `example` is one that can.
///
/// # Errors
/// When it cannot.
pub fn check_name(key: &str, name: &str, example: &str) -> Checked {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_good = name.bytes().all(is_letter) && name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if is_good && name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    let what =
        format!("{name:?} is no name; use 1 to {NAME_BYTES_MAX} of a to z, 0 to 9 and -, as in \"a\" or \"{example}\"");
    Err(Fault::new(key, what))
}
