//! Parses one or several sizes in bytes, as in `--size`: 64, 8K, 1M; 64,128,256; 64..1500; 64..4096:64.

use std::str::FromStr;

/// Maximum number of sizes of a command.
const SIZES_MAX: u64 = 65_536;

/// One size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// Sizes in bytes, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|last: char| !last.is_ascii_digit());
        let unit_bytes: u64 = match &text[digits.len()..] {
            "" | "B" => 1,
            "K" | "KiB" => 1 << 10,
            "M" | "MiB" => 1 << 20,
            "G" | "GiB" => 1 << 30,
            _ => 0,
        };
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) && unit_bytes > 0;
        let count: Option<u64> = if is_number { digits.parse().ok() } else { None };
        count
            .and_then(|count| count.checked_mul(unit_bytes))
            .map(Self)
            .ok_or_else(|| format!("'{text}' is not a size; write bytes as in 64, 8K or 1M"))
    }
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for part in text.split(',') {
            let (first, last, step) = parse_range(part)?;
            if (last - first) / step >= SIZES_MAX - sizes.len() as u64 {
                return Err(format!("'{text}' has more than {SIZES_MAX} sizes; choose a larger step, as in 64..1M:4K"));
            }
            sizes.extend((first..=last).step_by(usize::try_from(step).unwrap_or(usize::MAX)));
        }
        Ok(Self(sizes))
    }
}

/// Returns the first size, the last size and the step of `64`, `64..1500` or `64..1500:4`.
fn parse_range(part: &str) -> Result<(u64, u64, u64), String> {
    let (range, step) = part.split_once(':').unwrap_or((part, "1"));
    let (first, last) = range.split_once("..").unwrap_or((range, range));
    let (Size(first), Size(last), Size(step)) = (first.parse()?, last.parse()?, step.parse()?);
    match (first, step) {
        _ if last < first => Err(format!("'{part}' ends before it starts; write {last}..{first}")),
        (0, _) => Err(format!("'{part}' contains a size of 0 bytes; choose 1 or more")),
        (_, 0) => Err(format!("'{part}' has a step of 0 bytes; choose 1 or more")),
        _ => Ok((first, last, step)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_are_parsed() {
        for (text, expected) in [
            ("64", &[64][..]),
            ("8K", &[8192]),
            ("1MiB,64B", &[1 << 20, 64]),
            ("3..5,1", &[3, 4, 5, 1]),
            ("64..256:64", &[64, 128, 192, 256]),
            ("1..6:2", &[1, 3, 5]),
        ] {
            assert_eq!(text.parse::<Sizes>().unwrap().0, expected, "{text}");
        }
        assert_eq!("1..64K".parse::<Sizes>().unwrap().0.len(), 65_536);
    }

    #[test]
    fn an_error_names_the_invalid_size() {
        for (text, word) in [
            ("", "not a size"),
            ("64,", "not a size"),
            ("64ns", "not a size"),
            ("-1", "not a size"),
            ("+1", "not a size"),
            ("1.5K", "not a size"),
            ("K", "not a size"),
            ("99999999999999999999", "not a size"),
            ("99999999999999999G", "not a size"),
            ("64..", "not a size"),
            ("0", "0 bytes"),
            ("0..3", "0 bytes"),
            ("1..3:0", "step of 0"),
            ("9..7", "write 7..9"),
            ("1..65537", "more than 65536"),
            ("1..40000,1..40000", "more than 65536"),
            ("1..17179869183G", "more than 65536"),
        ] {
            let error = text.parse::<Sizes>().unwrap_err();
            assert!(error.contains(word) && error.contains(';'), "{text:?}: {error}");
        }
    }
}
