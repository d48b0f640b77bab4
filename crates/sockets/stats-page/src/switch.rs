//! The values of environment variables that are switches, for the library and for the command.

const ON: [&str; 4] = ["1", "true", "yes", "on"];
const OFF: [&str; 4] = ["0", "false", "no", "off"];

/// Parses the value of a switch, ignoring case. Returns `None` for any other value.
pub fn switch(value: &[u8]) -> Option<bool> {
    let is_one_of = |words: [&str; 4]| words.iter().any(|word| value.eq_ignore_ascii_case(word.as_bytes()));
    if is_one_of(ON) {
        return Some(true);
    }
    is_one_of(OFF).then_some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_on_off_or_invalid() {
        for word in ["1", "true", "Yes", "ON"] {
            assert_eq!(switch(word.as_bytes()), Some(true), "{word}");
        }
        for word in ["0", "false", "No", "OFF"] {
            assert_eq!(switch(word.as_bytes()), Some(false), "{word}");
        }
        for word in [&b""[..], b"2", b"y", b"true ", b"enabled", b"\xff"] {
            assert_eq!(switch(word), None, "{word:?}");
        }
    }
}
