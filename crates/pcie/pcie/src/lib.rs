//! PCI Express, three ways, in one vocabulary:
//!
//! * [`link`]: what a link is: generation, width, payload and request limits.
//! * [`configuration`]: what a device's configuration space says of its link.
//! * [`tlp`]: the packets on it, and what each costs in bytes.
//! * [`model`]: what a link leaves for data, by the protocol's arithmetic alone.
//! * [`host`]: a machine with a device in it, simulated.
//! * [`test`] and [`result`]: the five tests of pcie-bench, and what they bring, in one versioned form for models,
//!   simulations, measurements and published data alike.
//!
//! Nothing here reads a clock or touches a device: time and randomness are handed in.
//!
//! Source of the method: Neugebauer et al., "Understanding PCIe performance for end host networking", SIGCOMM 2018.

pub mod configuration;
pub mod fit;
pub mod host;
pub mod link;
pub mod model;
pub mod result;
pub mod test;
pub mod tlp;

/// Returns the indented example in `document` that begins with the line `first`.
#[cfg(test)]
fn example(document: &str, first: &str) -> String {
    let lines = document.lines().skip_while(|line| line.trim_start() != first);
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with("    "));
    lines.map(|line| format!("{}\n", line.trim_start())).collect()
}
