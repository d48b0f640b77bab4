//! The search, by coordinate descent: each parameter in turn moves up or down while that reduces the cost, then with
//! smaller steps. This is repeated until no step of any size helps, so a search that starts from its own result ends at
//! once: the committed files are a fixed point of the search.

use std::collections::HashMap;

use thiserror::Error;
use toml::{Table, Value};

use super::residuals::{FigureCache, Residual, SampleCounts, cached_residuals, residuals};
use super::targets::{self, CalibrationTarget, TargetError};
use crate::host::parameters::{self, ParameterError};
use crate::host::{HostError, Interface, Parameters, System};
use crate::test::{Cache, Iommu, Kind, Numa};

/// The parameter file of the device, which all calibrated systems share.
const DEVICE_FILE: &str = "nfp-6000";
/// Number of times that steps are halved.
const HALVINGS: u32 = 2;
/// Largest number of passes, each of which begins with long steps.
const PASSES_MAX: u32 = 8;
/// Decimals of a parameter in the search and in the files.
const DECIMALS_MAX: usize = 3;
/// Largest number of successive steps of one parameter.
const STEPS_MAX: u32 = 8;
/// Weight in the cost of a figure that is reported but not required.
const OPTIONAL_WEIGHT: f64 = 0.2;

/// Number of settings whose figures are cached; a search of one pass has a third as many.
const SETTINGS_MAX: usize = 1_000;

/// A system and the values of its free parameters.
type Setting = (String, Vec<u64>);

/// A parameter that is searched for, in one file.
#[derive(Clone, Debug, PartialEq)]
pub struct FreeParameter {
    /// Name of the parameter file.
    pub file: String,
    /// Section and key.
    pub key: &'static str,
    /// Value at the start of the search.
    pub before: f64,
    /// Current value.
    pub value: f64,
    spec: &'static ParameterSpec,
}

/// A parameter that can be searched for, with its first step and the targets that it affects.
#[derive(Debug, PartialEq)]
struct ParameterSpec {
    key: &'static str,
    step: f64,
    affects: AffectedTargets,
}

/// Targets that a parameter affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AffectedTargets {
    Reads,
    HostWarm,
    FromMemory,
    WriteThenRead,
    SmallWrite,
    Translated,
    Remote,
    Dma,
    DmaWriteThenRead,
    LongDma,
    Command,
}

/// Parameters of a host.
const HOST_PARAMETERS: [ParameterSpec; 12] = [
    ParameterSpec { key: "root_complex.read_ns", step: 4.0, affects: AffectedTargets::Reads },
    ParameterSpec { key: "cache.snoop_ns", step: 4.0, affects: AffectedTargets::HostWarm },
    ParameterSpec { key: "memory.latency_ns", step: 4.0, affects: AffectedTargets::FromMemory },
    ParameterSpec { key: "memory.refresh_ns", step: 16.0, affects: AffectedTargets::FromMemory },
    ParameterSpec { key: "root_complex.write_order_ns", step: 4.0, affects: AffectedTargets::WriteThenRead },
    ParameterSpec { key: "cache.fetch_ns", step: 4.0, affects: AffectedTargets::SmallWrite },
    ParameterSpec { key: "iommu.entries", step: 2.0, affects: AffectedTargets::Translated },
    ParameterSpec { key: "iommu.walk_ns", step: 4.0, affects: AffectedTargets::Translated },
    ParameterSpec { key: "iommu.read_hold_ns", step: 4.0, affects: AffectedTargets::Translated },
    ParameterSpec { key: "iommu.line_replay_ns", step: 2.0, affects: AffectedTargets::Translated },
    ParameterSpec { key: "root_complex.port_line_ns", step: 0.5, affects: AffectedTargets::Translated },
    ParameterSpec { key: "numa.hop_ns", step: 4.0, affects: AffectedTargets::Remote },
];

/// Parameters of the device.
const DEVICE_PARAMETERS: [ParameterSpec; 6] = [
    ParameterSpec { key: "device.dma_done_ns", step: 4.0, affects: AffectedTargets::Dma },
    ParameterSpec { key: "device.receive_byte_ns", step: 0.008, affects: AffectedTargets::LongDma },
    ParameterSpec { key: "device.split_ns", step: 4.0, affects: AffectedTargets::LongDma },
    ParameterSpec { key: "device.write_done_ns", step: 4.0, affects: AffectedTargets::DmaWriteThenRead },
    ParameterSpec { key: "device.write_byte_ns", step: 0.008, affects: AffectedTargets::DmaWriteThenRead },
    ParameterSpec { key: "device.command_done_ns", step: 4.0, affects: AffectedTargets::Command },
];

