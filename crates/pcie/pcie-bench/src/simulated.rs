//! A simulated host in virtual time: `sim:hsw`.

use std::path::Path;

use pcie::host::parameters::built_in;
use pcie::host::{HostError, System};
use pcie::result::Provenance;
use pcie::test::{Numa, Test};

use crate::device::{Device, DeviceInfo, Timer};
use crate::error::{Error, Result};
use crate::files;

/// A device in a simulated host.
pub struct Simulated {
    info: DeviceInfo,
    system: System,
}

impl Simulated {
    /// Opens the system of this name, or of a parameter file (`NAME.toml`), with changed parameters if the name goes on
    /// with `+SECTION.KEY=VALUE`, once for each.
    ///
    /// # Errors
    /// There is no such system or parameter, or its file or value is invalid.
    pub fn open(name: &str) -> Result<Self> {
        // The name of a file may contain the sign too, but hardly together with an equals sign.
        let is_change = |&(at, _): &(usize, &str)| {
            let is_base = built_in(&name[..at]).is_some() || name[..at].ends_with(".toml") && !name.ends_with(".toml");
            is_base || name[at + 1..].split('+').all(|change| change.contains('='))
        };
        let (base, changes) = match name.match_indices('+').find(is_change) {
            Some((at, _)) => (&name[..at], name[at + 1..].split('+').collect()),
            None => (name, Vec::new()),
        };
        let system = if changes.is_empty() { unchanged(base)? } else { changed(base, &changes)? };
        let info = DeviceInfo {
            name: format!("sim:{}", system.name()),
            description: system.description().to_owned(),
            provenance: Provenance::Modelled,
            link: Some(*system.link()),
            prediction: system.parameters().prediction.clone(),
        };
        Ok(Self { info, system })
    }
}

/// Returns the system of this name, or of a parameter file.
fn unchanged(name: &str) -> Result<System> {
    if !name.ends_with(".toml") {
        return System::named(name).map_err(refused);
    }
    let text = files::read_text(Path::new(name))?;
    System::from_toml(name, &text).map_err(refused)
}

/// Returns the system of this name, or of a parameter file, with other values for some parameters.
fn changed(name: &str, changes: &[&str]) -> Result<System> {
    unchanged(name)?;
    let text = match built_in(name) {
        Some(text) => text.to_owned(),
        None => files::read_text(Path::new(name))?,
    };
    System::changed(name, &text, changes).map_err(refused)
}

/// Converts an error of the simulator: its remedy is always another command line.
fn refused(error: HostError) -> Error {
    Error::WrongUse(error.to_string())
}

impl Device for Simulated {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check(&self, test: &Test) -> Result<()> {
        let system = self.system.name();
        if test.numa == Numa::Remote && self.system.parameters().numa.sockets < 2 {
            return Err(refused(HostError::OneSocket { system: system.to_owned() }));
        }
        Ok(())
    }

    /// Does nothing: the simulation sets the state of its caches itself.
    fn prepare(&mut self, _: &Test) -> Result<()> {
        Ok(())
    }

    /// Returns a timer whose reading costs nothing in virtual time.
    fn timer(&self) -> Timer {
        Timer { cost_ns: 0.0, step_ns: self.system.parameters().device.timer_step_ns }
    }

    fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()> {
        self.system.run(test, sink).map(|_| ()).map_err(refused)
    }

    fn bandwidth(&mut self, test: &Test) -> Result<f64> {
        self.system.run(test, &mut |_| {}).map(|summary| summary.elapsed_ns).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::run;
    use crate::testing::test;
    use pcie::result::Outcome;
    use pcie::test::Kind;

    #[test]
    fn a_seed_determines_the_result() {
        let with_seed = |seed| {
            let test = Test { seed, samples: 5_000, ..test(Kind::LatRd) };
            run(&mut Simulated::open("hsw").unwrap(), &test, true).unwrap()
        };
        assert_eq!(with_seed(1), with_seed(1));
        let result = with_seed(2);
        assert_eq!((result.device.as_str(), result.provenance), ("sim:hsw", Provenance::Modelled));
        let Outcome::Latency(latency) = result.outcome else { panic!("a latency") };
        assert_eq!(latency.raw_ns.len(), 5_000);
    }

    #[test]
    fn bandwidth_is_measured_in_virtual_time() {
        let test = Test { samples: 20_000, ..test(Kind::BwRd) };
        let run_once = || run(&mut Simulated::open("ib").unwrap(), &test, false).unwrap();
        assert_eq!(run_once(), run_once());
    }

    #[test]
    fn unknown_systems_and_missing_sockets_are_named() {
        let error = Simulated::open("nonsense").err().unwrap();
        assert!(error.is_wrong_use() && error.to_string().contains("nonsense"), "{error}");
        let error = Simulated::open("hsw+device.tags").err().unwrap();
        assert!(error.is_wrong_use() && error.to_string().contains("SECTION.KEY=VALUE"), "{error}");
        let error = Simulated::open("mine.toml+device.tags").err().unwrap();
        assert!(error.to_string().contains("cannot access mine.toml:"), "{error}");
        let remote = Test { numa: Numa::Remote, ..test(Kind::BwRd) };
        let error = Simulated::open("hsw").unwrap().check(&remote).unwrap_err();
        assert!(error.is_wrong_use() && error.to_string().contains("hsw"), "{error}");
    }
}
