//! The paper's figures: the tests that each needs, and the plots of results.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use pcie::fit::{CalibrationTarget, Statistic, built_in};
use pcie::host::Interface;
use pcie::model::{CompletionSize, Mode, Model};
use pcie::result::{Latency, Outcome, PredictionNote, Provenance, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use pcie_bench::sweep::Grid;
use plot::{Axis, Color, Figure, Line, Marker, SERIES_MAX, Series, Style};
use units::size;

/// A figure of the paper (SIGCOMM 2018, sections 6.1 to 6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PaperFigure {
    /// Bandwidth by transfer size
    Bandwidth,
    /// Median latency by transfer size
    Latency,
    /// Distributions of latency, cold and warm
    Cdf,
    /// Latency by window, for each state of the caches
    Cache,
    /// Bandwidth by window, with and without the IOMMU
    Iommu,
    /// Bandwidth by window, local and remote memory
    Numa,
    /// Bandwidth by the transfer's offset in its cache line
    Offset,
}

/// Transfer sizes of the published bandwidth sweep: multiples of a cache line, and their neighbours.
const BANDWIDTH_SIZES: [u32; 40] = [
    16, 32, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 320, 384, 511, 512, 513, 576, 640, 704, 767, 768, 769, 832,
    896, 960, 1023, 1024, 1025, 1279, 1280, 1281, 1535, 1536, 1537, 1791, 1792, 1793, 2047, 2048,
];
/// Transfer sizes of the published latency sweep.
const LATENCY_SIZES: [u32; 15] = [4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 768, 1024, 1280, 1520, 2048];
/// Windows of the published window sweeps.
const WINDOWS: [u64; 13] = [
    4 << 10,
    16 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    3 << 19,
    2 << 20,
    3 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
    32 << 20,
    64 << 20,
];
const WINDOW_SIZES: [u32; 4] = [64, 128, 256, 512];
const OFFSETS: [u32; 15] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 25, 32, 41, 48, 63];
const SMALL_WINDOW: u64 = 8 << 10;

/// Shares of the samples at which the bars of a latency begin and end.
const LOW_SHARE: f64 = 0.05;
const HIGH_SHARE: f64 = 0.95;

/// Largest number of results of which each distribution is plotted.
const DISTRIBUTIONS_MAX: usize = 12;

impl PaperFigure {
    /// Returns the tests that the figure needs, with the devices, samples and seed of `common`.
    pub fn grid(self, common: Grid) -> Grid {
        let base = Grid {
            numas: vec![Numa::Local],
            iommus: vec![Iommu::Off],
            caches: vec![Cache::HostWarm],
            orders: vec![Order::Random],
            sizes_bytes: vec![64],
            windows_bytes: vec![SMALL_WINDOW],
            host_offsets_bytes: vec![0],
            device_offsets_bytes: vec![0],
            ..common
        };
        let latencies = vec![Kind::LatRd, Kind::LatWrrd];
        let by_window = Grid { sizes_bytes: WINDOW_SIZES.into(), windows_bytes: WINDOWS.into(), ..base.clone() };
        match self {
            Self::Bandwidth => {
                Grid { tests: vec![Kind::BwRd, Kind::BwWr, Kind::BwRdwr], sizes_bytes: BANDWIDTH_SIZES.into(), ..base }
            }
            Self::Latency => Grid { tests: latencies, sizes_bytes: LATENCY_SIZES.into(), ..base },
            Self::Cdf => Grid { tests: latencies, caches: vec![Cache::Cold, Cache::HostWarm], ..base },
            Self::Cache => Grid {
                tests: latencies,
                sizes_bytes: vec![8, 64],
                windows_bytes: WINDOWS.into(),
                caches: vec![Cache::Cold, Cache::HostWarm, Cache::DeviceWarm],
                ..base
            },
            Self::Iommu => {
                Grid { tests: vec![Kind::BwRd, Kind::BwWr], iommus: vec![Iommu::Off, Iommu::Pages4K], ..by_window }
            }
            Self::Numa => Grid { tests: vec![Kind::BwRd], numas: vec![Numa::Local, Numa::Remote], ..by_window },
            Self::Offset => Grid { tests: vec![Kind::BwRd, Kind::BwWr], host_offsets_bytes: OFFSETS.into(), ..base },
        }
    }
}

