//! A system as a parameter file describes it: TOML, every unit in the key's name, every value with its source.

use serde::Deserialize;
use thiserror::Error;
use toml::{Table, Value};

use crate::link::{Link, TransferLimit};
use crate::tlp::{Credits, DATA_CREDIT_BYTES};
use config::ConfigError;

/// The parameter files that come with the program: name and text. `base` in a file names another one of these.
const BUILT_IN: [(&str, &str); 12] = [
    ("nfp-6000", include_str!("../../systems/nfp-6000.toml")),
    ("snb", include_str!("../../systems/snb.toml")),
    ("ib", include_str!("../../systems/ib.toml")),
    ("hsw", include_str!("../../systems/hsw.toml")),
    ("hsw2", include_str!("../../systems/hsw2.toml")),
    ("bdw", include_str!("../../systems/bdw.toml")),
    ("e3", include_str!("../../systems/e3.toml")),
    ("nic-gen4", include_str!("../../systems/nic-gen4.toml")),
    ("ice-lake", include_str!("../../systems/ice-lake.toml")),
    ("milan", include_str!("../../systems/milan.toml")),
    ("sapphire-rapids", include_str!("../../systems/sapphire-rapids.toml")),
    ("genoa", include_str!("../../systems/genoa.toml")),
];

/// Files that only serve others as base.
const PARTIAL: [&str; 2] = ["nfp-6000", "nic-gen4"];
/// How many files may stand on one another.
const BASES_MAX: usize = 8;
/// Tags of a device: ten bits name them.
const TAGS_MAX: u32 = 1024;
/// Times beyond this are taken for a wrong unit: a second.
const NS_MAX: f64 = 1e9;

/// A parameter file that makes no system.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParameterError {
    /// Not one of those that come with the program.
    #[error("system '{name}' is not known; choose {known}, or give a parameter file")]
    Unknown {
        /// As asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// Not TOML, or an invalid key or value.
    #[error(transparent)]
    File(#[from] ConfigError),
}

/// Everything that is known of a system.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// The file that this one changes; taken into account before the rest is read.
    #[serde(default)]
    pub base: Option<String>,
    /// Processor, chipset and device in words.
    pub description: String,
    /// Whether no figure measured on this system went into it.
    #[serde(default)]
    pub is_prediction: bool,
    /// Generation, width, limits.
    pub link: Link,
    /// What the link's ends add.
    pub wire: WireParameters,
    /// What the root complex advertises, and the device.
    pub credits: CreditParameters,
    /// The device.
    pub device: DeviceParameters,
    /// The host's end of the link.
    pub root_complex: RootComplexParameters,
    /// Translation of addresses.
    pub iommu: IommuParameters,
    /// The last-level cache of the device's socket.
    pub cache: CacheParameters,
    /// Main memory.
    pub memory: MemoryParameters,
    /// Sockets.
    pub numa: NumaParameters,
    /// Latency that no part explains, of DMA reads.
    #[serde(default)]
    pub tails: Option<TailParameters>,
}

/// What the link's ends add to its lanes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireParameters {
    /// Share of the device's bytes that are link layer packets and skip symbols.
    pub up_dllp_share: f64,
    /// Share of the host's.
    pub down_dllp_share: f64,
    /// From the last bit sent to the last bit handed on, one way.
    pub latency_ns: f64,
    /// From a packet's arrival to the Ack that leaves for it.
    pub acknowledge_ns: f64,
    /// How long a sender waits for an Ack before it sends again.
    pub replay_timer_ns: f64,
    /// Bytes that may wait for an Ack.
    pub replay_buffer_bytes: u32,
    /// Probability that a bit arrives wrong.
    pub bit_error_rate: f64,
}

/// Credits of the three classes; 0 stands for "without limit".
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreditParameters {
    /// Writes that the host's queue holds.
    pub posted_headers: u32,
    /// Their data, in units of 16 bytes.
    pub posted_data: u32,
    /// Read requests that the host's queue holds.
    pub non_posted_headers: u32,
    /// Data of non-posted requests, in units of 16 bytes.
    pub non_posted_data: u32,
    /// Completions that the device holds.
    pub completion_headers: u32,
    /// Their data, in units of 16 bytes.
    pub completion_data: u32,
    /// From room in the queue to its credits at the sender.
    pub update_ns: f64,
}

