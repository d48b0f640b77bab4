//! The parameters of a system, read from a TOML file in which each key ends with its unit and each value states its
//! source.

use config::ConfigError;
use serde::Deserialize;
use thiserror::Error;
use toml::{Table, Value};

pub use self::change::{Change, apply};
use super::prediction::Prediction;
use crate::NS_MAX;
use crate::link::{Link, TransferLimit};
use crate::tlp::{Credits, DATA_CREDIT_BYTES};

mod change;

/// The built-in parameter files: name and text. The key `base` of a file names one of these.
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

/// Files that describe no system and only serve as a base.
const PARTIAL: [&str; 2] = ["nfp-6000", "nic-gen4"];
/// Largest error that a prediction may state: from 100% on, it states nothing.
const ERROR_PERCENT_MAX: f64 = 99.0;
/// Longest chain of bases.
const BASES_MAX: usize = 8;
/// Largest number of tags of a device: a tag has ten bits.
const TAGS_MAX: u32 = 1024;
/// Largest number of tags in flit mode: 14 bits, of which the first 1024 values are not used.
const FLIT_TAGS_MAX: u32 = 15_360;

/// Why a parameter file describes no system.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParameterError {
    /// The name is not one of the built-in systems.
    #[error("system '{name}' is not known; choose {known}, or give a parameter file")]
    Unknown {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },
    /// The file is not TOML, or has an invalid key or value.
    #[error(transparent)]
    File(#[from] ConfigError),
}

/// The parameters of a system.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// The built-in system on which this file is based; it is merged before the other keys are read.
    #[serde(default)]
    pub base: Option<String>,
    /// Description of processor, chipset and device.
    pub description: String,
    /// What a prediction rests on; absent for a system whose parameters come from figures measured on it.
    #[serde(default)]
    pub prediction: Option<Prediction>,
    /// Generation, width and limits of the link.
    pub link: Link,
    /// Properties of the endpoints of the link.
    pub wire: WireParameters,
    /// Credits that the root complex and the device advertise.
    pub credits: CreditParameters,
    /// The device.
    pub device: DeviceParameters,
    /// The endpoint of the link in the host.
    pub root_complex: RootComplexParameters,
    /// Address translation.
    pub iommu: IommuParameters,
    /// The last-level cache of the device's socket.
    pub cache: CacheParameters,
    /// Main memory.
    pub memory: MemoryParameters,
    /// The sockets of the host.
    pub numa: NumaParameters,
    /// Latency of DMA reads that no modelled part explains.
    #[serde(default)]
    pub tails: Option<TailParameters>,
}

/// Properties of the endpoints of the link.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireParameters {
    /// Share of the bytes from the device that are link layer packets and skip symbols, at least what the specification
    /// makes them take. Without effect in flit mode, which has its own.
    pub up_dllp_share: f64,
    /// Share of the bytes from the host.
    pub down_dllp_share: f64,
    /// Time from the last bit sent to the last bit delivered, one way.
    pub latency_ns: f64,
    /// Time from the arrival of a packet to the departure of its Ack.
    pub acknowledge_ns: f64,
    /// Time that a sender waits for an Ack before it retransmits.
    pub replay_timer_ns: f64,
    /// Bytes that may be unacknowledged.
    pub replay_buffer_bytes: u32,
    /// Probability of a bit error.
    pub bit_error_rate: f64,
}

/// Credits of the three classes; 0 means infinite.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreditParameters {
    /// Writes that the host's queue holds.
    pub posted_headers: u32,
    /// Data of these packets, in units of 16 bytes.
    pub posted_data: u32,
    /// Read requests that the host's queue holds.
    pub non_posted_headers: u32,
    /// Data of non-posted requests, in units of 16 bytes.
    pub non_posted_data: u32,
    /// Completions that the device holds.
    pub completion_headers: u32,
    /// Data of these packets, in units of 16 bytes.
    pub completion_data: u32,
    /// Time from free space in the queue until the sender has its credits.
    pub update_ns: f64,
}

