//! Calibration targets: published figures to which a simulation is fitted and by which it is judged.

use std::path::Path;

use thiserror::Error;

use crate::host::Interface;
use crate::test::{Cache, Iommu, Kind, Numa, Order, Test};

/// The published figures, as committed.
const BUILT_IN: [(&str, &str); 2] =
    [("hsw", include_str!("../../data/hsw.csv")), ("ib", include_str!("../../data/ib.csv"))];
/// Systems with calibration targets; all others are predictions.
pub const SYSTEMS: [&str; 2] = [BUILT_IN[0].0, BUILT_IN[1].0];
/// Number of columns of a line.
const COLUMNS: usize = 15;
/// Seed of the random numbers; its value is arbitrary.
const SEED: u64 = 1;

/// A published figure with the tolerance for the simulated one.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationTarget {
    /// The test; the caller that repeats it sets the number of samples.
    pub test: Test,
    /// The interface that made the transfers.
    pub interface: Interface,
    /// The figure of the outcome.
    pub statistic: Statistic,
    /// The published value.
    pub value: f64,
    /// Largest permitted deviation of the simulation.
    pub tolerance: Tolerance,
    /// Whether the tolerance must be met; other targets are only reported.
    pub is_required: bool,
    /// Folder and file of the publication.
    source: (String, String),
}

/// A figure of an outcome.
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

/// A permitted deviation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// In nanoseconds.
    Ns(f64),
    /// In percent of the published value.
    Percent(f64),
}

/// Targets that are not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TargetError {
    /// The system is not calibrated.
    #[error("system '{0}' has no calibration targets; choose hsw or ib: all others are predictions")]
    System(String),
    /// A line is invalid.
    #[error("{file}, line {line}: {what}")]
    Line {
        /// Name of the file.
        file: String,
        /// Line number, from 1.
        line: usize,
        /// The defect.
        what: String,
    },
    /// A published file cannot be read.
    #[error("{path}: {what}; give --data the folder that contains {folder}")]
    File {
        /// Path of the file.
        path: String,
        /// Error of the system.
        what: String,
        /// Name of the published folder.
        folder: String,
    },
    /// A published file does not contain the figure.
    #[error("{path}: no {what}; use the files as published")]
    Missing {
        /// Path of the file.
        path: String,
        /// The missing row or column.
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

    /// Returns the name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::MedianNs => "median ns",
            Self::P99Ns => "p99 ns",
            Self::AverageNs => "average ns",
            Self::Gbps => "Gb/s",
        }
    }

    /// Returns the column in the published files, which have none for p99.
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

    /// Returns the tolerance in the unit of the figure `value`.
    pub fn of(self, value: f64) -> f64 {
        match self {
            Self::Ns(ns) => ns,
            Self::Percent(percent) => value * percent / 100.0,
        }
    }
}

/// Returns the committed targets of `system`.
///
/// # Errors
/// The system has none.
pub fn built_in(system: &str) -> Result<Vec<CalibrationTarget>, TargetError> {
    let (name, text) =
        BUILT_IN.iter().find(|(name, _)| *name == system).ok_or_else(|| TargetError::System(system.to_owned()))?;
    parse(name, text)
}

fn parse(file: &str, text: &str) -> Result<Vec<CalibrationTarget>, TargetError> {
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.starts_with('#') && !line.starts_with("system,"));
    lines
        .map(|(line, row)| {
            let cells: Vec<&str> = row.split(',').collect();
            target(&cells).map_err(|what| TargetError::Line { file: file.to_owned(), line, what })
        })
        .collect()
}

fn number<T: std::str::FromStr>(cell: &str) -> Result<T, String> {
    cell.parse().map_err(|_| format!("'{cell}' is not a number"))
}

/// Parses a word of the command line or of the JSON form.
fn word<T: serde::de::DeserializeOwned>(cell: &str) -> Result<T, String> {
    toml::Value::String(cell.to_owned()).try_into().map_err(|_| format!("'{cell}' is not known"))
}