/// A device that tests: DMA engines for transfers, commands for small ones.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceParameters {
    /// Read requests that may be outstanding.
    pub tags: u32,
    /// The timer's step.
    pub timer_step_ns: f64,
    /// Between the beginnings of two reads.
    pub read_interval_ns: f64,
    /// Between the beginnings of two writes.
    pub write_interval_ns: f64,
    /// What a transfer of either direction takes of the bus that both share, without its bytes.
    pub bus_transfer_ns: f64,
    /// Rate of that bus.
    pub bus_gbps: f64,
    /// Between two packets of a write.
    pub packet_gap_ns: f64,
    /// Between the last packet of a write and the first of the next.
    pub write_gap_ns: f64,
    /// From the last completion until a read's tag is free.
    pub tag_ns: f64,
    /// From there until the program knows.
    pub dma_done_ns: f64,
    /// What moving a byte from the link's buffer to the program takes, in latency.
    pub receive_byte_ns: f64,
    /// What a read of more than one line takes on top, in latency.
    pub split_ns: f64,
    /// From a DMA write's last packet to the read that follows it, without its bytes.
    pub write_done_ns: f64,
    /// What a byte of a DMA write adds to that.
    pub write_byte_ns: f64,
    /// A DMA write is done in bursts of this many bytes.
    pub write_burst_bytes: u32,
    /// What each after the first takes, in latency.
    pub write_burst_ns: f64,
    /// Latencies of transfers up to this size are taken by command, as published; longer ones by DMA.
    pub command_bytes_max: u32,
    /// From a command's last completion until the program knows.
    pub command_done_ns: f64,
    /// From a command's write to the read that follows it.
    pub command_write_ns: f64,
}

/// The host's end of the link.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootComplexParameters {
    /// From a read's arrival to a line that a device wrote and the cache holds.
    pub read_ns: f64,
    /// What a line of a read takes of the way to cache and memory, behind which page table walks wait.
    pub port_line_ns: f64,
    /// Between the data of the lines of a read.
    pub line_interval_ns: f64,
    /// From a write's arrival until a read behind it may go on.
    pub write_order_ns: f64,
    /// What a read waits more when an earlier one of the same line, which no device wrote, is not answered yet.
    pub conflict_ns: f64,
    /// Latencies are spread evenly over this.
    pub jitter_ns: f64,
    /// Lines of requests at least this long share a completion, up to MPS, while they wait for the link; lines of
    /// shorter ones go one by one, a read completion boundary each.
    pub combine_from_bytes: u32,
}

/// Translation of addresses.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuParameters {
    /// Translations that the IOTLB holds.
    pub entries: u32,
    /// Ways of a set; 0: any entry holds any page.
    pub ways: u32,
    /// Which translation goes when another comes.
    pub replacement: Replacement,
    /// Reads looked at at a time.
    pub read_queue: u32,
    /// Writes looked at at a time.
    pub write_queue: u32,
    /// Page table walks at a time.
    pub walkers: u32,
    /// How long a walk takes.
    pub walk_ns: f64,
    /// How long a read keeps its walker after the walk.
    pub read_hold_ns: f64,
    /// And for each of its lines.
    pub line_replay_ns: f64,
    /// Whether requests leave in the order in which they came.
    pub in_order: bool,
}

/// Which translation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// Any.
    Random,
    /// The one that was used longest ago.
    Lru,
}

/// The last-level cache.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheParameters {
    /// All of it.
    pub mib: f64,
    /// Of a set.
    pub ways: u32,
    /// Those into which a device's writes allocate.
    pub ddio_ways: u32,
    /// What a line that the CPU wrote costs more than one that a device wrote.
    pub snoop_ns: f64,
    /// What a write of part of a line that is not in the cache costs more: the rest is fetched.
    pub fetch_ns: f64,
    /// What a write costs more that pushes another line out.
    pub dirty_eviction_ns: f64,
}

/// Main memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryParameters {
    /// What a line costs more than one from the cache.
    pub latency_ns: f64,
    /// Between two lines at full rate, for one device.
    pub line_ns: f64,
    /// Between two refreshes (tREFI).
    pub refresh_interval_ns: f64,
    /// How long one takes (tRFC).
    pub refresh_ns: f64,
}

/// Sockets.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaParameters {
    /// How many.
    pub sockets: u32,
    /// What memory of another socket costs more.
    pub hop_ns: f64,
    /// `root_complex.conflict_ns` of lines there.
    pub conflict_ns: f64,
}

/// Latency that no part explains, by its quantiles.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TailParameters {
    /// Share of requests from 0 to 1, and what they wait at most, in nanoseconds.
    pub quantiles: Vec<[f64; 2]>,
}

impl CreditParameters {
    /// Of writes.
    pub fn posted(&self) -> Credits {
        Credits { header: self.posted_headers, data: self.posted_data }
    }