/// The device under test: DMA engines for transfers, commands for small ones.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceParameters {
    /// Read requests that may be outstanding.
    pub tags: u32,
    /// Entries of the device's own TLB, which it fills by Address Translation Services; 0: it has none, and the IOMMU
    /// translates its requests.
    #[serde(default)]
    pub tlb_entries: u32,
    /// Transfers of a bandwidth test whose addresses the device translates ahead.
    #[serde(default = "tlb_transfers_ahead")]
    pub tlb_transfers_ahead: u32,
    /// Whether writes have the attribute for relaxed ordering.
    #[serde(default = "relaxed_ordering")]
    pub relaxed_ordering: bool,
    /// Resolution of the timer.
    pub timer_step_ns: f64,
    /// Shortest time between the starts of two reads.
    pub read_interval_ns: f64,
    /// Shortest time between the starts of two writes.
    pub write_interval_ns: f64,
    /// Time that a transfer in either direction occupies the shared bus, without its bytes.
    pub bus_transfer_ns: f64,
    /// Rate of that bus, in 10^9 bits a second.
    pub bus_gbps: f64,
    /// Time between two packets of a write.
    pub packet_gap_ns: f64,
    /// Time between the last packet of a write and the first of the next.
    pub write_gap_ns: f64,
    /// Time from the last completion until the tag of a read is free.
    pub tag_ns: f64,
    /// Time from there until the program detects the completion.
    pub dma_done_ns: f64,
    /// Latency of moving a byte from the link's buffer to the program.
    pub receive_byte_ns: f64,
    /// Additional latency of a read of more than one line.
    pub split_ns: f64,
    /// Time from the last packet of a DMA write to the read that follows it, without its bytes.
    pub write_done_ns: f64,
    /// Time that each byte of a DMA write adds to that.
    pub write_byte_ns: f64,
    /// Bytes of a burst of a DMA write.
    pub write_burst_bytes: u32,
    /// Additional latency of each burst after the first.
    pub write_burst_ns: f64,
    /// Largest transfer of a latency test that is made by command, as published; larger ones use DMA.
    pub command_bytes_max: u32,
    /// Time from the last completion of a command until the program detects it.
    pub command_done_ns: f64,
    /// Time from the write of a command to the read that follows it.
    pub command_write_ns: f64,
}

/// The endpoint of the link in the host.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootComplexParameters {
    /// Time from the arrival of a read until a line in the cache that a device wrote is available.
    pub read_ns: f64,
    /// Time that a line of a read occupies the port to cache and memory, behind which page table walks wait.
    pub port_line_ns: f64,
    /// Time between the data of successive lines of a read.
    pub line_interval_ns: f64,
    /// Time from the arrival of a write until a read behind it may continue.
    pub write_order_ns: f64,
    /// Time from the translation of a write until it has reached cache or memory, for which it keeps its credits.
    #[serde(default)]
    pub write_commit_ns: f64,
    /// Rate of writes without the attribute for relaxed ordering, in 10^9 bits a second: each line waits for the one
    /// before it.
    pub strict_write_gbps: Option<f64>,
    /// Additional wait of a read while an earlier read of the same line, which no device wrote, is incomplete.
    pub conflict_ns: f64,
    /// Width of the uniform distribution that is added to latencies.
    pub jitter_ns: f64,
    /// Smallest request whose lines share completions of up to MPS while they wait for the link. Each line of a shorter
    /// request has its own completion, up to a read completion boundary.
    pub combine_from_bytes: u32,
}