/// A result and the set it comes from.
#[derive(Clone, Copy, Debug)]
pub struct Labelled<'a> {
    /// Name of the set, empty for the only one.
    pub label: &'a str,
    /// The result.
    pub result: &'a TestResult,
}

impl<'a> Labelled<'a> {
    /// Returns the results of the only set.
    pub fn unlabelled(results: &'a [TestResult]) -> Vec<Self> {
        results.iter().map(|result| Self { label: "", result }).collect()
    }
}

/// Returns all plots of results, with their file names.
///
/// Each test gets a plot over the parameter with the most values, with a line for each combination of the others.
/// Latencies also get their distributions, and the share of samples above each latency on logarithmic axes. More lines
/// than a reader can tell apart become several plots.
pub fn plots(results: &[Labelled<'_>]) -> Vec<(String, Figure)> {
    let mut plots = Vec::new();
    for kind in Kind::ALL {
        let of_kind: Vec<Labelled<'_>> = results.iter().copied().filter(|one| one.result.test.test == kind).collect();
        let x = Parameter::most_varied(&of_kind);
        if let Some(x) = x {
            for (part, results) in parts(&of_kind, Some(x)) {
                plots.push((format!("{kind}-by-{}{part}", x.file_name()), by_parameter(kind, x, &results)));
            }
        }
        if x.is_none() || of_kind.len() <= DISTRIBUTIONS_MAX {
            for (part, results) in parts(&of_kind, None) {
                plots.extend(distributions(kind, &part, &results));
            }
        }
    }
    plots
}

/// Divides results so that no part has more lines than a plot can show; each part has the end of its file name. They
/// are divided by the parameter with the most values. Sources stay together, so that they can be compared.
fn parts<'a>(results: &[Labelled<'a>], x: Option<Parameter>) -> Vec<(String, Vec<Labelled<'a>>)> {
    let facts: Vec<Vec<String>> = results.iter().map(|one| facts(one, x)).collect();
    let lines = in_order(facts.iter());
    if lines.len() <= SERIES_MAX {
        return vec![(String::new(), results.to_vec())];
    }
    let values = |index: usize| in_order(facts.iter().map(|fact| &fact[index]));
    let by = (SOURCE_FACTS..facts[0].len()).rev().max_by_key(|index| values(*index).len());
    let with = |is_in: &dyn Fn(&Vec<String>) -> bool| -> Vec<Labelled<'a>> {
        results.iter().zip(&facts).filter(|(_, fact)| is_in(fact)).map(|(one, _)| *one).collect()
    };
    match by {
        Some(index) if values(index).len() > 1 => {
            let named = values(index).into_iter().flat_map(|value| {
                let part = with(&|fact| fact[index] == *value);
                parts(&part, x).into_iter().map(move |(name, part)| (format!("-{}{name}", file_word(value)), part))
            });
            named.collect()
        }
        // Only sources differ.
        _ => {
            let chunks = lines.chunks(SERIES_MAX).enumerate();
            chunks.map(|(number, chunk)| (format!("-{}", number + 1), with(&|fact| chunk.contains(&fact)))).collect()
        }
    }
}

/// Returns the distinct items in the order of their first occurrence.
fn in_order<'a, T: PartialEq>(items: impl Iterator<Item = &'a T>) -> Vec<&'a T> {
    let mut distinct = Vec::new();
    for item in items {
        if !distinct.contains(&item) {
            distinct.push(item);
        }
    }
    distinct
}

/// Returns a fact as a part of a file name.
fn file_word(fact: &str) -> String {
    let words: Vec<&str> = fact.split(|letter: char| !letter.is_ascii_alphanumeric()).collect();
    let words = words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-").to_lowercase();
    if words.is_empty() { "default".to_owned() } else { words }
}

