//! The search: one parameter after the other, a step up or down while that brings the figures nearer, then smaller
//! steps; and all of it again until no step of any length helps. So a search that begins where another one ended ends
//! there at once: the committed files are what it gives.

use std::collections::HashMap;

use thiserror::Error;
use toml::{Table, Value};

use super::facts::{self, Fact, FactError};
use super::judge::{Effort, Known, Residual, residuals, residuals_beyond};
use crate::host::parameters::{self, ParameterError};
use crate::host::{HostError, Interface, Parameters, System};
use crate::test::{Cache, Iommu, Kind, Numa};

/// The file of what all calibrated systems share.
const DEVICE: &str = "nfp-6000";
/// Times that steps are halved.
const HALVINGS: u32 = 2;
/// Times that the search begins again with long steps.
const PASSES_MAX: u32 = 8;
/// Parameters are searched for to so many decimals, which the files show.
const DECIMALS_MAX: usize = 3;
/// Steps of one parameter in one go.
const STEPS_MAX: u32 = 8;
/// What a figure counts that is watched but not required.
const WATCHED_WEIGHT: f64 = 0.2;

/// Settings of a system whose figures are kept: a search of one pass has a third of them.
const SETTINGS_MAX: usize = 1_000;

/// A system and the values of what is free of it.
type Setting = (String, Vec<u64>);

/// A parameter that is searched for, in one file.
#[derive(Clone, Debug, PartialEq)]
pub struct Free {
    /// Name of the parameter file.
    pub file: String,
    /// Section and key.
    pub key: &'static str,
    /// Where the search began.
    pub before: f64,
    /// Where it is.
    pub value: f64,
    kind: &'static Parameter,
}

/// What can be searched for, and which facts it moves.
#[derive(Debug, PartialEq)]
struct Parameter {
    key: &'static str,
    step: f64,
    moves: Moves,
}

/// Facts that a parameter moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moves {
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

/// Of a host.
const HOST: [Parameter; 12] = [
    Parameter { key: "root_complex.read_ns", step: 4.0, moves: Moves::Reads },
    Parameter { key: "cache.snoop_ns", step: 4.0, moves: Moves::HostWarm },
    Parameter { key: "memory.latency_ns", step: 4.0, moves: Moves::FromMemory },
    Parameter { key: "memory.refresh_ns", step: 16.0, moves: Moves::FromMemory },
    Parameter { key: "root_complex.write_order_ns", step: 4.0, moves: Moves::WriteThenRead },
    Parameter { key: "cache.fetch_ns", step: 4.0, moves: Moves::SmallWrite },
    Parameter { key: "iommu.entries", step: 2.0, moves: Moves::Translated },
    Parameter { key: "iommu.walk_ns", step: 4.0, moves: Moves::Translated },
    Parameter { key: "iommu.read_hold_ns", step: 4.0, moves: Moves::Translated },
    Parameter { key: "iommu.line_replay_ns", step: 2.0, moves: Moves::Translated },
    Parameter { key: "root_complex.port_line_ns", step: 0.5, moves: Moves::Translated },
    Parameter { key: "numa.hop_ns", step: 4.0, moves: Moves::Remote },
];

/// Of the device.
const SHARED: [Parameter; 6] = [
    Parameter { key: "device.dma_done_ns", step: 4.0, moves: Moves::Dma },
    Parameter { key: "device.receive_byte_ns", step: 0.008, moves: Moves::LongDma },
    Parameter { key: "device.split_ns", step: 4.0, moves: Moves::LongDma },
    Parameter { key: "device.write_done_ns", step: 4.0, moves: Moves::DmaWriteThenRead },
    Parameter { key: "device.write_byte_ns", step: 0.008, moves: Moves::DmaWriteThenRead },
    Parameter { key: "device.command_done_ns", step: 4.0, moves: Moves::Command },
];

/// A fit that is not possible.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FitError {
    /// The facts.
    #[error(transparent)]
    Facts(#[from] FactError),
    /// A run.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A parameter file.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
}

/// Systems with the facts about them, and the parameters that are free.
#[derive(Clone, Debug)]
pub struct Fit {
    systems: Vec<(String, Vec<Fact>)>,
    free: Vec<Free>,
    effort: Effort,
    known: HashMap<Setting, Known>,
}

