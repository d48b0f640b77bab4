//! Reads packets from text: plain hex, the output of `xxd` and `hexdump -C`, and header logs of the kernel's AER
//! reports.

use thiserror::Error;

/// The bytes of a packet found in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// The packet's bytes, from the first prefix or the header on.
    pub bytes: Vec<u8>,
    /// Whether only the header is there, as in an error report.
    pub is_header_only: bool,
}

/// Why a text has no packets.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DumpError {
    /// A word is not hex.
    #[error("line {line}: '{word}' is not hex; give bytes such as 20000010, or the output of xxd or hexdump -C")]
    NotHex {
        /// The line number, from 1.
        line: usize,
        /// The word found.
        word: String,
    },
    /// A word has an odd number of digits.
    #[error("line {line}: '{word}' has an odd number of digits; write every byte with two")]
    HalfByte {
        /// The line number, from 1.
        line: usize,
        /// The word found.
        word: String,
    },
    /// The text is empty.
    #[error("no bytes to decode; give a packet in hex as an argument or on standard input")]
    Empty,
}

/// The text before a packet's header in the kernel's AER reports.
const HEADER_LOG: &str = "TLP Header:";

/// Returns the packets of a text: one per header log, otherwise one per paragraph.
///
/// # Errors
/// At the first word that is not hex, or if the text has no bytes.
pub fn parse(text: &str) -> Result<Vec<Dump>, DumpError> {
    let mut dumps = Vec::new();
    let mut bytes = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        if let Some((_, log)) = line.split_once(HEADER_LOG) {
            let mut header = Vec::new();
            words_into(&mut header, log, number)?;
            finish(&mut bytes, &mut dumps);
            dumps.push(Dump { bytes: header, is_header_only: true });
        } else if line.trim().is_empty() || is_end_of_canonical(line, &bytes) {
            finish(&mut bytes, &mut dumps);
        } else {
            words_into(&mut bytes, without_margins(line), number)?;
        }
    }
    finish(&mut bytes, &mut dumps);
    if dumps.is_empty() { Err(DumpError::Empty) } else { Ok(dumps) }
}

fn finish(bytes: &mut Vec<u8>, dumps: &mut Vec<Dump>) {
    if !bytes.is_empty() {
        dumps.push(Dump { bytes: std::mem::take(bytes), is_header_only: false });
    }
}

/// Returns whether a line is the last one of `hexdump -C`, which holds only the number of bytes.
fn is_end_of_canonical(line: &str, bytes: &[u8]) -> bool {
    !bytes.is_empty() && line.len() == 8 && usize::from_str_radix(line, 16) == Ok(bytes.len())
}

/// Returns a line of a dump without the offset before the bytes and the characters after them.
fn without_margins(line: &str) -> &str {
    let line = line.split_once('|').map_or(line, |(hex, _)| hex); // hexdump -C
    if let Some((_, hex)) = line.split_once(": ") {
        return hex.split_once("  ").map_or(hex, |(hex, _)| hex); // xxd
    }
    match line.split_once("  ") {
        Some((offset, hex)) if offset.len() == 8 => hex,
        _ => line,
    }
}

fn words_into(bytes: &mut Vec<u8>, text: &str, line: usize) -> Result<(), DumpError> {
    let is_between = |character: char| character.is_whitespace() || matches!(character, ',' | '_');
    for word in text.split(is_between).filter(|word| !word.is_empty()) {
        let digits = word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")).unwrap_or(word).as_bytes();
        if digits.is_empty() || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(DumpError::NotHex { line, word: word.to_owned() });
        }
        let (pairs, rest) = digits.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(DumpError::HalfByte { line, word: word.to_owned() });
        }
        bytes.extend(pairs.iter().map(|[high, low]| nibble(*high) << 4 | nibble(*low)));
    }
    Ok(())
}

fn nibble(digit: u8) -> u8 {
    (digit as char).to_digit(16).map_or(0, |value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTES: [u8; 16] = [0x20, 0, 0, 16, 5, 1, 0xa5, 0xff, 0, 0, 0, 1, 0x23, 0x45, 0x67, 0x80];

    fn check(text: &str, is_header_only: bool) {
        assert_eq!(parse(text), Ok(vec![Dump { bytes: BYTES.to_vec(), is_header_only }]), "{text}");
    }

    #[test]
    fn all_formats_are_read() {
        check("20000010 0501a5ff 00000001 23456780", false);
        check("0x20000010, 0x0501A5FF,0x00000001 0x23456780\n", false);
        check("20 00 00 10 05 01 a5 ff\n00 00 00 01 23 45 67 80\n\n", false);
        check("00000000: 2000 0010 0501 a5ff 0000 0001 2345 6780   ...........#Eg.\n", false);
        check("00000000  20 00 00 10 05 01 a5 ff  00 00 00 01 23 45 67 80  | ...........#Eg.|\n00000010\n", false);
        check("[ 12.3] pcieport 0000:00:1c.0: AER:   TLP Header: 20000010 0501a5ff 00000001 23456780", true);
    }

    #[test]
    fn paragraphs_and_header_logs_are_separate_packets() {
        let dumps = parse("01 02\n\n03\n TLP Header: 04\n05\n").unwrap();
        let found: Vec<(&[u8], bool)> = dumps.iter().map(|dump| (&dump.bytes[..], dump.is_header_only)).collect();
        assert_eq!(found, [(&[1, 2][..], false), (&[3], false), (&[4], true), (&[5], false)]);
    }

    #[test]
    fn text_that_is_not_hex_is_refused() {
        assert_eq!(parse("01\nxyz"), Err(DumpError::NotHex { line: 2, word: "xyz".to_owned() }));
        assert_eq!(parse("012"), Err(DumpError::HalfByte { line: 1, word: "012".to_owned() }));
        assert_eq!(parse(" \n"), Err(DumpError::Empty));
    }

    proptest! {
        #[test]
        fn parsing_any_text_does_not_panic(text in "\\PC{0,80}(\n\\PC{0,40}){0,3}") {
            let _ = parse(&text);
        }
    }
}
