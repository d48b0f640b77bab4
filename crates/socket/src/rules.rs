//! What the environment asks of the library: read once, when it is loaded.

use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::RangeInclusive;

/// Ranges a list of ports may have; a longer one is unusable.
const RANGES_MAX: usize = 1024;

/// A list of ports such as `80,443,6000-6100`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortList {
    ranges: Vec<RangeInclusive<u16>>,
}

/// Why a list of ports cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortListError {
    /// Nothing between commas, or nothing at all.
    Empty,
    /// Not a port from 1 to 65535, nor a range of them.
    Entry(String),
    /// A range whose end is before its start.
    Backwards(String),
    /// More ranges than are taken.
    TooMany(usize),
}

impl std::fmt::Display for PortListError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Empty => write!(formatter, "an empty entry; write ports and ranges like 80,443,6000-6100"),
            Self::Entry(entry) => write!(formatter, "'{entry}': not a port from 1 to 65535 nor a range like 6000-6100"),
            Self::Backwards(entry) => write!(formatter, "'{entry}': the range ends before it starts; swap its ends"),
            Self::TooMany(entries) => {
                write!(formatter, "{entries} entries, at most {RANGES_MAX}; join them into ranges")
            }
        }
    }
}

impl std::error::Error for PortListError {}

impl PortList {
    /// Reads a list; blanks around its entries are allowed.
    ///
    /// # Errors
    /// The first entry that is wrong.
    pub fn parse(text: &str) -> Result<Self, PortListError> {
        let entries = text.split(',').count();
        if entries > RANGES_MAX {
            return Err(PortListError::TooMany(entries));
        }
        let ranges = text.split(',').map(|entry| parse_range(entry.trim())).collect::<Result<_, _>>()?;
        Ok(Self { ranges })
    }

    /// Whether `port` is in the list.
    pub fn contains(&self, port: u16) -> bool {
        self.ranges.iter().any(|range| range.contains(&port))
    }
}

fn parse_range(entry: &str) -> Result<RangeInclusive<u16>, PortListError> {
    if entry.is_empty() {
        return Err(PortListError::Empty);
    }
    let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
    let port = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let port = text.parse::<u16>().ok().filter(|port| digits && *port > 0);
        port.ok_or_else(|| PortListError::Entry(entry.to_owned()))
    };
    let (first, last) = (port(first.trim())?, port(last.trim())?);
    if first > last { Err(PortListError::Backwards(entry.to_owned())) } else { Ok(first..=last) }
}

/// What the `CROSSLANE_*` variables say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Everything is passed through.
    pub off: bool,
    /// The source address of outgoing connections to other nodes.
    pub node: Option<IpAddr>,
    /// Only these server ports take lanes.
    pub only: Option<PortList>,
    /// These server ports take none.
    pub except: Option<PortList>,
    /// A fallback is an error.
    pub require_lane: bool,
    /// Connections between programs of one machine are left to kernel TCP, for its packet filters to see them.
    pub honours_filters: bool,
    /// Variables whose value made no sense and which are treated as not set. The command checks them before it starts a
    /// program.
    pub ignored: u32,
}

impl Settings {
    /// Reads the environment. To be called once, while the library is loaded and there is one thread.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads variables from anywhere.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut ignored = 0;
        let off = parsed(&variable, "CROSSLANE_OFF", &mut ignored, parse_switch).unwrap_or(false);
        let require_lane = parsed(&variable, "CROSSLANE_REQUIRE_LANE", &mut ignored, parse_switch).unwrap_or(false);
        let node = parsed(&variable, "CROSSLANE_NODE", &mut ignored, parse_node);
        let only = parsed(&variable, "CROSSLANE_ONLY", &mut ignored, |text| PortList::parse(text).ok());
        let except = parsed(&variable, "CROSSLANE_EXCEPT", &mut ignored, |text| PortList::parse(text).ok());
        let honours_filters = parsed(&variable, "CROSSLANE_FILTERS", &mut ignored, parse_filters).unwrap_or(false);
        Self { off, node, only, except, require_lane, honours_filters, ignored }
    }

    /// Whether connections to this server port take lanes.
    pub fn applies_to(&self, port: u16) -> bool {
        let listed = |list: &Option<PortList>, absent: bool| list.as_ref().map_or(absent, |ports| ports.contains(port));
        !self.off && listed(&self.only, true) && !listed(&self.except, false)
    }
}

/// A node of this machine, or, where a rack file names them, the address of a machine.
fn parse_node(text: &str) -> Option<IpAddr> {
    let of_machine = |ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast();
    let address = || text.parse().ok().map(|ip: IpAddr| ip.to_canonical()).filter(of_machine);
    ledger::node_address(text).map(IpAddr::V4).or_else(address)
}