    /// Of read requests.
    pub fn non_posted(&self) -> Credits {
        Credits { header: self.non_posted_headers, data: self.non_posted_data }
    }

    /// Of completions.
    pub fn completion(&self) -> Credits {
        Credits { header: self.completion_headers, data: self.completion_data }
    }
}

/// Systems that can be run by name, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).filter(|name| !PARTIAL.contains(name))
}

/// Text of the file that came with the program under this name.
pub fn built_in(name: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// An error in a file's `key`, such as `iommu.walk_ns`; the line is named where the file itself has the key.
fn senseless(file: &str, text: &str, key: &str, what: String) -> ParameterError {
    let line = line_of(text, key).map(|line| format!("line {line}, "));
    let place = line.unwrap_or_default() + key;
    ConfigError::Invalid { file: file.to_owned(), location: place, what }.into()
}

/// What to write for a value of the wrong kind: a key's name ends with the unit of its number.
fn remedy(key: &str) -> &'static str {
    match key.rsplit(['_', '.']).next() {
        Some("ns") => "; write a number of nanoseconds, without a unit",
        Some("us" | "ms" | "s") => "; times are in nanoseconds, under keys that end in _ns",
        Some("bytes") => "; write a number of bytes, without a unit",
        Some("gbps") => "; write a number of 10^9 bits a second, without a unit",
        Some("mib") => "; write a number of 2^20 bytes, without a unit",
        _ => "",
    }
}

/// The line in which a file sets `section.key`, or begins what is called `key`.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
    let mut current = "";
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            current = header;
            if header == key {
                return Some(number);
            }
        } else if current == section && line.split('=').next().is_some_and(|left| left.trim() == name) {
            return Some(number);
        }
    }
    None
}

/// The table of a file, its base's values filled in.
///
/// # Errors
/// When it, or a base, is not TOML, or a base is not known.
pub fn table(file: &str, text: &str) -> Result<Table, ParameterError> {
    let mut merged: Table = config::parse(file, text)?;
    for _ in 0..BASES_MAX {
        let Some(Value::String(base)) = merged.remove("base") else { return Ok(merged) };
        let Some(base_text) = built_in(&base) else { return Err(unknown(&base)) };
        let mut below: Table = config::parse(&base, base_text)?;
        overlay(&mut below, merged);
        merged = below;
    }
    let what = format!("more than {BASES_MAX} files stand on one another; shorten the chain of bases");
    Err(senseless(file, text, "base", what))
}

fn unknown(name: &str) -> ParameterError {
    let known: Vec<&str> = names().collect();
    ParameterError::Unknown { name: name.to_owned(), known: known.join(", ") }
}

/// Puts `above` over `below`, key by key, so that a file names only what differs from its base.
fn overlay(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => overlay(old, new),
            (_, value) => {
                below.insert(key, value);
            }
        }
    }
}

