//! The paper's figures: the tests that each needs, and the plots of results.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use pcie::model::{CompletionSize, Mode, Model};
use pcie::result::{Latency, Outcome, Provenance, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use pcie_bench::sweep::Grid;
use plot::{Axis, Color, Figure, Line, Marker, Series, Style};
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

/// Maximum number of distributions in one plot.
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
/// Latencies also get their distributions, and the share of samples above each latency on logarithmic axes.
pub fn plots(results: &[Labelled<'_>]) -> Vec<(String, Figure)> {
    let mut plots = Vec::new();
    for kind in Kind::ALL {
        let of_kind: Vec<Labelled<'_>> = results.iter().copied().filter(|one| one.result.test.test == kind).collect();
        let Some(x) = Parameter::most_varied(&of_kind) else {
            plots.extend(distributions(kind, &of_kind));
            continue;
        };
        plots.push((format!("{kind}-by-{}", x.file_name()), by_parameter(kind, x, &of_kind)));
        if of_kind.len() <= DISTRIBUTIONS_MAX {
            plots.extend(distributions(kind, &of_kind));
        }
    }
    plots
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
        vec![(x.of(&one.result.test) as f64, y)]
    });
    let (y, what) = if kind.is_latency() {
        (Axis::Linear("median latency (ns)"), ", median")
    } else {
        (Axis::Linear("bandwidth (Gb/s)"), "")
    };
    let mut series = lines.series;
    if x == Parameter::Size && !kind.is_latency() {
        series.extend(upper_bound(kind, results));
    }
    Figure { title: format!("{}{what}{}", title_of(kind), lines.common), x: x.axis(kind), y, series }
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
    Some(Series { title: "upper bound (protocol)".to_owned(), style, points })
}

/// Returns two plots: the share of samples at or below each latency, and the share above it.
fn distributions(kind: Kind, results: &[Labelled<'_>]) -> Vec<(String, Figure)> {
    let known: Vec<Labelled<'_>> = results.iter().copied().filter(|one| !cdf(one).is_empty()).collect();
    if known.is_empty() {
        return Vec::new();
    }
    let x = Axis::Decades("latency (ns)");
    let below = Lines::of(&known, None, |one| {
        let at_or_below = |(ns, share): (f64, f64)| (ns, (1.0 - share) * 100.0);
        let end = cdf(one).last().map(|(ns, share)| (*ns, share * 100.0));
        above(cdf(one)).into_iter().map(at_or_below).chain(end).collect()
    });
    let above = Lines::of(&known, None, |one| above(cdf(one)));
    let title = format!("{}{}", title_of(kind), below.common);
    let shares = Axis::Percent("samples at or below (%)");
    vec![
        (format!("{kind}-cdf"), Figure { title: title.clone(), x, y: shares, series: below.series }),
        (
            format!("{kind}-above"),
            Figure { title, x, y: Axis::Decades("share of samples above"), series: above.series },
        ),
    ]
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

/// Results grouped into lines, each titled with what distinguishes it, and the facts that all of them share.
struct Lines {
    series: Vec<Series>,
    common: String,
}

impl Lines {
    fn of(results: &[Labelled<'_>], x: Option<Parameter>, points: impl Fn(&Labelled<'_>) -> Vec<(f64, f64)>) -> Self {
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
                    (false, _) if x.is_some() => style,
                    (false, _) | (true, true) => Style { marker: Marker::None, ..style },
                    (true, false) if x.is_some() => style.points_only(),
                    (true, false) => style.dashed(),
                };
                lines.push(Group { title, style, points: Vec::new() });
                lines.len() - 1
            });
            lines[index].points.extend(points(one));
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
}

