//! The machine and the build that a measurement was taken with.

mod cores;

use std::fs;

use serde::Serialize;

pub use cores::{CorePair, in_cpu_list};

/// The commit that the program was built from, with `-dirty` if files had changed since. `unknown` outside a
/// repository.
pub const COMMIT: &str = env!("CROSSLANE_COMMIT");
/// The version of the program, with the commit if it is known.
pub const VERSION: &str = env!("CROSSLANE_VERSION");

/// The target that the program was built for, as Rust names it.
pub const TARGET: &str = env!("CROSSLANE_TARGET");

/// The machine and the build, as a report states them.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Model name of the processor.
    pub cpu: String,
    /// Number of cores that this process may use.
    pub cores: usize,
    /// Whether it runs under a hypervisor.
    pub virtual_machine: bool,
    /// Release of Linux.
    pub kernel: String,
    /// Memory in units of 2^30 bytes, if it is known.
    pub memory_gib: Option<f64>,
    /// The cores that the measuring processes are pinned to, if any.
    pub cores_used: Option<CorePair>,
    /// Load average before the run: above a few tenths, other processes shared the cores.
    pub load_1m_before: Option<f64>,
    /// [`COMMIT`].
    pub commit: &'static str,
}

/// Largest load average of an idle machine.
const LOAD_QUIET_MAX: f64 = 0.5;

impl Machine {
    /// Describes this machine.
    pub fn describe(cores_used: Option<CorePair>) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let uname = rustix::system::uname();
        Self {
            cpu: cpu_name(&cpuinfo).unwrap_or_else(|| uname.machine().to_string_lossy().into_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            virtual_machine: cpuinfo.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor")),
            kernel: uname.release().to_string_lossy().into_owned(),
            memory_gib: memory_gib(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
            cores_used,
            load_1m_before: fs::read_to_string("/proc/loadavg")
                .ok()
                .and_then(|text| text.split(' ').next()?.parse().ok()),
            commit: COMMIT,
        }
    }

    /// Returns processor, kernel and commit as a phrase.
    pub fn description(&self) -> String {
        let kind = if self.virtual_machine { "virtual machine" } else { "bare machine" };
        format!("{}, {} cores ({kind}), Linux {}, commit {}", self.cpu, self.cores, self.kernel, self.commit)
    }

    /// Returns a sentence for the head of a report.
    pub fn sentence(&self) -> String {
        let used = self.cores_used.map_or("processes not pinned (fewer than two cores)".to_owned(), |cores| {
            format!("server on core {}, client on core {}", cores.server, cores.client)
        });
        format!("{}; {used}.", self.description())
    }

    /// Returns a warning if other processes used the cores when the run began.
    pub fn busy_warning(&self) -> Option<String> {
        let load = self.load_1m_before.filter(|load| *load > LOAD_QUIET_MAX)?;
        Some(format!(
            "the load average was {load:.2} before the run: other processes use these cores, and the figures vary with \
             them"
        ))
    }
}

fn cpu_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_gib(meminfo: &str) -> Option<f64> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: f64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some((kib / f64::from(1 << 20) * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        assert_eq!(cpu_name("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n").as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(cpu_name(""), None);
        assert_eq!(memory_gib("MemTotal:       16777216 kB\n"), Some(16.0));
        assert_eq!(memory_gib("MemTotal: x"), None);
    }

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::describe(None);
        assert!(machine.cores >= 1 && !machine.kernel.is_empty() && !machine.commit.is_empty());
        assert!(machine.sentence().contains("not pinned"));
    }

    #[test]
    fn a_busy_machine_causes_a_warning() {
        let machine = Machine { load_1m_before: Some(3.0), ..Machine::describe(None) };
        assert!(machine.busy_warning().unwrap().contains("3.00"));
        assert_eq!(Machine { load_1m_before: Some(0.1), ..machine }.busy_warning(), None);
    }
}
