//! Figures that others published, condensed: what a simulation is fitted to and judged by.

use std::path::Path;

use thiserror::Error;

use crate::host::Interface;
use crate::test::{Cache, Iommu, Kind, Numa, Order, Test};

/// What is committed of the published figures.
const BUILT_IN: [(&str, &str); 2] =
    [("hsw", include_str!("../../data/hsw.csv")), ("ib", include_str!("../../data/ib.csv"))];
/// Systems that have facts: all others are predictions.
pub const SYSTEMS: [&str; 2] = [BUILT_IN[0].0, BUILT_IN[1].0];
/// Columns of a line.
const COLUMNS: usize = 15;
/// Of the random numbers: any would do.
const SEED: u64 = 1;

/// A published figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// What was run; samples are set by who runs it again.
    pub test: Test,
    /// How.
    pub interface: Interface,
    /// Which figure of the outcome.
    pub statistic: Statistic,
    /// What was published.
    pub value: f64,
    /// How far a simulation may be from it.
    pub tolerance: Tolerance,
    /// Whether it must be that near; others are watched.
    pub is_required: bool,
    /// Where it was published: folder and file.
    source: (String, String),
}

/// Which figure of an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistic {
    /// Half of the latencies are at most this.
    MedianNs,
    /// 99% of the latencies are at most this.
    P99Ns,
    /// Mean of all latencies.
    AverageNs,
    /// Payload, 10^9 bits a second.
    Gbps,
}

/// How far off is near enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// In nanoseconds.
    Ns(f64),
    /// In percent of what was published.
    Percent(f64),
}

/// Facts that cannot be had.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FactError {
    /// Not one of those that are fitted.
    #[error("system '{0}' has no calibration facts; choose hsw or ib: all others are predictions")]
    System(String),
    /// A line that says nothing.
    #[error("{file}, line {line}: {what}")]
    Line {
        /// Which file.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A published file that is not there.
    #[error("{path}: {what}; --data wants the folder that holds {folder}")]
    File {
        /// Where it was looked for.
        path: String,
        /// What the system says.
        what: String,
        /// The folder as published.
        folder: String,
    },
    /// A published file without the figure.
    #[error("{path}: no {what}; take the files as published")]
    Missing {
        /// Of the file.
        path: String,
        /// Row or column.
        what: String,
    },
}

impl Statistic {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "median_ns" => Some(Self::MedianNs),
            "p99_ns" => Some(Self::P99Ns),
            "average_ns" => Some(Self::AverageNs),
            "gbps" => Some(Self::Gbps),
            _ => None,
        }
    }

    /// As in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::MedianNs => "median ns",
            Self::P99Ns => "p99 ns",
            Self::AverageNs => "average ns",
            Self::Gbps => "Gb/s",
        }
    }

    /// The published files' column; p99 is in none.
    fn column(self) -> Option<&'static str> {
        match self {
            Self::MedianNs => Some("Med(ns)"),
            Self::AverageNs => Some("Avg(ns)"),
            Self::Gbps => Some("BW (GB/s)"),
            Self::P99Ns => None,
        }
    }
}

impl Tolerance {
    fn parse(text: &str) -> Option<Self> {
        let (number, unit) = text.split_once(' ')?;
        let number = number.parse().ok()?;
        match unit {
            "ns" => Some(Self::Ns(number)),
            "%" => Some(Self::Percent(number)),
            _ => None,
        }
    }

    /// In the unit of the figure `value`.
    pub fn of(self, value: f64) -> f64 {
        match self {
            Self::Ns(ns) => ns,
            Self::Percent(percent) => value * percent / 100.0,
        }
    }
}

/// The facts of `system`, as committed.
///
/// # Errors
/// When it has none.
pub fn built_in(system: &str) -> Result<Vec<Fact>, FactError> {
    let (name, text) =
        BUILT_IN.iter().find(|(name, _)| *name == system).ok_or_else(|| FactError::System(system.to_owned()))?;
    parse(name, text)
}

fn parse(file: &str, text: &str) -> Result<Vec<Fact>, FactError> {
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.starts_with('#') && !line.starts_with("system,"));
    lines
        .map(|(line, row)| {
            let cells: Vec<&str> = row.split(',').collect();
            fact(&cells).map_err(|what| FactError::Line { file: file.to_owned(), line, what })
        })
        .collect()
}

fn number<T: std::str::FromStr>(cell: &str) -> Result<T, String> {
    cell.parse().map_err(|_| format!("'{cell}' is not a number"))
}

/// A word as the command line and the JSON form have it.
fn word<T: serde::de::DeserializeOwned>(cell: &str) -> Result<T, String> {
    toml::Value::String(cell.to_owned()).try_into().map_err(|_| format!("'{cell}' is not known"))
}