/// The value of a variable, if it is set, not empty, and makes sense.
fn parsed<T>(
    variable: impl Fn(&str) -> Option<OsString>,
    name: &str,
    ignored: &mut u32,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let value = variable(name).filter(|value| !value.is_empty())?;
    let result = value.to_str().and_then(parse);
    *ignored += u32::from(result.is_none());
    result
}

fn parse_filters(text: &str) -> Option<bool> {
    match text {
        "honour" => Some(true),
        "ignore" => Some(false),
        _ => None,
    }
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "1" => Some(true),
        "0" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn without_variables_every_port_takes_lanes() {
        let settings = settings(&[]);
        assert_eq!(settings, Settings::default());
        assert!(settings.applies_to(1) && settings.applies_to(65_535));
    }

    #[test]
    fn only_and_except_choose_ports() {
        let only = settings(&[("CROSSLANE_ONLY", "80, 443,6000-6100")]);
        let except = settings(&[("CROSSLANE_EXCEPT", "80,443,6000-6100")]);
        let both = settings(&[("CROSSLANE_ONLY", "6000-6100"), ("CROSSLANE_EXCEPT", "6050")]);
        for (port, listed) in
            [(80, true), (443, true), (81, false), (5999, false), (6000, true), (6100, true), (6101, false)]
        {
            assert_eq!(only.applies_to(port), listed, "{port}");
            assert_eq!(except.applies_to(port), !listed, "{port}");
        }
        assert!(both.applies_to(6049) && !both.applies_to(6050) && !both.applies_to(80));
    }

    #[test]
    fn switches_nodes_and_empty_values_are_read() {
        let all = settings(&[("CROSSLANE_OFF", "1"), ("CROSSLANE_REQUIRE_LANE", "1"), ("CROSSLANE_NODE", "b")]);
        assert_eq!((all.off, all.require_lane, all.node), (true, true, Some(IpAddr::from([127, 77, 0, 2]))));
        let node = |text| settings(&[("CROSSLANE_NODE", text)]).node;
        assert_eq!(node("fd00:77::2"), "fd00:77::2".parse().ok());
        assert_eq!([node("::1"), node("ff02::1"), node("127.0.0.1")], [None; 3]);
        assert!(!all.applies_to(80));
        let empty = settings(&[("CROSSLANE_OFF", ""), ("CROSSLANE_ONLY", ""), ("CROSSLANE_REQUIRE_LANE", "0")]);
        assert_eq!(empty, Settings::default());
    }

    #[test]
    fn filters_are_honoured_where_that_is_asked_for() {
        let honours = |text| settings(&[("CROSSLANE_FILTERS", text)]).honours_filters;
        assert_eq!([honours("honour"), honours("ignore"), honours("")], [true, false, false]);
        assert_eq!(settings(&[("CROSSLANE_FILTERS", "yes")]).ignored, 1);
    }

    #[test]
    fn what_makes_no_sense_is_ignored_and_counted() {
        let settings = settings(&[
            ("CROSSLANE_OFF", "yes"),
            ("CROSSLANE_NODE", "q7"),
            ("CROSSLANE_ONLY", "80,"),
            ("CROSSLANE_EXCEPT", "9-8"),
        ]);
        assert_eq!(settings, Settings { ignored: 4, ..Settings::default() });
    }

    #[test]
    fn a_bad_list_names_its_bad_entry() {
        let entry = |text: &str| PortListError::Entry(text.into());
        assert_eq!(PortList::parse(""), Err(PortListError::Empty));
        assert_eq!(PortList::parse("80,,81"), Err(PortListError::Empty));
        assert_eq!(PortList::parse("80,9-8"), Err(PortListError::Backwards("9-8".into())));
        for text in ["0", "65536", "+80", "-80", "80-", "1-2-3", "http", "99999999999999999999"] {
            assert_eq!(PortList::parse(text), Err(entry(text)), "{text}");
        }
        let long = vec!["1"; RANGES_MAX + 1].join(",");
        assert_eq!(PortList::parse(&long), Err(PortListError::TooMany(RANGES_MAX + 1)));
    }

    proptest! {
        #[test]
        fn a_list_contains_what_its_ranges_contain(
            ranges in prop::collection::vec((1..=65_535_u16, 1..=65_535_u16), 1..8),
            port: u16,
        ) {
            let ordered: Vec<_> = ranges.iter().map(|(a, b)| (*a.min(b), *a.max(b))).collect();
            let text = ordered.iter().map(|(a, b)| format!("{a}-{b}")).collect::<Vec<_>>().join(",");
            let expected = ordered.iter().any(|(a, b)| (*a..=*b).contains(&port));
            prop_assert_eq!(PortList::parse(&text).unwrap().contains(port), expected);
        }

        #[test]
        fn any_text_is_a_list_or_an_error(text in ".{0,40}") {
            let _ = PortList::parse(&text);
        }
    }
}