/// Address translation.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuParameters {
    /// Number of translations in the IOTLB.
    pub entries: u32,
    /// Ways of a set; 0 means fully associative.
    pub ways: u32,
    /// Replacement policy of the IOTLB: `random`, or `lru` (least recently used).
    pub replacement: Replacement,
    /// Number of reads under consideration at once.
    pub read_queue: u32,
    /// Number of writes under consideration at once.
    pub write_queue: u32,
    /// Number of concurrent page table walks.
    pub walkers: u32,
    /// Duration of a walk.
    pub walk_ns: f64,
    /// Time for which a read keeps its walker after the walk.
    pub read_hold_ns: f64,
    /// Additional time for each of its lines.
    pub line_replay_ns: f64,
    /// Whether requests leave in the order of arrival.
    pub in_order: bool,
}

/// A replacement policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// A random entry.
    Random,
    /// The least recently used entry.
    Lru,
}

/// The last-level cache.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheParameters {
    /// Size, in units of 2^20 bytes.
    pub mib: f64,
    /// Ways of a set.
    pub ways: u32,
    /// Ways in which the writes of a device allocate.
    pub ddio_ways: u32,
    /// Additional time of a line that the CPU wrote, compared with one that a device wrote.
    pub snoop_ns: f64,
    /// Additional time of a partial write of a line that is not in the cache: the rest is fetched.
    pub fetch_ns: f64,
    /// Additional time of a write that evicts another line.
    pub dirty_eviction_ns: f64,
}

/// Main memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryParameters {
    /// Additional latency of a line from memory, compared with one from the cache.
    pub latency_ns: f64,
    /// Time between two lines at full rate, for one device.
    pub line_ns: f64,
    /// Time between two refreshes (tREFI).
    pub refresh_interval_ns: f64,
    /// Duration of a refresh (tRFC).
    pub refresh_ns: f64,
}

/// The sockets of the host.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaParameters {
    /// Number of sockets.
    pub sockets: u32,
    /// Additional latency of memory of another socket.
    pub hop_ns: f64,
    /// `root_complex.conflict_ns` for lines of that memory.
    pub conflict_ns: f64,
    /// Rate at which lines of that memory cross between sockets, reads and writes together, in 10^9 bits a second.
    pub link_gbps: Option<f64>,
}

/// Latency that no modelled part explains, by its quantiles.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TailParameters {
    /// Pairs of a share of requests, from 0 to 1, and the longest wait of these, in nanoseconds.
    pub quantiles: Vec<[f64; 2]>,
}

impl CreditParameters {
    /// Returns the credits of writes.
    pub fn posted(&self) -> Credits {
        Credits { header: self.posted_headers, data: self.posted_data }
    }

    /// Returns the credits of read requests.
    pub fn non_posted(&self) -> Credits {
        Credits { header: self.non_posted_headers, data: self.non_posted_data }
    }

    /// Returns the credits of completions.
    pub fn completion(&self) -> Credits {
        Credits { header: self.completion_headers, data: self.completion_data }
    }
}

/// Returns the names of the systems that can be run, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).filter(|name| !PARTIAL.contains(name))
}