impl Moves {
    fn has(self, fact: &Fact) -> bool {
        let test = &fact.test;
        let is_dma_latency = fact.interface == Interface::Dma && test.test.is_latency();
        let is_write_then_read = test.test == Kind::LatWrrd;
        match self {
            Self::Reads => test.test != Kind::BwWr,
            Self::HostWarm => test.cache == Cache::HostWarm && test.test != Kind::BwWr,
            Self::FromMemory => (test.cache == Cache::Cold || test.window_bytes > 1 << 20) && test.test != Kind::BwWr,
            Self::WriteThenRead => is_write_then_read,
            Self::SmallWrite => is_write_then_read && fact.interface == Interface::Command,
            Self::Translated => test.iommu == Iommu::Pages4K && test.window_bytes > 1 << 18,
            Self::Remote => test.numa == Numa::Remote,
            Self::Dma => fact.interface == Interface::Dma && test.test != Kind::BwWr,
            Self::DmaWriteThenRead => is_dma_latency && is_write_then_read,
            Self::LongDma => is_dma_latency,
            Self::Command => fact.interface == Interface::Command,
        }
    }
}

/// What a search makes small: the square of what differs in tolerances, growing like a line beyond one, so that one
/// figure that no parameter explains does not outweigh all others.
fn cost(residuals: &[Residual]) -> f64 {
    let of = |residual: &Residual| {
        let off = (residual.difference() / residual.tolerance).abs();
        let weight = if residual.is_required { 1.0 } else { WATCHED_WEIGHT };
        weight * if off <= 1.0 { off * off } else { 2.0 * off - 1.0 }
    };
    residuals.iter().map(of).sum()
}

fn section_and_name(key: &str) -> (&str, &str) {
    key.split_once('.').unwrap_or(("", key))
}

/// The number under `key`.
fn number(table: &Table, key: &str) -> Option<f64> {
    let (section, name) = section_and_name(key);
    match table.get(section)?.get(name)? {
        Value::Float(number) => Some(*number),
        Value::Integer(number) => Some(*number as f64),
        _ => None,
    }
}

/// Puts a number under `key`, of the kind that stands there.
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
    let text = parameters::built_in(name).ok_or_else(|| FactError::System(name.to_owned()))?;
    Ok((text, parameters::table(name, text)?))
}

/// A system as the parameters now make it.
fn system(free: &[Free], name: &str) -> Result<System, FitError> {
    let (text, mut table) = table_of(name)?;
    for free in free.iter().filter(|free| free.is_about(name)) {
        set(&mut table, free.key, free.value);
    }
    Ok(System::new(name, Parameters::from_table(name, text, table)?))
}

impl Fit {
    /// Nothing searched yet for these systems. What they share is free only when all that are calibrated take part.
    ///
    /// # Errors
    /// When one has no facts.
    pub fn new(names: &[String], effort: Effort) -> Result<Self, FitError> {
        let mut systems = Vec::new();
        let mut free = Vec::new();
        for name in names {
            systems.push((name.clone(), facts::built_in(name)?));
            free.extend(free_of(name, &HOST)?);
        }
        if facts::SYSTEMS.iter().all(|name| names.iter().any(|one| one == name)) {
            free.extend(free_of(DEVICE, &SHARED)?);
        }
        free.retain(|one| {
            systems.iter().any(|(name, facts)| one.is_about(name) && facts.iter().any(|fact| one.kind.moves.has(fact)))
        });
        Ok(Self { systems, free, effort, known: HashMap::new() })
    }

    /// Takes the figures from published files instead of those committed.
    ///
    /// # Errors
    /// When a file or a figure is not there.
    pub fn read_published(&mut self, data: &std::path::Path) -> Result<(), FitError> {
        for (_, facts) in &mut self.systems {
            for fact in facts {
                *fact = fact.from_published(data)?;
            }
        }
        Ok(())
    }

    /// The parameters that are free, with where they began and where they are.
    pub fn free(&self) -> &[Free] {
        &self.free
    }

    /// How far every figure of every system is off.
    ///
    /// # Errors
    /// When a test cannot be run.
    pub fn residuals(&self, effort: Effort) -> Result<Vec<(String, Vec<Residual>)>, FitError> {
        let of = |(name, facts): &(String, Vec<Fact>)| {
            Ok((name.clone(), residuals(&system(&self.free, name)?, facts, effort)?))
        };
        self.systems.iter().map(of).collect()
    }

    /// What the facts cost that this parameter moves. A search asks again and again what it costs where it stands.
    fn cost_of(&mut self, free: usize) -> Result<f64, FitError> {
        if self.known.len() >= SETTINGS_MAX {
            self.known.clear();
        }
        let free = &self.free[free];
        let mut sum = 0.0;
        for (name, facts) in self.systems.iter().filter(|(name, _)| free.is_about(name)) {
            let moved: Vec<Fact> = facts.iter().filter(|fact| free.kind.moves.has(fact)).cloned().collect();
            let values = self.free.iter().filter(|free| free.is_about(name)).map(|free| free.value.to_bits()).collect();
            let known = self.known.entry((name.clone(), values)).or_default();
            sum += cost(&residuals_beyond(known, &system(&self.free, name)?, &moved, self.effort)?);
        }
        Ok(sum)
    }

