//! The settings of the library, which it reads from the environment once, when it is loaded.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::OnceLock;

use stats_page::VARIABLES;

/// Maximum number of ranges in a list of ports.
const RANGES_MAX: usize = 1024;

/// A list of ports such as `80,443,6000-6100`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortList {
    ranges: Vec<RangeInclusive<u16>>,
}

/// The reason why a list of ports is not valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortListError {
    /// An empty entry or an empty list.
    Empty,
    /// An entry that is neither a port from 1 to 65535 nor a range of ports.
    Entry(String),
    /// A range that ends before it starts.
    Backwards(String),
    /// More ranges than [`RANGES_MAX`].
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
    /// Parses a list; blanks around its entries are allowed.
    ///
    /// # Errors
    /// The first invalid entry.
    pub fn parse(text: &str) -> Result<Self, PortListError> {
        let entries = text.split(',').count();
        if entries > RANGES_MAX {
            return Err(PortListError::TooMany(entries));
        }
        let ranges = text.split(',').map(|entry| parse_range(entry.trim())).collect::<Result<_, _>>()?;
        Ok(Self { ranges })
    }

    /// Returns whether `port` is in the list.
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

/// The prefix of all of them.
const PREFIX: &str = "CROSSLANE_";
/// Maximum number of unknown variables that a warning names.
const UNKNOWN_NAMED_MAX: usize = 4;
/// Maximum number of characters of a value or a name in a message.
const SHOWN_CHARS_MAX: usize = 64;

/// The values of the `CROSSLANE_*` variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The library passes all calls through, regardless of the other settings.
    pub off: bool,
    /// The source address of outgoing connections to other nodes.
    pub node: Option<IpAddr>,
    /// The only server ports whose connections use lanes.
    pub only: Option<PortList>,
    /// The server ports whose connections never use lanes.
    pub except: Option<PortList>,
    /// A connection that would fall back to kernel TCP fails.
    pub require_lane: bool,
    /// Connections between programs of one machine use kernel TCP, so that packet filters see them.
    pub honours_filters: bool,
    /// The directory of the page of counters, if it is not the rack directory.
    pub stats: Option<PathBuf>,
    /// The variables with invalid values. The program is not run, because it must not run without what they were to
    /// guarantee.
    pub mistakes: Vec<InvalidVariable>,
}

/// A variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidVariable {
    name: &'static str,
    value: String,
    /// The error in the value, and the remedy.
    what: String,
}

impl std::fmt::Display for InvalidVariable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}='{}': {}, or unset it; the program is not run", self.name, self.value, self.what)
    }
}

impl Settings {
    /// Reads the environment. Called once, while the library is loaded and the process has one thread.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads variables from any source. An empty one counts as not set.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut reader = Reader { variable, mistakes: Vec::new() };
        let off = reader.read("CROSSLANE_OFF", parse_switch).unwrap_or(false);
        let require_lane = reader.read("CROSSLANE_REQUIRE_LANE", parse_switch).unwrap_or(false);
        let node = reader.read("CROSSLANE_NODE", parse_node);
        let only = reader.read("CROSSLANE_ONLY", parse_ports);
        let except = reader.read("CROSSLANE_EXCEPT", parse_ports);
        let honours_filters = reader.read("CROSSLANE_FILTERS", parse_filters).unwrap_or(false);
        let stats = reader.read("CROSSLANE_STATS", parse_folder);
        // The other variables have no effect.
        let mistakes = if off { Vec::new() } else { reader.mistakes };
        Self { off, node, only, except, require_lane, honours_filters, stats, mistakes }
    }

    /// Returns whether connections to this server port use lanes.
    pub fn applies_to(&self, port: u16) -> bool {
        let listed = |list: &Option<PortList>, absent: bool| list.as_ref().map_or(absent, |ports| ports.contains(port));
        !self.off && listed(&self.only, true) && !listed(&self.except, false)
    }
}

/// Returns a warning about variables with the library's prefix that nothing reads, if there are any: one may be
/// mistyped.
pub fn unknown_variables(names: impl Iterator<Item = OsString>) -> Option<String> {
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let is_unknown = |name: &String| name.starts_with(PREFIX) && !VARIABLES.iter().any(|known| known.name == name);
    let mut unknown = BTreeSet::new();
    names.filter(is_unknown).for_each(|name| _ = unknown.insert(name));
    let named: Vec<String> = unknown.iter().take(UNKNOWN_NAMED_MAX).map(|name| shown(name)).collect();
    let more = if unknown.len() > named.len() { ", ..." } else { "" };
    let known = VARIABLES.map(|variable| variable.name).join(", ");
    let line = || format!("{}{more}: no variable of crosslane, and ignored; known are {known}", named.join(", "));
    (!named.is_empty()).then(line)
}

/// Shortens a text to what fits a line, and escapes control characters, which could manipulate a terminal.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARS_MAX).flat_map(char::escape_debug).collect()
}

struct Reader<V> {
    variable: V,
    mistakes: Vec<InvalidVariable>,
}

impl<V: Fn(&str) -> Option<OsString>> Reader<V> {
    /// Returns the value of a variable if it is set, not empty and valid.
    fn read<T>(&mut self, name: &'static str, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        let value = (self.variable)(name).filter(|value| !value.is_empty())?;
        let text = value.to_string_lossy();
        match parse(&text) {
            Ok(result) => Some(result),
            Err(what) => {
                self.mistakes.push(InvalidVariable { name, value: shown(&text), what });
                None
            }
        }
    }
}