/// A parameter that a horizontal axis can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parameter {
    Size,
    Window,
    HostOffset,
    DeviceOffset,
}

impl Parameter {
    const ALL: [Self; 4] = [Self::Size, Self::Window, Self::HostOffset, Self::DeviceOffset];

    fn of(self, test: &Test) -> u64 {
        match self {
            Self::Size => u64::from(test.size_bytes),
            Self::Window => test.window_bytes,
            Self::HostOffset => u64::from(test.host_offset_bytes),
            Self::DeviceOffset => u64::from(test.device_offset_bytes),
        }
    }

    fn set(self, test: &mut Test, value: u32) {
        match self {
            Self::Size => test.size_bytes = value,
            Self::Window => test.window_bytes = value.into(),
            Self::HostOffset => test.host_offset_bytes = value,
            Self::DeviceOffset => test.device_offset_bytes = value,
        }
    }

    /// Returns the parameter with the most values, the first of equals; `None` if no parameter varies.
    fn most_varied(results: &[Labelled<'_>]) -> Option<Self> {
        let values = |parameter: Self| {
            let mut values: Vec<u64> = results.iter().map(|one| parameter.of(&one.result.test)).collect();
            values.sort_unstable();
            values.dedup();
            values.len()
        };
        let most = Self::ALL.into_iter().rev().max_by_key(|parameter| values(*parameter))?;
        (values(most) > 1).then_some(most)
    }

    fn file_name(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Window => "window",
            Self::HostOffset => "host-offset",
            Self::DeviceOffset => "device-offset",
        }
    }

    fn axis(self, kind: Kind) -> Axis {
        match self {
            // The saw teeth of bandwidth are evenly spaced; latency sizes range from a few bytes to thousands.
            Self::Size if kind.is_latency() => Axis::Bytes("transfer size"),
            Self::Size => Axis::EvenBytes("transfer size (B)"),
            Self::Window => Axis::Bytes("window"),
            Self::HostOffset => Axis::EvenBytes("offset of the transfer in its cache line (B)"),
            Self::DeviceOffset => Axis::EvenBytes("offset of the device's buffer in its line (B)"),
        }
    }
}

fn title_of(kind: Kind) -> &'static str {
    match kind {
        Kind::LatRd => "Latency of reads",
        Kind::LatWrrd => "Latency of a write followed by a read",
        Kind::BwRd => "Bandwidth of reads",
        Kind::BwWr => "Bandwidth of writes",
        Kind::BwRdwr => "Bandwidth of reads and writes, each direction",
    }
}