    /// Searches; tells `progress` of each parameter that was looked at, in which pass.
    ///
    /// # Errors
    /// When a test cannot be run.
    pub fn search(&mut self, progress: &mut dyn FnMut(u32, &Free)) -> Result<(), FitError> {
        for pass in 1..=PASSES_MAX {
            let mut has_moved = false;
            for halvings in 0..=HALVINGS {
                for index in 0..self.free.len() {
                    let kind = self.free[index].kind;
                    let step = kind.step / f64::from(1 << halvings);
                    has_moved |= self.improve(index, if kind.key == "iommu.entries" { step.ceil() } else { step })?;
                    progress(pass, &self.free[index]);
                }
            }
            if !has_moved {
                break;
            }
        }
        Ok(())
    }

    /// Moves one parameter by steps while that lowers the cost; whether it did.
    fn improve(&mut self, index: usize, step: f64) -> Result<bool, FitError> {
        let mut least = self.cost_of(index)?;
        for direction in [step, -step] {
            let mut has_moved = false;
            for _ in 0..STEPS_MAX {
                let old = self.free[index].value;
                self.free[index].value = rounded((old + direction).max(0.0));
                let cost = self.cost_of(index)?;
                if cost >= least {
                    self.free[index].value = old;
                    break;
                }
                (least, has_moved) = (cost, true);
            }
            if has_moved {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The parameter files with the values found: name and text.
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

impl Free {
    /// Whether it takes part in this system.
    fn is_about(&self, system: &str) -> bool {
        self.file == system || self.file == DEVICE
    }
}

fn free_of(file: &str, kinds: &'static [Parameter]) -> Result<Vec<Free>, FitError> {
    let (text, _) = table_of(file)?;
    let own: Table = config::parse(file, text).map_err(ParameterError::from)?;
    let free = |kind: &'static Parameter| {
        let value = number(&own, kind.key)?;
        Some(Free { file: file.to_owned(), key: kind.key, before: value, value, kind })
    };
    Ok(kinds.iter().filter_map(free).collect())
}

/// A file's text with a parameter's value in place of the old one, its comment kept.
fn written(text: &str, free: &Free) -> String {
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

/// As it can be written.
fn rounded(value: f64) -> f64 {
    let scale = 10_f64.powi(DECIMALS_MAX as i32);
    (value * scale).round() / scale
}

/// `key = number  # comment` with another number, as precise or, where it needs more decimals, more so.
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

    const LITTLE: Effort = Effort { latencies: 400, latencies_filling: 400, transfers: 400 };

    #[test]
    fn a_parameter_that_was_moved_away_is_found_again() {
        let mut fit = Fit::new(&["ib".to_owned()], LITTLE).unwrap();
        fit.free.retain(|free| free.key == "iommu.walk_ns");
        fit.systems[0].1.retain(|fact| fact.statistic == Statistic::AverageNs && fact.test.test == Kind::LatRd);
        let right = fit.free[0].value;
        fit.free[0].value = right + 60.0;
        fit.search(&mut |_, _| ()).unwrap();
        assert!((fit.free[0].value - right).abs() < 25.0, "{} instead of {right}", fit.free[0].value);
    }

    #[test]
    fn files_keep_their_comments_and_change_their_values() {
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
    #[ignore = "searches through all parameters: a minute or two, optimised"]
    fn the_committed_files_are_what_the_search_ends_with() {
        let mut fit = Fit::new(&facts::SYSTEMS.map(str::to_owned), Effort::SEARCH).unwrap();
        fit.search(&mut |_, free| assert_eq!(free.value, free.before, "{} {}", free.file, free.key)).unwrap();
        for (name, text) in fit.files() {
            assert_eq!(parameters::built_in(&name), Some(text.as_str()), "{name}");
        }
    }

    #[test]
    fn what_is_shared_is_free_only_when_all_take_part() {
        let is_device_free = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            Fit::new(&names, LITTLE).unwrap().free().iter().any(|free| free.file == DEVICE)
        };
        assert!(is_device_free(&["hsw", "ib"]));
        assert!(!is_device_free(&["hsw"]));
        assert!(Fit::new(&["bdw".to_owned()], LITTLE).is_err(), "a prediction is never fitted");
    }
}