/// Returns the text of the built-in file of this name.
pub fn built_in(name: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Returns the error of a file's `key`, such as `iommu.walk_ns`, with the line if the file itself has the key.
fn invalid(file: &str, text: &str, key: &str, what: String) -> ParameterError {
    let line = line_of(text, key).map(|line| format!("line {line}, "));
    // The file as a whole has no key.
    let location = if key == "." { "line 1".to_owned() } else { line.unwrap_or_default() + key };
    ConfigError::Invalid { file: file.to_owned(), location, what }.into()
}

/// Returns the remedy for a value of the wrong kind, from the unit at the end of the key.
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

/// Returns the line in which a file sets `section.key`, or in which the section `key` begins.
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

/// Returns the table of a file, merged with its bases.
///
/// # Errors
/// The file or a base is not TOML, or a base is unknown.
pub fn table(file: &str, text: &str) -> Result<Table, ParameterError> {
    let mut merged: Table = config::parse(file, text)?;
    for _ in 0..BASES_MAX {
        let base = match merged.remove("base") {
            Some(Value::String(base)) => base,
            Some(other) => {
                let what = format!("{} is not a name; write that of a system as in base = \"hsw\"", other.type_str());
                return Err(invalid(file, text, "base", what));
            }
            None => return Ok(merged),
        };
        let Some(base_text) = built_in(&base) else { return Err(unknown(&base)) };
        let mut lower: Table = config::parse(&base, base_text)?;
        overlay(&mut lower, merged);
        merged = lower;
    }
    let what = format!("the chain of bases is longer than {BASES_MAX} files; shorten it");
    Err(invalid(file, text, "base", what))
}

/// Returns a section of the text of a file itself; a base of it does not count.
pub fn own_section(text: &str, section: &str) -> Option<Value> {
    text.parse::<Table>().ok()?.remove(section)
}

fn unknown(name: &str) -> ParameterError {
    let known: Vec<&str> = names().collect();
    ParameterError::Unknown { name: name.to_owned(), known: known.join(", ") }
}

/// Overlays `lower` with `upper` key by key, so that a file names only what differs from its base. What a prediction
/// states is that of one file.
fn overlay(lower: &mut Table, upper: Table) {
    for (key, value) in upper {
        match (lower.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) if key != "prediction" => overlay(old, new),
            (_, value) => {
                lower.insert(key, value);
            }
        }
    }
}

impl Parameters {
    /// Returns the parameters of a built-in system.
    ///
    /// # Errors
    /// There is no system of this name.
    pub fn named(name: &str) -> Result<Self, ParameterError> {
        let text = built_in(name).filter(|_| !PARTIAL.contains(&name)).ok_or_else(|| unknown(name))?;
        Self::parse(name, text)
    }

    /// Returns the parameters in the text of a parameter file; `file` is its name in errors.
    ///
    /// # Errors
    /// The parameters are invalid; the error has one line.
    pub fn parse(file: &str, text: &str) -> Result<Self, ParameterError> {
        Self::from_table(file, text, table(file, text)?)
    }

    /// Returns the parameters in a merged table; `text` is the file's own part of it, which gives the line numbers in
    /// errors.
    ///
    /// # Errors
    /// The parameters are invalid; the error has one line.
    pub fn from_table(file: &str, text: &str, table: Table) -> Result<Self, ParameterError> {
        let parameters: Self = serde_path_to_error::deserialize(Value::Table(table)).map_err(|error| {
            let key = error.path().to_string();
            let what = error.inner().message().replace('\n', "; ").replace('`', "'");
            let what = what.replace("expected u32", "expected a whole number from 0 to 4294967295");
            let what = what.replace("expected f64", "expected a number");
            invalid(file, text, &key, what + remedy(&key))
        })?;
        let error = |(key, what): (&str, String)| invalid(file, text, key, what);
        parameters.check_texts().map_err(error)?;
        parameters.check_ranges().map_err(error)?;
        parameters.check_together().map_err(error)?;
        Ok(parameters)
    }

    /// Checks the texts, which results contain in a line.
    fn check_texts(&self) -> Result<(), (&'static str, String)> {
        let rests_on = self.prediction.as_ref().map(|prediction| ("prediction.rests_on", &prediction.rests_on));
        for (key, text) in [("description", &self.description)].into_iter().chain(rests_on) {
            if text.trim().is_empty() || text.contains(char::is_control) {
                return Err((key, "is empty or longer than a line; write one line of text".to_owned()));
            }
        }
        Ok(())
    }

    fn check_ranges(&self) -> Result<(), (&'static str, String)> {
        let errors = self.prediction.iter().flat_map(Prediction::errors_percent);
        let errors = errors.map(|(key, value)| (key, value, 0.0, ERROR_PERCENT_MAX));
        for (key, value, min, max) in self.counts().into_iter().chain(self.shares()).chain(self.times()).chain(errors) {
            if !(min..=max).contains(&value) {
                return Err((key, format!("{value} is out of range; choose {min} to {max}")));
            }
        }
        Ok(())
    }