impl Parameters {
    /// Of a system that came with the program.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn named(name: &str) -> Result<Self, ParameterError> {
        let text = built_in(name).filter(|_| !PARTIAL.contains(&name)).ok_or_else(|| unknown(name))?;
        Self::parse(name, text)
    }

    /// Of a parameter file's text; `file` is its name in errors.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub fn parse(file: &str, text: &str) -> Result<Self, ParameterError> {
        Self::from_table(file, text, table(file, text)?)
    }

    /// Of a table with all values in it; `text` is the file's own part of it, for the lines in errors.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub fn from_table(file: &str, text: &str, table: Table) -> Result<Self, ParameterError> {
        let parameters: Self = serde_path_to_error::deserialize(Value::Table(table)).map_err(|error| {
            let key = error.path().to_string();
            let what = error.inner().message().replace('\n', "; ").replace('`', "'");
            senseless(file, text, &key, what + remedy(&key))
        })?;
        let error = |(key, what): (&str, String)| senseless(file, text, key, what);
        parameters.check_ranges().map_err(error)?;
        parameters.check_together().map_err(error)?;
        Ok(parameters)
    }

    fn check_ranges(&self) -> Result<(), (&'static str, String)> {
        for (key, value, least, most) in self.counts().into_iter().chain(self.shares()).chain(self.times()) {
            if !(least..=most).contains(&value) {
                return Err((key, format!("{value} is out of range; choose {least} to {most}")));
            }
        }
        Ok(())
    }

    /// Counts and sizes with the range of each.
    fn counts(&self) -> Vec<(&'static str, f64, f64, f64)> {
        let (device, iommu, cache) = (&self.device, &self.iommu, &self.cache);
        vec![
            ("device.tags", device.tags.into(), 1.0, TAGS_MAX.into()),
            ("device.write_burst_bytes", device.write_burst_bytes.into(), 1.0, 8192.0),
            ("device.command_bytes_max", device.command_bytes_max.into(), 0.0, 4096.0),
            ("root_complex.combine_from_bytes", self.root_complex.combine_from_bytes.into(), 0.0, 8192.0),
            ("iommu.entries", iommu.entries.into(), 1.0, 65536.0),
            ("iommu.ways", iommu.ways.into(), 0.0, iommu.entries.into()),
            ("iommu.read_queue", iommu.read_queue.into(), 1.0, 65536.0),
            ("iommu.write_queue", iommu.write_queue.into(), 1.0, 65536.0),
            ("iommu.walkers", iommu.walkers.into(), 1.0, 256.0),
            ("cache.mib", cache.mib, 0.1, 4096.0),
            ("cache.ways", cache.ways.into(), 1.0, 64.0),
            ("cache.ddio_ways", cache.ddio_ways.into(), 0.0, cache.ways.into()),
            ("numa.sockets", self.numa.sockets.into(), 1.0, 16.0),
            ("wire.replay_buffer_bytes", self.wire.replay_buffer_bytes.into(), 5000.0, f64::from(1_u32 << 24)),
        ]
    }

    fn shares(&self) -> Vec<(&'static str, f64, f64, f64)> {
        vec![
            ("wire.up_dllp_share", self.wire.up_dllp_share, 0.0, 0.5),
            ("wire.down_dllp_share", self.wire.down_dllp_share, 0.0, 0.5),
            ("wire.bit_error_rate", self.wire.bit_error_rate, 0.0, 1e-5),
            ("device.bus_gbps", self.device.bus_gbps, 0.1, 1e5),
        ]
    }

    /// Times: none negative, none so long that its unit must be wrong.
    fn times(&self) -> Vec<(&'static str, f64, f64, f64)> {
        let (wire, device, root) = (&self.wire, &self.device, &self.root_complex);
        let times = [
            ("wire.latency_ns", wire.latency_ns),
            ("wire.acknowledge_ns", wire.acknowledge_ns),
            ("wire.replay_timer_ns", wire.replay_timer_ns),
            ("credits.update_ns", self.credits.update_ns),
            ("device.read_interval_ns", device.read_interval_ns),
            ("device.write_interval_ns", device.write_interval_ns),
            ("device.bus_transfer_ns", device.bus_transfer_ns),
            ("device.packet_gap_ns", device.packet_gap_ns),
            ("device.write_gap_ns", device.write_gap_ns),
            ("device.tag_ns", device.tag_ns),
            ("device.dma_done_ns", device.dma_done_ns),
            ("device.receive_byte_ns", device.receive_byte_ns),
            ("device.split_ns", device.split_ns),
            ("device.write_done_ns", device.write_done_ns),
            ("device.write_byte_ns", device.write_byte_ns),
            ("device.write_burst_ns", device.write_burst_ns),
            ("device.command_done_ns", device.command_done_ns),
            ("device.command_write_ns", device.command_write_ns),
            ("root_complex.read_ns", root.read_ns),
            ("root_complex.port_line_ns", root.port_line_ns),
            ("root_complex.line_interval_ns", root.line_interval_ns),
            ("root_complex.write_order_ns", root.write_order_ns),
            ("root_complex.conflict_ns", root.conflict_ns),
            ("root_complex.jitter_ns", root.jitter_ns),
            ("iommu.walk_ns", self.iommu.walk_ns),
            ("iommu.read_hold_ns", self.iommu.read_hold_ns),
            ("iommu.line_replay_ns", self.iommu.line_replay_ns),
            ("cache.snoop_ns", self.cache.snoop_ns),
            ("cache.fetch_ns", self.cache.fetch_ns),
            ("cache.dirty_eviction_ns", self.cache.dirty_eviction_ns),
            ("memory.latency_ns", self.memory.latency_ns),
            ("memory.line_ns", self.memory.line_ns),
            ("memory.refresh_ns", self.memory.refresh_ns),
            ("numa.hop_ns", self.numa.hop_ns),
            ("numa.conflict_ns", self.numa.conflict_ns),
        ];
        let mut checks: Vec<_> = times.map(|(key, value)| (key, value, 0.0, NS_MAX)).to_vec();
        checks.push(("device.timer_step_ns", device.timer_step_ns, 0.001, NS_MAX));
        checks.push(("memory.refresh_interval_ns", self.memory.refresh_interval_ns, 1.0, NS_MAX));
        checks
    }

    fn check_together(&self) -> Result<(), (&'static str, String)> {
        let (entries, ways) = (self.iommu.entries, self.iommu.ways);
        if ways > 0 && !entries.is_multiple_of(ways) {
            return Err(("iommu.ways", format!("{ways} do not divide iommu.entries = {entries}; change one")));
        }
        let least = least_data_credits(self.link.mps_bytes);
        for (key, credits) in
            [("credits.posted_data", self.credits.posted()), ("credits.completion_data", self.credits.completion())]
        {
            if credits.data != 0 && credits.data < least {
                return Err((key, format!("{} is less than one packet; choose {least} or more", credits.data)));
            }
        }
        match &self.tails {
            Some(tails) if !is_distribution(&tails.quantiles) => {
                let what = "no distribution; give pairs of share and nanoseconds that grow, from share 0 to share 1";
                Err(("tails.quantiles", what.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// Data credits that the largest packet needs, one more for a payload that begins inside a double word.
fn least_data_credits(mps: TransferLimit) -> u32 {
    mps.bytes() / DATA_CREDIT_BYTES + 1
}

fn is_distribution(quantiles: &[[f64; 2]]) -> bool {
    let grows = quantiles.windows(2).all(|pair| pair[0][0] < pair[1][0] && pair[0][1] <= pair[1][1]);
    let ends = (quantiles.first().map(|first| first[0]), quantiles.last().map(|last| last[0]));
    grows && ends == (Some(0.0), Some(1.0)) && quantiles.iter().all(|pair| (0.0..=NS_MAX).contains(&pair[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_comes_with_the_program_is_a_system() {
        for name in names() {
            let parameters = Parameters::named(name).unwrap();
            assert!(!parameters.description.is_empty() && parameters.base.is_none(), "{name}");
        }
        assert!(Parameters::named("bdw").unwrap().is_prediction && !Parameters::named("hsw").unwrap().is_prediction);
    }

    #[test]
    fn a_file_names_only_what_differs_from_its_base() {
        let hsw = Parameters::named("hsw").unwrap();
        let changed = Parameters::parse("mine.toml", "base = \"hsw\"\n[iommu]\nwalk_ns = 500\n").unwrap();
        assert_eq!(changed.iommu.walk_ns, 500.0);
        assert_eq!((changed.memory, changed.device), (hsw.memory, hsw.device));
    }

    #[test]
    fn what_is_wrong_is_said_with_file_line_key_and_remedy() {
        for (text, words) in [
            ("[iommu]\nwalk_us = 1", &["mine.toml", "line 3", "iommu.walk_us", "walk_ns", "end in _ns"][..]),
            ("[iommu]\nwalk_ns = \"1 us\"", &["line 3", "iommu.walk_ns", "1 us", "a number of nanoseconds"]),
            ("[cache]\nmib = \"15 MB\"", &["line 3", "cache.mib", "15 MB", "2^20 bytes"]),
            ("[iommu]\nwalk_ns = 1e12", &["line 3", "iommu.walk_ns", "out of range", "0 to 1000000000"]),
            ("[iommu]\nwalk_ns = nan", &["line 3", "iommu.walk_ns", "NaN"]),
            ("[iommu]\nways = 7", &["line 3", "iommu.ways", "7", "iommu.entries"]),
            ("[credits]\nposted_data = 3", &["line 3", "credits.posted_data", "17"]),
            ("[device]\ntags = 0", &["line 3", "device.tags", "1 to 1024"]),
            ("[link]\nmps_bytes = 300", &["line 3", "link.mps_bytes", "300", "power of two"]),
            ("[tails]\nquantiles = [[0.5, 1.0]]", &["line 3", "tails.quantiles", "share 0 to share 1"]),
            ("[nonsense]", &["line 2", "nonsense", "iommu"]),
            ("[iommu", &["line 2"]),
        ] {
            let error = Parameters::parse("mine.toml", &format!("base = \"hsw\"\n{text}\n")).unwrap_err().to_string();
            assert!(!error.contains('\n'), "{error}");
            for word in words {
                assert!(error.contains(word), "{word:?} in {error:?}");
            }
        }
        let error = Parameters::parse("mine.toml", "base = \"p4\"").unwrap_err().to_string();
        assert!(error.contains("p4") && error.contains("hsw"), "{error}");
        let error = Parameters::parse("mine.toml", "description = \"bare\"").unwrap_err().to_string();
        assert!(error.contains("missing field 'link'"), "{error}");
        assert!(Parameters::named("nfp-6000").is_err(), "a device alone is no system");
    }
}