/// A fit that is not possible.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FitError {
    /// The targets are not available.
    #[error(transparent)]
    Targets(#[from] TargetError),
    /// A test cannot run.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A parameter file is invalid.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
}

/// Systems with their targets and free parameters.
#[derive(Clone, Debug)]
pub struct Fit {
    systems: Vec<(String, Vec<CalibrationTarget>)>,
    free: Vec<FreeParameter>,
    samples: SampleCounts,
    known: HashMap<Setting, FigureCache>,
}

impl AffectedTargets {
    fn has(self, target: &CalibrationTarget) -> bool {
        let test = &target.test;
        let is_dma_latency = target.interface == Interface::Dma && test.test.is_latency();
        let is_write_then_read = test.test == Kind::LatWrrd;
        match self {
            Self::Reads => test.test != Kind::BwWr,
            Self::HostWarm => test.cache == Cache::HostWarm && test.test != Kind::BwWr,
            Self::FromMemory => (test.cache == Cache::Cold || test.window_bytes > 1 << 20) && test.test != Kind::BwWr,
            Self::WriteThenRead => is_write_then_read,
            Self::SmallWrite => is_write_then_read && target.interface == Interface::Command,
            Self::Translated => test.iommu == Iommu::Pages4K && test.window_bytes > 1 << 18,
            Self::Remote => test.numa == Numa::Remote,
            Self::Dma => target.interface == Interface::Dma && test.test != Kind::BwWr,
            Self::DmaWriteThenRead => is_dma_latency && is_write_then_read,
            Self::LongDma => is_dma_latency,
            Self::Command => target.interface == Interface::Command,
        }
    }
}

/// Returns the cost that the search minimises. A residual of `x` tolerances adds x² up to 1 and 2x - 1 beyond, so that
/// a figure that no parameter explains does not outweigh all others.
fn cost(residuals: &[Residual]) -> f64 {
    let of = |residual: &Residual| {
        let off = (residual.difference() / residual.tolerance).abs();
        let weight = if residual.is_required { 1.0 } else { OPTIONAL_WEIGHT };
        weight * if off <= 1.0 { off * off } else { 2.0 * off - 1.0 }
    };
    residuals.iter().map(of).sum()
}

fn section_and_name(key: &str) -> (&str, &str) {
    key.split_once('.').unwrap_or(("", key))
}

/// Returns the number of `key`.
fn number(table: &Table, key: &str) -> Option<f64> {
    let (section, name) = section_and_name(key);
    match table.get(section)?.get(name)? {
        Value::Float(number) => Some(*number),
        Value::Integer(number) => Some(*number as f64),
        _ => None,
    }
}

/// Sets the number of `key` and keeps its type.
fn set(table: &mut Table, key: &str, number: f64) {
    let (section, name) = section_and_name(key);
    if let Some(value) = table.get_mut(section).and_then(|section| section.get_mut(name)) {
        *value = match value {
            Value::Integer(_) => Value::Integer(number as i64),
            _ => Value::Float(number),
        };
    }
}

fn table_of(name: &str) -> Result<(&'static str, Table), FitError> {
    let text = parameters::built_in(name).ok_or_else(|| TargetError::System(name.to_owned()))?;
    Ok((text, parameters::table(name, text)?))
}

/// Returns a system with the current parameters.
fn system(free: &[FreeParameter], name: &str) -> Result<System, FitError> {
    let (text, mut table) = table_of(name)?;
    for free in free.iter().filter(|free| free.affects_system(name)) {
        set(&mut table, free.key, free.value);
    }
    Ok(System::new(name, Parameters::from_table(name, text, table)?))
}

impl Fit {
    /// Prepares a search for these systems. The parameters of the device are free only if all calibrated systems take
    /// part, because all of them share the device.
    ///
    /// # Errors
    /// A system has no targets.
    pub fn new(names: &[String], samples: SampleCounts) -> Result<Self, FitError> {
        let mut systems = Vec::new();
        let mut free = Vec::new();
        for name in names {
            systems.push((name.clone(), targets::built_in(name)?));
            free.extend(free_of(name, &HOST_PARAMETERS)?);
        }
        if targets::SYSTEMS.iter().all(|name| names.iter().any(|one| one == name)) {
            free.extend(free_of(DEVICE_FILE, &DEVICE_PARAMETERS)?);
        }
        free.retain(|one| {
            systems.iter().any(|(name, targets)| {
                one.affects_system(name) && targets.iter().any(|target| one.spec.affects.has(target))
            })
        });
        Ok(Self { systems, free, samples, known: HashMap::new() })
    }