fn target(cells: &[&str]) -> Result<CalibrationTarget, String> {
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
        requirement,
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
    Ok(CalibrationTarget {
        test,
        interface: if interface == "command" { Interface::Command } else { Interface::Dma },
        statistic: Statistic::parse(statistic).ok_or_else(|| format!("'{statistic}' is not a statistic"))?,
        value: number(value)?,
        tolerance: Tolerance::parse(tolerance).ok_or_else(|| format!("'{tolerance}' is not a tolerance"))?,
        is_required: requirement == "required",
        source: (folder.to_owned(), file.to_owned()),
    })
}

impl CalibrationTarget {
    /// Returns this target with the value in the published files under `data`, if they have a column for it; p99 keeps
    /// the committed value.
    ///
    /// # Errors
    /// The file or the figure is missing.
    pub fn from_published(&self, data: &Path) -> Result<Self, TargetError> {
        let Some(column) = self.statistic.column() else { return Ok(self.clone()) };
        let (folder, file) = &self.source;
        let path = data.join(folder).join(file);
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|error| TargetError::File {
            path: shown.clone(),
            what: error.to_string(),
            folder: folder.clone(),
        })?;
        let missing = |what: &str| TargetError::Missing { path: shown.clone(), what: what.to_owned() };
        let mut lines = text.lines();
        let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let column_index = |name: &str| head.iter().position(|cell| *cell == name).ok_or_else(|| missing(name));
        let columns = [column_index("Test")?, column_index("Cache")?, column_index("WinSZ")?, column_index("SZ")?];
        let value_column = column_index(column)?;
        let row = lines.map(|line| line.split(',').collect::<Vec<_>>()).find(|cells| self.is_row(cells, columns));
        let cell = row.as_ref().and_then(|cells| cells.get(value_column)).ok_or_else(|| missing("row of this test"))?;
        let value = cell.parse().map_err(|_| missing(column))?;
        Ok(Self { value, ..self.clone() })
    }

    /// Returns whether a published row is of this test; the indices are those of the columns of test, cache, window and
    /// size.
    fn is_row(&self, cells: &[&str], [test, cache, window, size]: [usize; 4]) -> bool {
        let cell = |column: usize| cells.get(column).copied().unwrap_or_default();
        let is_number =
            |column, expected: u64| cell(column).parse::<f64>().is_ok_and(|number| number == expected as f64);
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

    /// Returns a description of the test.
    pub fn label(&self) -> String {
        let test = &self.test;
        let interface = if self.interface == Interface::Command { " by command" } else { "" };
        let iommu = if test.iommu == Iommu::Off { String::new() } else { format!(" iommu {}", test.iommu.name()) };
        let numa = if test.numa == Numa::Remote { " remote" } else { "" };
        let (kind, size, window) = (test.test, test.size_bytes, test.window_bytes >> 10);
        format!("{kind} {size} B{interface} {} {window}K{iommu}{numa}", self.published_cache())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_targets_can_be_read() {
        for (system, _) in BUILT_IN {
            let targets = built_in(system).unwrap();
            assert!(targets.len() > 100 && targets.iter().filter(|target| target.is_required).count() > 50, "{system}");
            assert!(targets.iter().all(|target| target.value > 0.0 && target.test.check().is_ok()));
        }
        assert_eq!(built_in("bdw"), Err(TargetError::System("bdw".to_owned())));
    }

    #[test]
    fn an_invalid_line_is_named() {
        let error = parse("x.csv", "# head\nib,lat-rd,dma").unwrap_err().to_string();
        assert_eq!(error, "x.csv, line 2: 3 columns instead of 15");
    }

    #[test]
    fn published_files_give_the_same_figures() {
        let folder = tempfile::tempdir().unwrap();
        let target = &built_in("ib").unwrap()[0];
        let place = folder.path().join(&target.source.0);
        std::fs::create_dir(&place).unwrap();
        let text = "Test,PAT,Cache,HO,DO,WinSZ,SZ,Med(ns)\nLAT_DMA_RD,Seq,HWarm,0,0,8192,64,561.5\n";
        std::fs::write(place.join(&target.source.1), text).unwrap();
        assert_eq!(target.from_published(folder.path()).unwrap().value, 561.5);
        let error = target.from_published(Path::new("nowhere")).unwrap_err().to_string();
        assert!(error.starts_with("nowhere") && error.contains("--data"), "{error}");
    }
}