fn parse_switch(text: &str) -> Result<bool, String> {
    stats_page::switch(text.as_bytes())
        .ok_or_else(|| "neither on nor off; set 1 (true, yes) or 0 (false, no)".to_owned())
}

/// Parses the letter of a node of this machine or, for the nodes of a rack file, the address of a machine.
fn parse_node(text: &str) -> Result<IpAddr, String> {
    let of_machine = |ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast();
    let address = || text.parse().ok().map(|ip: IpAddr| ip.to_canonical()).filter(of_machine);
    let node = stats_page::node_address(text).map(IpAddr::V4).or_else(address);
    node.ok_or_else(|| "not a letter a to z nor an address of a node; set a letter, such as a".to_owned())
}

fn parse_ports(text: &str) -> Result<PortList, String> {
    PortList::parse(text).map_err(|error| match error {
        PortListError::Entry(entry) => {
            format!("'{}' is no port; set ports and ranges like 80,6000-6100", shown(&entry))
        }
        PortListError::Backwards(entry) => format!("range '{}' ends before it starts; swap its ends", shown(&entry)),
        other => other.to_string(),
    })
}

fn parse_folder(text: &str) -> Result<PathBuf, String> {
    let folder = PathBuf::from(text);
    if folder.is_dir() { Ok(folder) } else { Err("not a directory; make it or name another one".to_owned()) }
}

fn parse_filters(text: &str) -> Result<bool, String> {
    match text {
        "honour" => Ok(true),
        "ignore" => Ok(false),
        _ => Err("not a rule for packet filters; set honour or ignore".to_owned()),
    }
}

/// Returns the settings of this process, which `crosslane run` passes in the environment.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_env)
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
    fn without_variables_every_port_uses_lanes() {
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
        let words = settings(&[("CROSSLANE_REQUIRE_LANE", "true"), ("CROSSLANE_OFF", "No")]);
        assert_eq!((words.require_lane, words.off), (true, false));
        let empty = settings(&[("CROSSLANE_OFF", ""), ("CROSSLANE_ONLY", ""), ("CROSSLANE_REQUIRE_LANE", "0")]);
        assert_eq!(empty, Settings::default());
    }

    #[test]
    fn filters_are_honoured_on_request() {
        let honours = |text| settings(&[("CROSSLANE_FILTERS", text)]).honours_filters;
        assert_eq!([honours("honour"), honours("ignore"), honours("")], [true, false, false]);
        assert_eq!(settings(&[("CROSSLANE_FILTERS", "yes")]).mistakes.len(), 1);
    }

    #[test]
    fn an_invalid_value_is_reported_with_its_variable_and_a_remedy() {
        let lines: [(&str, &str, &str); 7] = [
            ("CROSSLANE_OFF", "maybe", "neither on nor off; set 1 (true, yes) or 0 (false, no)"),
            ("CROSSLANE_REQUIRE_LANE", "2", "neither on nor off; set 1 (true, yes) or 0 (false, no)"),
            ("CROSSLANE_NODE", "q7", "not a letter a to z nor an address of a node; set a letter, such as a"),
            ("CROSSLANE_ONLY", "80,", "an empty entry; write ports and ranges like 80,443,6000-6100"),
            ("CROSSLANE_EXCEPT", "9-8", "range '9-8' ends before it starts; swap its ends"),
            ("CROSSLANE_STATS", "/nonexistent", "not a directory; make it or name another one"),
            ("CROSSLANE_FILTERS", "honor", "not a rule for packet filters; set honour or ignore"),
        ];
        for (name, value, what) in lines {
            let mistakes = settings(&[(name, value)]).mistakes;
            let texts: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
            assert_eq!(texts, [format!("{name}='{value}': {what}, or unset it; the program is not run")]);
        }
        let off = settings(&[("CROSSLANE_OFF", "1"), ("CROSSLANE_NODE", "q7")]);
        assert_eq!((off.off, off.mistakes), (true, Vec::new()), "the other variables have no effect");
        let hostile = settings(&[("CROSSLANE_NODE", &format!("\n\x1b[2J{}", "x".repeat(1000)))]);
        let text = hostile.mistakes[0].to_string();
        assert!(text.len() < 300 && !text.chars().any(char::is_control), "{text}");
    }

    #[test]
    fn a_variable_that_nothing_reads_is_named() {
        let unknown = |names: &[&str]| unknown_variables(names.iter().map(OsString::from));
        assert_eq!(unknown(&["PATH", "CROSSLANE", "CROSSLANE_ONLY", "CROSSLANE_RACK"]), None);
        let line = unknown(&["CROSSLANE_REQUIRELANE", "CROSSLANE_NODE"]).unwrap();
        assert!(line.starts_with("CROSSLANE_REQUIRELANE: no variable of crosslane, and ignored; known are"), "{line}");
        assert!(line.ends_with("CROSSLANE_STATS"), "{line}");
        let many = unknown(&["CROSSLANE_A", "CROSSLANE_B", "CROSSLANE_C", "CROSSLANE_D", "CROSSLANE_E"]).unwrap();
        assert!(many.starts_with("CROSSLANE_A, CROSSLANE_B, CROSSLANE_C, CROSSLANE_D, ...: "), "{many}");
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