    /// Reads the figures from published files instead of the committed ones.
    ///
    /// # Errors
    /// A file or a figure is missing.
    pub fn read_published(&mut self, data: &std::path::Path) -> Result<(), FitError> {
        for (_, targets) in &mut self.systems {
            for target in targets {
                *target = target.from_published(data)?;
            }
        }
        Ok(())
    }

    /// Returns the free parameters with their first and current values.
    pub fn free(&self) -> &[FreeParameter] {
        &self.free
    }

    /// Returns the residuals of all systems.
    ///
    /// # Errors
    /// A test cannot run.
    pub fn residuals(&self, samples: SampleCounts) -> Result<Vec<(String, Vec<Residual>)>, FitError> {
        let of = |(name, targets): &(String, Vec<CalibrationTarget>)| {
            Ok((name.clone(), residuals(&system(&self.free, name)?, targets, samples)?))
        };
        self.systems.iter().map(of).collect()
    }

    /// Returns the cost of the targets that this parameter affects. Figures are cached, because a search evaluates the
    /// same setting repeatedly.
    fn cost_of(&mut self, free: usize) -> Result<f64, FitError> {
        if self.known.len() >= SETTINGS_MAX {
            self.known.clear();
        }
        let free = &self.free[free];
        let mut sum = 0.0;
        for (name, targets) in self.systems.iter().filter(|(name, _)| free.affects_system(name)) {
            let moved: Vec<CalibrationTarget> =
                targets.iter().filter(|target| free.spec.affects.has(target)).cloned().collect();
            let values =
                self.free.iter().filter(|free| free.affects_system(name)).map(|free| free.value.to_bits()).collect();
            let known = self.known.entry((name.clone(), values)).or_default();
            sum += cost(&cached_residuals(known, &system(&self.free, name)?, &moved, self.samples)?);
        }
        Ok(sum)
    }

    /// Runs the search; calls `progress` after each parameter, with the number of the pass.
    ///
    /// # Errors
    /// A test cannot run.
    pub fn search(&mut self, progress: &mut dyn FnMut(u32, &FreeParameter)) -> Result<(), FitError> {
        for pass in 1..=PASSES_MAX {
            let mut has_moved = false;
            for halvings in 0..=HALVINGS {
                for index in 0..self.free.len() {
                    let spec = self.free[index].spec;
                    let step = spec.step / f64::from(1 << halvings);
                    has_moved |= self.improve(index, if spec.key == "iommu.entries" { step.ceil() } else { step })?;
                    progress(pass, &self.free[index]);
                }
            }
            if !has_moved {
                break;
            }
        }
        Ok(())
    }