impl Group {
    fn series(mut self, sorted: bool) -> Series {
        if sorted {
            self.points.sort_by(|one, other| one.0.total_cmp(&other.0));
        }
        Series { title: self.title, style: self.style, points: self.points }
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
mod tests {
    use super::*;
    use pcie_bench::testing::{bandwidth, latency};

    fn all(results: &[TestResult]) -> Vec<(String, Figure)> {
        plots(&Labelled::unlabelled(results))
    }

    #[test]
    fn a_sweep_is_plotted_over_the_parameter_that_varies_most() {
        let mut results = Vec::new();
        for window_bytes in [4096, 8192, 16384] {
            for size in [128, 64] {
                let mut result = bandwidth("sim:hsw", size, f64::from(size) + window_bytes as f64);
                result.test.window_bytes = window_bytes;
                results.push(result);
            }
        }
        let plots = all(&results);
        let [(name, figure)] = &plots[..] else { panic!("{}", plots.len()) };
        assert_eq!(name, "bw-rd-by-window");
        assert_eq!(figure.title, "Bandwidth of reads\nsim:hsw, host-warm");
        let titles: Vec<_> = figure.series.iter().map(|series| series.title.as_str()).collect();
        assert_eq!(titles, ["128 B", "64 B"]);
        assert_eq!(figure.series[1].points, [(4096.0, 4160.0), (8192.0, 8256.0), (16384.0, 16448.0)]);
    }

    #[test]
    fn latencies_have_distributions_too() {
        let plots = all(&[latency("sim:hsw", 64, 600.0)]);
        let names: Vec<_> = plots.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["lat-rd-cdf", "lat-rd-above"]);
        let below: Vec<_> = plots[0].1.series[0].points.iter().map(|(ns, share)| (*ns, share.round())).collect();
        assert_eq!(below, [(600.0, 0.0), (600.0, 99.0), (1200.0, 99.0), (1200.0, 100.0)]);
        let above = &plots[1].1.series[0].points;
        assert_eq!((above.len(), above[0], above[2].0), (3, (600.0, 1.0), 1200.0));
        assert!((above[1].1 - 0.01).abs() < 1e-9 && above[1] == (600.0, above[2].1), "{above:?}");
    }

    #[test]
    fn model_and_measurement_share_a_colour_and_differ_in_line_style() {
        let results: Vec<_> = ["sim:hsw", "published:hsw"]
            .into_iter()
            .flat_map(|device| [64, 128].map(|size| bandwidth(device, size, 20.0)))
            .collect();
        let plots = all(&results);
        let series = &plots[0].1.series;
        assert_eq!((series.len(), series[2].title.as_str()), (3, "upper bound (protocol)"));
        assert_eq!(series[2].points.len(), 17, "every double word from 64 to 128");
        assert_eq!([series[0].title.as_str(), series[1].title.as_str()], ["sim:hsw", "published:hsw"]);
        assert_eq!(series[0].style.color, series[1].style.color);
        assert_eq!((series[0].style.line, series[1].style.line), (Line::Solid, Line::None));
    }

    #[test]
    fn two_models_and_one_measurement_have_distinct_colours() {
        let results: Vec<_> = ["published:hsw", "sim:hsw", "sim:ib"]
            .into_iter()
            .flat_map(|device| [64, 128].map(|size| bandwidth(device, size, 20.0)))
            .collect();
        let plots = all(&results);
        let colors: Vec<Color> = plots[0].1.series.iter().map(|series| series.style.color).collect();
        assert!(colors[0] == colors[1] && colors[1] != colors[2], "{colors:?}");
    }

    #[test]
    fn every_figure_is_a_sweep_of_valid_tests() {
        let common = Grid {
            devices: vec!["sim:hsw".into()],
            tests: Vec::new(),
            numas: Vec::new(),
            iommus: Vec::new(),
            caches: Vec::new(),
            orders: Vec::new(),
            sizes_bytes: Vec::new(),
            windows_bytes: Vec::new(),
            host_offsets_bytes: Vec::new(),
            device_offsets_bytes: Vec::new(),
            latency_samples: 10,
            bandwidth_samples: 10,
            seed: 1,
        };
        for figure in PaperFigure::value_variants() {
            let jobs = figure.grid(common.clone()).jobs().unwrap();
            assert!(!jobs.is_empty(), "{figure:?}");
            jobs.iter().for_each(|job| job.test.check().unwrap());
        }
    }
}
