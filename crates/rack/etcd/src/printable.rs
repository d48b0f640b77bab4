//! Text of etcd in error messages.

/// Characters of etcd's error texts that are shown, at most.
const PRINTED_CHARS_MAX: usize = 200;

/// Returns a text that etcd sent as one line of bounded length without control characters.
pub fn printable(text: &str) -> String {
    let clean = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    clean.take(PRINTED_CHARS_MAX).collect()
}