/// Returns a figure over parameter `x` with a line for each combination of the other parameters.
fn by_parameter(kind: Kind, x: Parameter, results: &[Labelled<'_>]) -> Figure {
    let lines = Lines::of(results, Some(x), |one| {
        let y = match &one.result.outcome {
            Outcome::Latency(latency) => latency.p50_ns,
            Outcome::Bandwidth(bandwidth) => bandwidth.gbps,
        };
        let x = x.of(&one.result.test) as f64;
        let spread = quantile(cdf(one), LOW_SHARE).zip(quantile(cdf(one), HIGH_SHARE));
        (vec![(x, y)], spread.map(|(low, high)| (x, low, high)).into_iter().collect())
    });
    let (y, mut notes) = if kind.is_latency() {
        (Axis::Linear("median latency (ns)"), vec!["Bars: 5th to 95th percentile.".to_owned()])
    } else {
        (Axis::Linear("bandwidth (Gb/s)"), Vec::new())
    };
    let mut series = lines.series;
    if x == Parameter::Size && !kind.is_latency() {
        series.extend(upper_bound(kind, results));
    }
    series.extend(published_points(kind, x, results));
    notes.extend(prediction_notes(results));
    Figure { title: format!("{}{}", title_of(kind), lines.common), x: x.axis(kind), y, series, notes }
}

/// Returns a line for each predicted device: the stated errors of its figures, and what the prediction rests on.
fn prediction_notes(results: &[Labelled<'_>]) -> Vec<String> {
    let mut devices: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for TestResult { device, prediction, .. } in results.iter().map(|one| one.result) {
        let Some(PredictionNote { rests_on, error_percent }) = prediction else { continue };
        let error = error_percent.map_or("error unknown".to_owned(), |percent| format!("+-{percent:.0}%"));
        match devices.iter_mut().find(|(name, on, _)| (*name, *on) == (device, rests_on)) {
            Some((.., errors)) if errors.contains(&error) => {}
            Some((.., errors)) => errors.push(error),
            None => devices.push((device, rests_on, vec![error])),
        }
    }
    let line = |(device, rests_on, errors): (&str, &str, Vec<String>)| {
        format!("Prediction {device}, {}; it rests on {rests_on}.", errors.join(" or "))
    };
    devices.into_iter().map(line).collect()
}

/// Returns the published figures of each calibrated host among the results: those of tests that differ from a simulated
/// one in parameter `x` at most. None if the published results themselves are there.
fn published_points(kind: Kind, x: Parameter, results: &[Labelled<'_>]) -> Vec<Series> {
    if results.iter().any(|one| one.result.provenance == Provenance::Published) {
        return Vec::new();
    }
    let without_x = |test: &Test| {
        let mut test = Test { samples: 0, seed: 0, ..test.clone() };
        x.set(&mut test, 0);
        test
    };
    let statistic = if kind.is_latency() { Statistic::MedianNs } else { Statistic::Gbps };
    let devices: BTreeSet<&str> = results.iter().map(|one| one.result.device.as_str()).collect();
    let series = devices.into_iter().filter_map(|device| {
        let system = device.strip_prefix("sim:")?;
        let tests = results.iter().filter(|one| one.result.device == device);
        let tests: Vec<Test> = tests.map(|one| without_x(&one.result.test)).collect();
        let is_shown = |target: &CalibrationTarget| {
            let is_of_kind = target.statistic == statistic && target.interface == Interface::Dma;
            is_of_kind && tests.contains(&without_x(&target.test))
        };
        let targets = built_in(system).ok()?.into_iter().filter(is_shown);
        let points: Vec<(f64, f64)> = targets.map(|target| (x.of(&target.test) as f64, target.value)).collect();
        let style = Style { color: Color::Black, line: Line::None, marker: Marker::Circle, wide: false };
        (!points.is_empty()).then(|| Series::new(format!("published, {system}"), style, points))
    });
    series.collect()
}

/// Returns the upper bound of the protocol, from the model of the specification, if all results have the same link.
fn upper_bound(kind: Kind, results: &[Labelled<'_>]) -> Option<Series> {
    let link = results.first()?.result.link?;
    if results.iter().any(|one| one.result.link != Some(link)) {
        return None;
    }
    let model = Model::new(Mode::Corrected, link, CompletionSize::Mps).ok()?;
    let sizes = || results.iter().map(|one| u64::from(one.result.test.size_bytes));
    let gbps = |bytes: u64| {
        let bandwidth = model.bandwidth(bytes, 0).ok()?;
        Some(match kind {
            Kind::BwWr => bandwidth.write_gbps,
            Kind::BwRdwr => bandwidth.readwrite_gbps,
            _ => bandwidth.read_gbps,
        })
    };
    // Only whole double words: sizes in between need padding, and the resulting zigzag would look like a thick line.
    let whole = (sizes().min()?..=sizes().max()?).filter(|bytes| bytes.is_multiple_of(4));
    let points = whole.filter_map(|bytes| Some((bytes as f64, gbps(bytes)?))).collect();
    let style = Style { color: Color::Black, line: Line::Solid, marker: Marker::None, wide: false };
    Some(Series::new("upper bound (protocol)", style, points))
}

/// Returns two plots: the share of samples at or below each latency, and the share above it.
fn distributions(kind: Kind, part: &str, results: &[Labelled<'_>]) -> Vec<(String, Figure)> {
    let known: Vec<Labelled<'_>> = results.iter().copied().filter(|one| !cdf(one).is_empty()).collect();
    if known.is_empty() {
        return Vec::new();
    }
    let x = Axis::Decades("latency (ns)");
    let below = Lines::of(&known, None, |one| {
        let at_or_below = |(ns, share): (f64, f64)| (ns, (1.0 - share) * 100.0);
        let end = cdf(one).last().map(|(ns, share)| (*ns, share * 100.0));
        (above(cdf(one)).into_iter().map(at_or_below).chain(end).collect(), Vec::new())
    });
    let above = Lines::of(&known, None, |one| (above(cdf(one)), Vec::new()));
    let title = format!("{}{}", title_of(kind), below.common);
    let (shares, notes) = (Axis::Percent("samples at or below (%)"), prediction_notes(&known));
    vec![
        (
            format!("{kind}-cdf{part}"),
            Figure { title: title.clone(), x, y: shares, series: below.series, notes: notes.clone() },
        ),
        (
            format!("{kind}-above{part}"),
            Figure { title, x, y: Axis::Decades("share of samples above"), series: above.series, notes },
        ),
    ]
}

/// Returns the smallest latency that at least this share of the samples does not exceed.
fn quantile(cdf: &[(f64, f64)], share: f64) -> Option<f64> {
    cdf.iter().find(|(_, at_or_below)| *at_or_below >= share).map(|(ns, _)| *ns)
}

fn cdf<'a>(one: &Labelled<'a>) -> &'a [(f64, f64)] {
    match &one.result.outcome {
        Outcome::Latency(Latency { cdf, .. }) => cdf,
        Outcome::Bandwidth(_) => &[],
    }
}

/// Returns the share of samples above each latency as a step function.
fn above(cdf: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut share_above = 1.0;
    let mut points = Vec::new();
    for (ns, share) in cdf {
        points.push((*ns, share_above));
        share_above = 1.0 - share;
        // No sample is above the largest; a tiny remainder is a rounding error.
        if share_above > 1e-12 {
            points.push((*ns, share_above));
        }
    }
    points
}

/// Points, and their spread, as in [`Series`].
type Drawn = (Vec<(f64, f64)>, Vec<(f64, f64, f64)>);

/// Results grouped into lines, each titled with what distinguishes it, and the facts that all of them share.
struct Lines {
    series: Vec<Series>,
    common: String,
}

impl Lines {
    /// Groups results; `drawn` returns the points of a result and their spread.
    fn of(results: &[Labelled<'_>], x: Option<Parameter>, drawn: impl Fn(&Labelled<'_>) -> Drawn) -> Self {
        let facts: Vec<Vec<String>> = results.iter().map(|one| facts(one, x)).collect();
        let varies = |index: usize| facts.iter().any(|fact| fact[index] != facts[0][index]);
        let count = facts.first().map_or(0, Vec::len);
        let (varying, fixed): (Vec<usize>, Vec<usize>) = (0..count).partition(|index| varies(*index));
        let words = |fact: &[String], which: &[usize]| {
            let words: Vec<&str> =
                which.iter().map(|index| fact[*index].as_str()).filter(|word| !word.is_empty()).collect();
            words.join(", ")
        };
        // In a plot with modelled and measured results, colour shows the parameters and line or points the provenance.
        let is_overlay = results.iter().any(|one| is_modelled(one) != is_modelled(&results[0]));
        let mut lines: Vec<Group> = Vec::new();
        let mut colors = BTreeMap::new();
        for (one, fact) in results.iter().zip(&facts) {
            let title = words(fact, &varying);
            let found = lines.iter().position(|line| line.title == title);
            let index = found.unwrap_or_else(|| {
                let sourceless: Vec<usize> = varying.iter().copied().filter(|index| *index >= SOURCE_FACTS).collect();
                let key = if is_overlay {
                    // Two sources of the same provenance need different colours to be distinguishable.
                    let is_alike = |(other, _): &(&Labelled<'_>, _)| is_modelled(other) == is_modelled(one);
                    let sources = results.iter().zip(&facts).filter(is_alike).map(|(_, fact)| &fact[..SOURCE_FACTS]);
                    (words(fact, &sourceless), rank(sources, &fact[..SOURCE_FACTS]))
                } else {
                    (title.clone(), 0)
                };
                let next = colors.len();
                let style = Style::of_index(*colors.entry(key).or_insert(next));
                let style = match (is_overlay, is_modelled(one)) {
                    (false, _) => style,
                    (true, true) if x.is_some() => Style { marker: Marker::None, ..style },
                    (true, false) if x.is_some() => style.points_only(),
                    (true, true) => style,
                    (true, false) => Style { line: Line::Dashed, ..style },
                };
                lines.push(Group { title, style, points: Vec::new(), spread: Vec::new() });
                lines.len() - 1
            });
            let (points, spread) = drawn(one);
            lines[index].points.extend(points);
            lines[index].spread.extend(spread);
        }
        if let [only] = &mut lines[..] {
            only.title = device(results[0].result);
        }
        let common = facts.first().map(|fact| words(fact, &fixed)).unwrap_or_default();
        let common = if common.is_empty() { common } else { format!("\n{common}") };
        Self { series: lines.into_iter().map(|line| line.series(x.is_some())).collect(), common }
    }
}

struct Group {
    title: String,
    style: Style,
    points: Vec<(f64, f64)>,
    spread: Vec<(f64, f64, f64)>,
}

impl Group {
    fn series(mut self, sorted: bool) -> Series {
        if sorted {
            self.points.sort_by(|one, other| one.0.total_cmp(&other.0));
        }
        Series::new(self.title, self.style, self.points).with_spread(self.spread)
    }
}

fn is_modelled(one: &Labelled<'_>) -> bool {
    one.result.provenance == Provenance::Modelled
}

/// Returns the number of distinct items before the first occurrence of `wanted`.
fn rank<'a>(all: impl Iterator<Item = &'a [String]>, wanted: &[String]) -> usize {
    let before: BTreeSet<&[String]> = all.take_while(|one| *one != wanted).collect();
    before.len()
}

/// Number of [`facts`] that identify the source of a result. They come first.
const SOURCE_FACTS: usize = 2;

/// Returns the device, marked if its figures are predictions.
fn device(result: &TestResult) -> String {
    let mark = if result.prediction.is_some() { " (prediction)" } else { "" };
    format!("{}{mark}", result.device)
}

/// Returns the source and the parameters of a result as text, except the parameter on the axis. Defaults are empty.
fn facts(one: &Labelled<'_>, x: Option<Parameter>) -> Vec<String> {
    let test = &one.result.test;
    let unless = |parameter: Parameter, text: String| if x == Some(parameter) { String::new() } else { text };
    let offset = |bytes: u32, of: &str| if bytes == 0 { String::new() } else { format!("{of} offset {bytes} B") };
    let word = |is: bool, word: &str| if is { word.to_owned() } else { String::new() };
    vec![
        one.label.to_owned(),
        device(one.result),
        unless(Parameter::Size, size(u64::from(test.size_bytes))),
        unless(Parameter::Window, format!("{} window", size(test.window_bytes))),
        unless(Parameter::HostOffset, offset(test.host_offset_bytes, "host")),
        unless(Parameter::DeviceOffset, offset(test.device_offset_bytes, "device")),
        test.cache.name().to_owned(),
        if test.iommu == Iommu::Off { String::new() } else { format!("IOMMU {}", test.iommu.name()) },
        word(test.numa == Numa::Remote, "remote"),
        word(test.order == Order::Sequential, "sequential"),
    ]
}

#[cfg(test)]
mod tests;