    /// Moves one parameter by steps while that reduces the cost; returns whether it did.
    fn improve(&mut self, index: usize, step: f64) -> Result<bool, FitError> {
        let mut lowest = self.cost_of(index)?;
        for direction in [step, -step] {
            let mut has_moved = false;
            for _ in 0..STEPS_MAX {
                let old = self.free[index].value;
                self.free[index].value = rounded((old + direction).max(0.0));
                let cost = self.cost_of(index)?;
                if cost >= lowest {
                    self.free[index].value = old;
                    break;
                }
                (lowest, has_moved) = (cost, true);
            }
            if has_moved {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns name and text of each parameter file with the values found.
    pub fn files(&self) -> Vec<(String, String)> {
        let mut names: Vec<&str> = self.free.iter().map(|free| free.file.as_str()).collect();
        names.dedup();
        let text = |name: &str| {
            let free = self.free.iter().filter(|free| free.file == name);
            free.fold(parameters::built_in(name).unwrap_or_default().to_owned(), |text, free| written(&text, free))
        };
        names.into_iter().map(|name| (name.to_owned(), text(name))).collect()
    }
}

impl FreeParameter {
    /// Returns whether the parameter affects this system.
    fn affects_system(&self, system: &str) -> bool {
        self.file == system || self.file == DEVICE_FILE
    }
}

fn free_of(file: &str, specs: &'static [ParameterSpec]) -> Result<Vec<FreeParameter>, FitError> {
    let (text, _) = table_of(file)?;
    let own: Table = config::parse(file, text).map_err(ParameterError::from)?;
    let free = |spec: &'static ParameterSpec| {
        let value = number(&own, spec.key)?;
        Some(FreeParameter { file: file.to_owned(), key: spec.key, before: value, value, spec })
    };
    Ok(specs.iter().filter_map(free).collect())
}

/// Returns the text of a file with the new value of a parameter; comments are kept.
fn written(text: &str, free: &FreeParameter) -> String {
    let (section, name) = section_and_name(free.key);
    let mut current = "";
    let mut lines = Vec::new();
    for line in text.lines() {
        if let Some(header) = line.strip_prefix('[') {
            current = header.trim_end_matches(']');
        }
        let is_it = current == section && line.split('=').next().is_some_and(|left| left.trim() == name);
        lines.push(if is_it { with_number(line, free.value) } else { line.to_owned() });
    }
    lines.join("\n") + "\n"
}

/// Rounds a value to the decimals that a file has.
fn rounded(value: f64) -> f64 {
    let scale = 10_f64.powi(DECIMALS_MAX as i32);
    (value * scale).round() / scale
}

/// Replaces the number in `key = number  # comment`, with at least as many decimals as before.
fn with_number(line: &str, number: f64) -> String {
    let Some((key, rest)) = line.split_once('=') else { return line.to_owned() };
    let (old, comment) = rest.split_once('#').unwrap_or((rest, ""));
    let digits = old.trim().split_once('.').map_or(0, |(_, fraction)| fraction.len());
    let is_exact = |digits: &usize| format!("{number:.digits$}").parse() == Ok(number);
    let digits = (digits..DECIMALS_MAX).find(is_exact).unwrap_or(DECIMALS_MAX.max(digits));
    let assignment = format!("{key}= {number:.digits$}");
    if comment.is_empty() { assignment } else { format!("{assignment:28}#{comment}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::Statistic;

    const LITTLE: SampleCounts = SampleCounts { latencies: 400, latencies_filling: 400, transfers: 400 };

    #[test]
    fn a_perturbed_parameter_is_recovered() {
        let mut fit = Fit::new(&["ib".to_owned()], LITTLE).unwrap();
        fit.free.retain(|free| free.key == "iommu.walk_ns");
        fit.systems[0].1.retain(|target| target.statistic == Statistic::AverageNs && target.test.test == Kind::LatRd);
        let right = fit.free[0].value;
        fit.free[0].value = right + 60.0;
        fit.search(&mut |_, _| ()).unwrap();
        assert!((fit.free[0].value - right).abs() < 25.0, "{} instead of {right}", fit.free[0].value);
    }

    #[test]
    fn files_keep_their_comments_and_get_the_new_values() {
        let mut fit = Fit::new(&["ib".to_owned()], LITTLE).unwrap();
        for free in &mut fit.free {
            free.value = free.before.round() + 1.0;
        }
        let [(name, text)] = &fit.files()[..] else { panic!("one file") };
        assert_eq!(name, "ib");
        let old = parameters::built_in("ib").unwrap();
        assert_eq!(text.matches('#').count(), old.matches('#').count());
        let changed: Table = text.parse().unwrap();
        for free in &fit.free {
            assert_eq!(number(&changed, free.key), Some(free.value), "{}", free.key);
        }
        assert_eq!(text.lines().zip(old.lines()).filter(|(new, old)| new != old).count(), fit.free.len());
    }

    #[test]
    #[ignore = "searches all parameters: a minute or two in a release build"]
    fn the_committed_files_are_a_fixed_point_of_the_search() {
        let mut fit = Fit::new(&targets::SYSTEMS.map(str::to_owned), SampleCounts::SEARCH).unwrap();
        fit.search(&mut |_, free| assert_eq!(free.value, free.before, "{} {}", free.file, free.key)).unwrap();
        for (name, text) in fit.files() {
            assert_eq!(parameters::built_in(&name), Some(text.as_str()), "{name}");
        }
    }

    #[test]
    fn device_parameters_are_free_only_if_all_systems_take_part() {
        let is_device_free = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            Fit::new(&names, LITTLE).unwrap().free().iter().any(|free| free.file == DEVICE_FILE)
        };
        assert!(is_device_free(&["hsw", "ib"]));
        assert!(!is_device_free(&["hsw"]));
        assert!(Fit::new(&["bdw".to_owned()], LITTLE).is_err(), "a prediction is never fitted");
    }
}
