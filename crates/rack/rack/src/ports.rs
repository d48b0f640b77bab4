//! Port lists on the command line and in access rules.

use std::fmt;
use std::str::FromStr;

/// A list of ports and port ranges, as in `80,443,6000-6100`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortList {
    ranges: Vec<(u16, u16)>,
}

impl PortList {
    /// Returns the first and last ports of the ranges, in the order in which they were written.
    pub fn ranges(&self) -> &[(u16, u16)] {
        &self.ranges
    }

    /// Returns whether the list contains a port.
    pub fn contains(&self, port: u16) -> bool {
        self.ranges.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }
}

impl FromStr for PortList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(parse_range).collect::<Result<_, _>>().map(|ranges| Self { ranges })
    }
}

impl fmt::Display for PortList {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match first == last {
                true => write!(formatter, "{comma}{first}")?,
                false => write!(formatter, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

fn parse_range(part: &str) -> Result<(u16, u16), String> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (parse_port(first, part)?, parse_port(last, part)?);
    if first > last {
        return Err(format!("'{part}' ends before it starts; write {last}-{first}"));
    }
    Ok((first, last))
}

fn parse_port(text: &str, part: &str) -> Result<u16, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port: Option<u16> = if digits { text.parse().ok() } else { None };
    port.filter(|port| *port > 0).ok_or_else(|| {
        format!("'{part}' is not a port; write numbers from 1 to 65535 and ranges, as in 80,443,6000-6100")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_back_from_its_text() {
        for text in ["80", "1-65535", "80,443,6000-6100", "5,5"] {
            assert_eq!(text.parse::<PortList>().unwrap().to_string(), text);
        }
        assert_eq!("0080,7-7".parse::<PortList>().unwrap().to_string(), "80,7");
    }

    #[test]
    fn a_list_contains_its_ports_and_no_others() {
        let list: PortList = "80,443,6000-6100".parse().unwrap();
        assert!([80, 443, 6000, 6050, 6100].into_iter().all(|port| list.contains(port)));
        assert!([0, 79, 81, 5999, 6101, 65535].into_iter().all(|port| !list.contains(port)));
    }

    #[test]
    fn an_invalid_list_is_named() {
        for text in ["", ",", "80,", "0", "65536", "-1", "1-", "-", "a", "80 ", "+80", "1-2-3", "99999999999", "80;81"]
        {
            let error = text.parse::<PortList>().unwrap_err();
            assert!(error.contains("is not a port"), "{text:?}: {error}");
        }
        assert_eq!("9-7".parse::<PortList>().unwrap_err(), "'9-7' ends before it starts; write 7-9");
    }
}
