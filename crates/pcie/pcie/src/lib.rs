//! PCI Express in a common vocabulary: the protocol's arithmetic, its packets, and a simulated host.
//!
//! * [`link`]: the parameters of a link: generation, width, payload and request limits.
//! * [`configuration`]: reads the link from the configuration space of a device.
//! * [`tlp`]: the packets of the link, and their size in bytes.
//! * [`model`]: the bandwidth that a link leaves for data, from the protocol's arithmetic alone.
//! * [`host`]: a simulated machine with a device; [`predictions`] compares current servers with published figures.
//! * [`mod@test`] and [`result`]: the five tests of pcie-bench and their results, in one versioned form for models,
//!   simulations, measurements and published data.
//!
//! Nothing here reads a clock or accesses a device: time and randomness are parameters.
//!
//! Source of the method: Neugebauer et al., "Understanding PCIe performance for end host networking", SIGCOMM 2018.

pub mod configuration;
pub mod fit;
pub mod host;
pub mod link;
pub mod model;
pub mod predictions;
pub mod result;
pub mod test;
pub mod tlp;

/// Longest valid time in nanoseconds, one second: a longer one indicates a wrong unit.
pub const NS_MAX: f64 = 1e9;

/// Returns the indented example in `document` that begins with the line `first`.
#[cfg(test)]
fn example(document: &str, first: &str) -> String {
    let lines = document.lines().skip_while(|line| line.trim_start() != first);
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with("    "));
    lines.map(|line| format!("{}\n", line.trim_start())).collect()
}