fn fact(cells: &[&str]) -> Result<Fact, String> {
    let cells: &[&str; COLUMNS] =
        cells.try_into().map_err(|_| format!("{} columns instead of {COLUMNS}", cells.len()))?;
    let [
        _,
        kind,
        interface,
        size,
        window,
        order,
        cache,
        iommu,
        numa,
        statistic,
        value,
        tolerance,
        standing,
        folder,
        file,
    ] = *cells;
    let test = Test {
        test: word::<Kind>(kind)?,
        size_bytes: number(size)?,
        window_bytes: number(window)?,
        host_offset_bytes: 0,
        device_offset_bytes: 0,
        order: word::<Order>(order)?,
        cache: word::<Cache>(cache)?,
        iommu: word::<Iommu>(iommu)?,
        numa: word::<Numa>(numa)?,
        samples: 1,
        seed: SEED,
    };
    Ok(Fact {
        test,
        interface: if interface == "command" { Interface::Command } else { Interface::Dma },
        statistic: Statistic::parse(statistic).ok_or_else(|| format!("'{statistic}' is no statistic"))?,
        value: number(value)?,
        tolerance: Tolerance::parse(tolerance).ok_or_else(|| format!("'{tolerance}' is no tolerance"))?,
        is_required: standing == "required",
        source: (folder.to_owned(), file.to_owned()),
    })
}

impl Fact {
    /// The figure in the published files under `data`, for facts that have a column there; p99 stays as committed.
    ///
    /// # Errors
    /// When the file or the figure is not there.
    pub fn from_published(&self, data: &Path) -> Result<Self, FactError> {
        let Some(column) = self.statistic.column() else { return Ok(self.clone()) };
        let (folder, file) = &self.source;
        let path = data.join(folder).join(file);
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|error| FactError::File {
            path: shown.clone(),
            what: error.to_string(),
            folder: folder.clone(),
        })?;
        let missing = |what: &str| FactError::Missing { path: shown.clone(), what: what.to_owned() };
        let mut lines = text.lines();
        let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let place = |name: &str| head.iter().position(|cell| *cell == name).ok_or_else(|| missing(name));
        let places = [place("Test")?, place("Cache")?, place("WinSZ")?, place("SZ")?];
        let value_place = place(column)?;
        let row = lines.map(|line| line.split(',').collect::<Vec<_>>()).find(|cells| self.is_row(cells, places));
        let cell = row.as_ref().and_then(|cells| cells.get(value_place)).ok_or_else(|| missing("row of this test"))?;
        let value = cell.parse().map_err(|_| missing(column))?;
        Ok(Self { value, ..self.clone() })
    }

    /// Whether a published row, with test, cache, window and size at these places, is of this test.
    fn is_row(&self, cells: &[&str], [test, cache, window, size]: [usize; 4]) -> bool {
        let cell = |place: usize| cells.get(place).copied().unwrap_or_default();
        let is_number = |place, expected: u64| cell(place).parse::<f64>().is_ok_and(|number| number == expected as f64);
        cell(test) == self.published_test()
            && cell(cache) == self.published_cache()
            && is_number(window, self.test.window_bytes)
            && is_number(size, self.test.size_bytes.into())
    }

    fn published_test(&self) -> &'static str {
        match (self.test.test, self.interface) {
            (Kind::LatRd, Interface::Dma) => "LAT_DMA_RD",
            (Kind::LatRd, Interface::Command) => "LAT_CMD_RD",
            (Kind::LatWrrd, Interface::Dma) => "LAT_DMA_WRRD",
            (Kind::LatWrrd, Interface::Command) => "LAT_CMD_WRRD",
            (Kind::BwRd, _) => "BW_DMA_RD",
            (Kind::BwWr, _) => "BW_DMA_WR",
            (Kind::BwRdwr, _) => "BW_DMA_RW",
        }
    }

    fn published_cache(&self) -> &'static str {
        match self.test.cache {
            Cache::Cold => "Cold",
            Cache::HostWarm => "HWarm",
            Cache::DeviceWarm => "DWarm",
        }
    }

    /// The test in words.
    pub fn label(&self) -> String {
        let test = &self.test;
        let interface = if self.interface == Interface::Command { " by command" } else { "" };
        let iommu = match test.iommu {
            Iommu::Off => "",
            Iommu::Pages4K => " iommu 4k",
            Iommu::Pages2M => " iommu 2m",
        };
        let numa = if test.numa == Numa::Remote { " remote" } else { "" };
        let (kind, size, window) = (test.test, test.size_bytes, test.window_bytes >> 10);
        format!("{kind} {size} B{interface} {} {window}K{iommu}{numa}", self.published_cache())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_facts_can_be_read() {
        for (system, _) in BUILT_IN {
            let facts = built_in(system).unwrap();
            assert!(facts.len() > 100 && facts.iter().filter(|fact| fact.is_required).count() > 50, "{system}");
            assert!(facts.iter().all(|fact| fact.value > 0.0 && fact.test.check().is_ok()));
        }
        assert_eq!(built_in("bdw"), Err(FactError::System("bdw".to_owned())));
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = parse("x.csv", "# head\nib,lat-rd,dma").unwrap_err().to_string();
        assert_eq!(error, "x.csv, line 2: 3 columns instead of 15");
    }

    #[test]
    fn published_files_give_the_same_figures() {
        let folder = tempfile::tempdir().unwrap();
        let fact = &built_in("ib").unwrap()[0];
        let place = folder.path().join(&fact.source.0);
        std::fs::create_dir(&place).unwrap();
        let text = "Test,PAT,Cache,HO,DO,WinSZ,SZ,Med(ns)\nLAT_DMA_RD,Seq,HWarm,0,0,8192,64,561.5\n";
        std::fs::write(place.join(&fact.source.1), text).unwrap();
        assert_eq!(fact.from_published(folder.path()).unwrap().value, 561.5);
        let error = fact.from_published(Path::new("nowhere")).unwrap_err().to_string();
        assert!(error.starts_with("nowhere") && error.contains("--data"), "{error}");
    }
}
