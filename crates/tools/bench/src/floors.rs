//! Floors: the times of the machine itself, below which no transport can be. They are measured again next to each
//! sample, because virtual cores move.

use anyhow::{Context, Result};
use serde::Serialize;
use stats::median;

use crate::launch::Launcher;

/// Round trip of one cache line that two cores bounce.
#[derive(Clone, Copy, Debug)]
pub struct CacheLine {
    /// Each bounce timed separately, as the probes time a round trip; ratios use this value.
    pub rtt_ns_p50: f64,
    pub rtt_ns_p99: f64,
    /// Without a reading of the clock between bounces.
    pub rtt_ns_untimed: f64,
}

/// The best of several chunk sizes of a pipeline through shared memory with two copies.
#[derive(Clone, Copy, Debug)]
pub struct CopyPipeline {
    pub bytes_per_s: f64,
    pub chunk_bytes: f64,
}

/// The floors next to one sample; `None` on a machine with one core.
#[derive(Clone, Copy, Debug, Default)]
pub struct FloorSample {
    pub cache_line: Option<CacheLine>,
    pub copy_pipeline: Option<CopyPipeline>,
}

/// Duration of the measurement of each floor.
#[derive(Clone, Copy, Debug)]
pub struct FloorTimes {
    pub line_ms: u64,
    pub copy_ms: u64,
}

pub fn cache_line(launcher: &Launcher, milliseconds: u64) -> Result<Option<CacheLine>> {
    let Some(cores) = launcher.cores else { return Ok(None) };
    let (server, client) = (cores.server.to_string(), cores.client.to_string());
    let found = launcher.floor(&["line", &client, &server, &milliseconds.to_string()])?;
    let each = found.latencies()?.quantiles();
    Ok(Some(CacheLine { rtt_ns_p50: each.p50_ns, rtt_ns_p99: each.p99_ns, rtt_ns_untimed: found.value("untimed_ns")? }))
}

pub fn copy_pipeline(launcher: &Launcher, milliseconds: u64) -> Result<Option<CopyPipeline>> {
    let Some(cores) = launcher.cores else { return Ok(None) };
    let (server, client) = (cores.server.to_string(), cores.client.to_string());
    let found = launcher.floor(&["copy", &client, &server, &milliseconds.to_string()])?;
    let best = found
        .pairs("chunk")
        .max_by(|one, other| one.1.total_cmp(&other.1))
        .context("the copy pipeline found no rate")?;
    Ok(Some(CopyPipeline { bytes_per_s: best.1 * 1e9, chunk_bytes: best.0 }))
}

/// Returns the rate at which one core copies into memory of the kind that windows are, in bytes a second, for each size
/// of a piece.
pub fn mapping(launcher: &Launcher, milliseconds: u64) -> Result<Vec<(u64, f64)>> {
    let core = launcher.client_core().unwrap_or(0).to_string();
    let found = launcher.floor(&["mapping", &core, &milliseconds.to_string()])?;
    Ok(found.pairs("chunk").map(|(bytes, rate)| (bytes as u64, rate * 1e9)).collect())
}

/// Returns the median time of the cheapest system call.
pub fn syscall_ns_p50(launcher: &Launcher, milliseconds: u64) -> Result<f64> {
    let core = launcher.client_core().unwrap_or(0).to_string();
    Ok(launcher.floor(&["syscall", &core, &milliseconds.to_string()])?.latencies()?.quantile_ns(0.5))
}

/// The floors of a whole run: medians of all samples.
#[derive(Clone, Debug, Serialize)]
pub struct FloorSummary {
    pub kind: &'static str,
    pub cache_line_rtt_ns_p50: Option<f64>,
    pub cache_line_rtt_ns_p99: Option<f64>,
    pub cache_line_rtt_ns_untimed: Option<f64>,
    pub cache_line_rtt_ns_p50_lowest: Option<f64>,
    pub cache_line_rtt_ns_p50_highest: Option<f64>,
    pub cache_line_times_taken: usize,
    pub copy_pipeline_gb_per_s: Option<f64>,
    pub copy_pipeline_chunk_bytes: Option<f64>,
    pub syscall_ns_p50: Option<f64>,
}

impl FloorSummary {
    pub fn of(samples: &[FloorSample], syscalls_ns: &[f64]) -> Self {
        let lines: Vec<CacheLine> = samples.iter().filter_map(|floors| floors.cache_line).collect();
        let copies: Vec<CopyPipeline> = samples.iter().filter_map(|floors| floors.copy_pipeline).collect();
        let p50s = || lines.iter().map(|line| line.rtt_ns_p50);
        Self {
            kind: "measured",
            cache_line_rtt_ns_p50: median(p50s()),
            cache_line_rtt_ns_p99: median(lines.iter().map(|line| line.rtt_ns_p99)),
            cache_line_rtt_ns_untimed: median(lines.iter().map(|line| line.rtt_ns_untimed)),
            cache_line_rtt_ns_p50_lowest: p50s().min_by(f64::total_cmp),
            cache_line_rtt_ns_p50_highest: p50s().max_by(f64::total_cmp),
            cache_line_times_taken: lines.len(),
            copy_pipeline_gb_per_s: median(copies.iter().map(|copy| copy.bytes_per_s / 1e9)),
            copy_pipeline_chunk_bytes: median(copies.iter().map(|copy| copy.chunk_bytes)),
            syscall_ns_p50: median(syscalls_ns.iter().copied()),
        }
    }

    /// Returns the floors as one line under a table.
    pub fn sentence(&self) -> String {
        let write = |value: Option<f64>, unit: &str| {
            value.map_or("unknown (one core)".to_owned(), |value| format!("{value:.0} {unit}"))
        };
        let range = match (self.cache_line_rtt_ns_p50_lowest, self.cache_line_rtt_ns_p50_highest) {
            (Some(lowest), Some(highest)) => {
                format!(" (taken {} times: {lowest:.0} to {highest:.0})", self.cache_line_times_taken)
            }
            _ => String::new(),
        };
        let mut text = format!(
            "Floors, what this machine takes at least: a cache line to the other core and back {}{range};",
            write(self.cache_line_rtt_ns_p50, "ns")
        );
        if let Some(gb_per_s) = self.copy_pipeline_gb_per_s {
            text += &format!(" bytes from one core to the other by two copies {gb_per_s:.1} GB/s;");
        }
        text + &format!(" a system call {}.", write(self.syscall_ns_p50, "ns"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_takes_medians_and_the_range() {
        let sample = |ns: f64| FloorSample {
            cache_line: Some(CacheLine { rtt_ns_p50: ns, rtt_ns_p99: 2.0 * ns, rtt_ns_untimed: ns - 10.0 }),
            copy_pipeline: None,
        };
        let summary = FloorSummary::of(&[sample(100.0), sample(390.0), sample(90.0)], &[120.0]);
        assert_eq!(summary.cache_line_rtt_ns_p50, Some(100.0));
        assert_eq!(summary.cache_line_rtt_ns_p50_highest, Some(390.0));
        assert_eq!(summary.copy_pipeline_gb_per_s, None);
        assert_eq!(
            summary.sentence(),
            "Floors, what this machine takes at least: a cache line to the other core and back 100 ns (taken 3 \
             times: 90 to 390); a system call 120 ns."
        );
    }

    #[test]
    fn one_core_has_no_cache_line_floor_and_says_so() {
        assert!(FloorSummary::of(&[FloorSample::default()], &[120.0]).sentence().contains("unknown (one core)"));
    }
}