    /// Returns counts and sizes with the range of each.
    fn counts(&self) -> Vec<(&'static str, f64, f64, f64)> {
        let (device, iommu, cache) = (&self.device, &self.iommu, &self.cache);
        let tags_max = if self.link.generation.is_flit_mode() { FLIT_TAGS_MAX } else { TAGS_MAX };
        vec![
            ("device.tags", device.tags.into(), 1.0, tags_max.into()),
            ("device.tlb_entries", device.tlb_entries.into(), 0.0, 65536.0),
            ("device.tlb_transfers_ahead", device.tlb_transfers_ahead.into(), 1.0, 65536.0),
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
        let optional = [
            ("root_complex.strict_write_gbps", self.root_complex.strict_write_gbps),
            ("numa.link_gbps", self.numa.link_gbps),
        ];
        let optional = optional.into_iter().filter_map(|(key, gbps)| Some((key, gbps?, 0.1, 1e5)));
        let required = [
            ("wire.up_dllp_share", self.wire.up_dllp_share, 0.0, 0.5),
            ("wire.down_dllp_share", self.wire.down_dllp_share, 0.0, 0.5),
            ("wire.bit_error_rate", self.wire.bit_error_rate, 0.0, 1e-5),
            ("device.bus_gbps", self.device.bus_gbps, 0.1, 1e5),
        ];
        required.into_iter().chain(optional).collect()
    }

    /// Returns times with the range of each, which excludes negative ones and those that indicate a wrong unit.
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
            ("root_complex.write_commit_ns", root.write_commit_ns),
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
        let min = data_credits_min(self.link.mps_bytes);
        for (key, credits) in
            [("credits.posted_data", self.credits.posted()), ("credits.completion_data", self.credits.completion())]
        {
            if credits.data != 0 && credits.data < min {
                return Err((key, format!("{} is less than one packet; choose {min} or more", credits.data)));
            }
        }
        if !self.device.relaxed_ordering && self.root_complex.strict_write_gbps.is_none() {
            let what = "false has no effect without root_complex.strict_write_gbps; give both";
            return Err(("device.relaxed_ordering", what.to_owned()));
        }
        let (refresh_ns, interval_ns) = (self.memory.refresh_ns, self.memory.refresh_interval_ns);
        if refresh_ns >= interval_ns {
            let what = format!("{refresh_ns} leaves no time between refreshes; choose less than {interval_ns}");
            return Err(("memory.refresh_ns", what));
        }
        match &self.tails {
            Some(tails) if !is_distribution(&tails.quantiles) => {
                let what = "not a distribution; give ascending pairs of share and nanoseconds, from share 0 to share 1";
                Err(("tails.quantiles", what.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// Enough to hide a round trip to the IOMMU at the rates of current links (assumed).
fn tlb_transfers_ahead() -> u32 {
    64
}

/// Drivers of current NICs set the attribute where the host allows it (mlx5 of Linux: commits 17347d5430c4 and
/// 1477d44ce47d).
fn relaxed_ordering() -> bool {
    true
}

/// Returns the data credits that the largest packet needs, with one more for a payload that begins inside a double
/// word.
fn data_credits_min(mps: TransferLimit) -> u32 {
    mps.bytes() / DATA_CREDIT_BYTES + 1
}

fn is_distribution(quantiles: &[[f64; 2]]) -> bool {
    let grows = quantiles.windows(2).all(|pair| pair[0][0] < pair[1][0] && pair[0][1] <= pair[1][1]);
    let shares = (quantiles.first().map(|first| first[0]), quantiles.last().map(|last| last[0]));
    grows && shares == (Some(0.0), Some(1.0)) && quantiles.iter().all(|pair| (0.0..=NS_MAX).contains(&pair[1]))
}

#[cfg(test)]
mod tests;
