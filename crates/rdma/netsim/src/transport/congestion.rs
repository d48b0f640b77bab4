//! Constants of congestion controls: presets with their sources, and keys that replace single values.
//!
//! Sources: HPCC's simulator is alibaba-edu/High-Precision-Congestion-Control at 9f4be2a (run.py, rdma-hw.cc), htsim is
//! Broadcom/csg-htsim at 841d9e7 (swift.cpp), ConWeave's simulator is conweave-ns3 at 236a801.

use rnic::nic::{CongestionControl, Dcqcn, Dctcp, NicProfile, Swift, Timely};
use serde::{Deserialize, Serialize};
use sim::Span;

use super::keys::{counter_bytes, mbps, packets, share, time, time_or_zero, window_bytes};
use super::{CongestionAlgorithm, TransportConfig};
use crate::rate::LinkRate;

const BPS_PER_MBPS: f64 = 1e6;

/// What windows and rates begin with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LineRate {
    /// The rate of the host's link.
    pub rate: LinkRate,
    /// The bandwidth-delay product plus one packet.
    pub bdp_bytes: u32,
    /// The window that keeps the link busy: also covers the NIC's own latency, and the packets between two
    /// acknowledgements.
    pub window_bytes: u32,
    /// Links on the longest path.
    pub links: u32,
    /// Longest round-trip time of the empty network. Controls that aim at round-trip times need targets above it.
    pub round_trip: Span,
}

/// A preset of a control whose steps depend on the link's rate. The default is that of the host's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RatePreset {
    /// The paper's, for the link rate of its time.
    #[serde(rename = "paper")]
    Paper,
    /// HPCC's simulator at 100 Gb/s.
    #[serde(rename = "100g")]
    Gbps100,
    /// HPCC's simulator at 400 Gb/s.
    #[serde(rename = "400g")]
    Gbps400,
}

/// The presets of DCTCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DctcpPreset {
    /// The paper's: a gain of 1/16, one packet per round trip.
    Paper,
}

/// The presets of Swift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SwiftPreset {
    /// Htsim's, most of which are guesses.
    Htsim,
}

/// The table `transport.bdp-window`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BdpWindowKeys {
    /// The window. ConWeave's simulator has 104,000 B in two tiers and 156,000 B in three at 100 Gb/s.
    #[serde(deserialize_with = "window_bytes", skip_serializing_if = "Option::is_none")]
    pub window_bytes: Option<u32>,
}

/// The table `transport.dctcp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DctcpKeys {
    /// The constants that the other keys replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<DctcpPreset>,
    /// The weight of the newest round trip in the smoothed share of marked packets.
    #[serde(deserialize_with = "share", skip_serializing_if = "Option::is_none")]
    pub gain: Option<f64>,
    /// The increase per round trip.
    #[serde(deserialize_with = "window_bytes", skip_serializing_if = "Option::is_none")]
    pub increase_bytes: Option<u32>,
    /// The initial window.
    #[serde(deserialize_with = "window_bytes", skip_serializing_if = "Option::is_none")]
    pub initial_window_bytes: Option<u32>,
    /// The maximum window.
    #[serde(deserialize_with = "window_bytes", skip_serializing_if = "Option::is_none")]
    pub max_window_bytes: Option<u32>,
}

/// The table `transport.dcqcn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DcqcnKeys {
    /// The constants that the other keys replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<RatePreset>,
    /// The weight of a notification in alpha (g).
    #[serde(deserialize_with = "share", skip_serializing_if = "Option::is_none")]
    pub gain: Option<f64>,
    /// The period of alpha's timer, in nanoseconds.
    #[serde(deserialize_with = "time", skip_serializing_if = "Option::is_none")]
    pub alpha_interval: Option<f64>,
    /// The period in which the rate is cut at most once, in nanoseconds; 0 cuts it at each notification.
    #[serde(deserialize_with = "time_or_zero", skip_serializing_if = "Option::is_none")]
    pub decrease_interval: Option<f64>,
    /// The period of the increase timer, in nanoseconds.
    #[serde(deserialize_with = "time", skip_serializing_if = "Option::is_none")]
    pub increase_interval: Option<f64>,
    /// Bytes between two increases of the byte counter; 0 for none.
    #[serde(deserialize_with = "counter_bytes", skip_serializing_if = "Option::is_none")]
    pub byte_counter_bytes: Option<u32>,
    /// Increases to the target before the target is raised (F).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_recoveries: Option<u8>,
    /// The step of an additive increase.
    #[serde(deserialize_with = "mbps", skip_serializing_if = "Option::is_none")]
    pub additive_mbps: Option<f64>,
    /// The step of a hyper increase.
    #[serde(deserialize_with = "mbps", skip_serializing_if = "Option::is_none")]
    pub hyper_mbps: Option<f64>,
    /// The minimum rate.
    #[serde(deserialize_with = "mbps", skip_serializing_if = "Option::is_none")]
    pub min_mbps: Option<f64>,
    /// Whether each cut sets the target to the rate before it; otherwise only the first cut after an increase does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clamp_target: Option<bool>,
    /// Minimum time between two notifications of a receiver, in nanoseconds; 0 for one for each marked packet.
    #[serde(deserialize_with = "time_or_zero", skip_serializing_if = "Option::is_none")]
    pub cnp_interval: Option<f64>,
    /// Whether notifications pass data in switches; they do by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cnp_priority: Option<bool>,
}

/// The table `transport.timely`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TimelyKeys {
    /// The constants that the other keys replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<RatePreset>,
    /// The weight of the newest difference of round-trip times (the paper's alpha).
    #[serde(deserialize_with = "share", skip_serializing_if = "Option::is_none")]
    pub gain: Option<f64>,
    /// The factor of decreases.
    #[serde(deserialize_with = "share", skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// Below this round-trip time the rate grows; in nanoseconds.
    #[serde(deserialize_with = "time", skip_serializing_if = "Option::is_none")]
    pub rtt_low: Option<f64>,
    /// Above this round-trip time the rate shrinks; in nanoseconds.
    #[serde(deserialize_with = "time", skip_serializing_if = "Option::is_none")]
    pub rtt_high: Option<f64>,
    /// The round-trip time that differences are divided by; in nanoseconds.
    #[serde(deserialize_with = "time", skip_serializing_if = "Option::is_none")]
    pub rtt_min: Option<f64>,
    /// The step of an increase.
    #[serde(deserialize_with = "mbps", skip_serializing_if = "Option::is_none")]
    pub additive_mbps: Option<f64>,
    /// The step after five increases in a row.
    #[serde(deserialize_with = "mbps", skip_serializing_if = "Option::is_none")]
    pub hyper_mbps: Option<f64>,
    /// The minimum rate.
    #[serde(deserialize_with = "mbps", skip_serializing_if = "Option::is_none")]
    pub min_mbps: Option<f64>,
}

/// The table `transport.swift`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SwiftKeys {
    /// The constants that the other keys replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<SwiftPreset>,
    /// The target round-trip time without its additions, in nanoseconds.
    #[serde(deserialize_with = "time", skip_serializing_if = "Option::is_none")]
    pub base_target: Option<f64>,
    /// The addition for each link of the longest path, in nanoseconds.
    #[serde(deserialize_with = "time_or_zero", skip_serializing_if = "Option::is_none")]
    pub link_target: Option<f64>,
    /// The largest addition for small windows, in nanoseconds.
    #[serde(deserialize_with = "time_or_zero", skip_serializing_if = "Option::is_none")]
    pub scaling_range: Option<f64>,
    /// Windows of so many packets, and smaller ones, have all of `scaling_range`.
    #[serde(deserialize_with = "packets", skip_serializing_if = "Option::is_none")]
    pub scaling_min_packets: Option<f64>,
    /// Windows of so many packets, and larger ones, have none of it.
    #[serde(deserialize_with = "packets", skip_serializing_if = "Option::is_none")]
    pub scaling_max_packets: Option<f64>,
    /// The increase per round trip, in packets.
    #[serde(deserialize_with = "packets", skip_serializing_if = "Option::is_none")]
    pub increase_packets: Option<f64>,
    /// The factor of decreases.
    #[serde(deserialize_with = "share", skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// The largest part by which one decrease shrinks the window.
    #[serde(deserialize_with = "share", skip_serializing_if = "Option::is_none")]
    pub max_decrease: Option<f64>,
    /// The minimum window in packets.
    #[serde(deserialize_with = "packets", skip_serializing_if = "Option::is_none")]
    pub min_window_packets: Option<f64>,
    /// The initial window.
    #[serde(deserialize_with = "window_bytes", skip_serializing_if = "Option::is_none")]
    pub initial_window_bytes: Option<u32>,
    /// The maximum window.
    #[serde(deserialize_with = "window_bytes", skip_serializing_if = "Option::is_none")]
    pub max_window_bytes: Option<u32>,
}

/// Replaces a value by that of a key, if the key is given.
fn set<T, K>(value: &mut T, key: Option<K>, convert: impl FnOnce(K) -> T) {
    if let Some(given) = key {
        *value = convert(given);
    }
}

fn bps(mbps: f64) -> u64 {
    (mbps * BPS_PER_MBPS) as u64
}

fn bps_of(rate: LinkRate) -> u64 {
    rate.mbps() * 1_000_000
}

impl RatePreset {
    /// The rate by which a preset scales its steps.
    fn bps(self) -> Option<u64> {
        match self {
            Self::Paper => None,
            Self::Gbps100 => Some(100_000_000_000),
            Self::Gbps400 => Some(400_000_000_000),
        }
    }
}

impl DctcpKeys {
    fn constants(&self, line: &LineRate, mtu_bytes: u32) -> Dctcp {
        let mut constants = Dctcp::published(line.window_bytes, line.window_bytes, mtu_bytes);
        set(&mut constants.gain, self.gain, |gain| gain as f32);
        set(&mut constants.increase_bytes, self.increase_bytes, |bytes| bytes);
        set(&mut constants.initial_bytes, self.initial_window_bytes, |bytes| bytes);
        constants.bytes_max = constants.bytes_max.max(constants.initial_bytes);
        set(&mut constants.bytes_max, self.max_window_bytes, |bytes| bytes);
        constants
    }
}

impl DcqcnKeys {
    fn constants(&self, line: &LineRate) -> Dcqcn {
        let line_bps = bps_of(line.rate);
        let mut constants = match self.preset {
            Some(RatePreset::Paper) => Dcqcn::published(line_bps),
            preset => Dcqcn::scaled(line_bps, preset.and_then(RatePreset::bps).unwrap_or(line_bps)),
        };
        set(&mut constants.gain, self.gain, |gain| gain as f32);
        set(&mut constants.alpha_ns, self.alpha_interval, |ns| ns as u32);
        set(&mut constants.decrease_ns, self.decrease_interval, |ns| ns as u32);
        set(&mut constants.increase_ns, self.increase_interval, |ns| ns as u32);
        set(&mut constants.byte_counter, self.byte_counter_bytes, |bytes| bytes);
        set(&mut constants.recoveries, self.fast_recoveries, |count| count);
        set(&mut constants.step_bps, self.additive_mbps, bps);
        set(&mut constants.hyper_step_bps, self.hyper_mbps, bps);
        set(&mut constants.least_bps, self.min_mbps, bps);
        set(&mut constants.clamps_target, self.clamp_target, |clamps| clamps);
        set(&mut constants.cnp_period, self.cnp_interval, Span::from_ns);
        constants.least_bps = constants.least_bps.min(line_bps);
        constants
    }
}

impl TimelyKeys {
    /// The paper's port of 10 Gb/s.
    const PAPER_BPS: u64 = 10_000_000_000;

    /// Returns the constants without keys. Without a preset, the three round-trip times grow with that of the network.
    fn preset_constants(&self, line: &LineRate) -> Timely {
        let line_bps = bps_of(line.rate);
        match self.preset {
            Some(RatePreset::Paper) => Timely::scaled(line_bps, Self::PAPER_BPS),
            Some(preset) => Timely::scaled(line_bps, preset.bps().unwrap_or(line_bps)),
            None => {
                let published = Timely::scaled(line_bps, line_bps);
                let factor = (line.round_trip.ns() / published.rtt_min.ns()).max(1.0);
                let times = [published.rtt_low, published.rtt_high, published.rtt_min];
                let [rtt_low, rtt_high, rtt_min] = times.map(|span| Span::from_ns(span.ns() * factor));
                Timely { rtt_low, rtt_high, rtt_min, ..published }
            }
        }
    }

    fn constants(&self, line: &LineRate) -> Timely {
        let mut constants = self.preset_constants(line);
        set(&mut constants.gain, self.gain, |gain| gain as f32);
        set(&mut constants.beta, self.beta, |beta| beta as f32);
        set(&mut constants.rtt_low, self.rtt_low, Span::from_ns);
        set(&mut constants.rtt_high, self.rtt_high, Span::from_ns);
        set(&mut constants.rtt_min, self.rtt_min, Span::from_ns);
        set(&mut constants.step_bps, self.additive_mbps, bps);
        set(&mut constants.hyper_step_bps, self.hyper_mbps, bps);
        set(&mut constants.least_bps, self.min_mbps, bps);
        constants.least_bps = constants.least_bps.min(bps_of(line.rate));
        constants
    }
}

impl SwiftKeys {
    /// Htsim's maximum window in packets.
    const WINDOW_PACKETS_MAX: u32 = 1000;
    /// Without a preset, the base target is at least so many round trips of the empty network: a target that no packet
    /// can meet would shrink every window to its minimum.
    const ROUND_TRIPS_PER_BASE: f64 = 1.25;

    fn constants(&self, line: &LineRate, mtu_bytes: u32) -> Swift {
        let bytes_max = line.window_bytes.max(Self::WINDOW_PACKETS_MAX * mtu_bytes);
        let mut constants = Swift::htsim(line.links, line.window_bytes, bytes_max);
        let htsim_base_ns = Swift::htsim(0, 0, 0).target.ns();
        let fitting_ns = match self.preset {
            Some(SwiftPreset::Htsim) => htsim_base_ns,
            None => htsim_base_ns.max(Self::ROUND_TRIPS_PER_BASE * line.round_trip.ns()),
        };
        let base_ns = self.base_target.unwrap_or(fitting_ns);
        let link_ns = self.link_target.unwrap_or(base_ns / Swift::LINKS_PER_BASE);
        constants.target = Span::from_ns(base_ns + f64::from(line.links) * link_ns);
        constants.scaling_range = Span::from_ns(Swift::RANGE_PER_BASE * base_ns);
        set(&mut constants.scaling_range, self.scaling_range, Span::from_ns);
        set(&mut constants.scaling_window_min, self.scaling_min_packets, |packets| packets as f32);
        set(&mut constants.scaling_window_max, self.scaling_max_packets, |packets| packets as f32);
        set(&mut constants.increase, self.increase_packets, |packets| packets as f32);
        set(&mut constants.beta, self.beta, |beta| beta as f32);
        set(&mut constants.decrease_max, self.max_decrease, |part| part as f32);
        set(&mut constants.window_min, self.min_window_packets, |packets| packets as f32);
        set(&mut constants.initial_bytes, self.initial_window_bytes, |bytes| bytes);
        set(&mut constants.bytes_max, self.max_window_bytes, |bytes| bytes);
        constants
    }
}

impl TransportConfig {
    /// Returns the congestion control with its constants, on a port of this rate.
    pub fn congestion_control(&self, line: &LineRate) -> CongestionControl {
        match self.congestion {
            CongestionAlgorithm::None => CongestionControl::None,
            CongestionAlgorithm::BdpWindow => {
                CongestionControl::BdpWindow { bytes: self.bdp_window.window_bytes.unwrap_or(line.bdp_bytes) }
            }
            CongestionAlgorithm::Dctcp => CongestionControl::Dctcp(self.dctcp.constants(line, self.mtu_bytes)),
            CongestionAlgorithm::Dcqcn => CongestionControl::Dcqcn(self.dcqcn.constants(line)),
            CongestionAlgorithm::Swift => CongestionControl::Swift(self.swift.constants(line, self.mtu_bytes)),
            CongestionAlgorithm::Timely => CongestionControl::Timely(self.timely.constants(line)),
        }
    }

    /// Checks that keys fit each other, for hosts with links of this rate.
    ///
    /// # Errors
    /// One line with the key, its value and the remedy.
    pub fn check(&self, host_rate: LinkRate) -> Result<(), String> {
        self.check_tables()?;
        self.check_window()?;
        let line_mbps = host_rate.mbps() as f64;
        for (table, min_mbps) in [("dcqcn", self.dcqcn.min_mbps), ("timely", self.timely.min_mbps)] {
            if let Some(min_mbps) = min_mbps.filter(|mbps| *mbps > line_mbps) {
                return Err(format!("{table}.min_mbps is {min_mbps}, above the hosts' {line_mbps} Mb/s; write less"));
            }
        }
        let line =
            LineRate { rate: host_rate, bdp_bytes: 0, window_bytes: self.mtu_bytes, links: 1, round_trip: Span::ZERO };
        let (timely, swift) = (self.timely.constants(&line), self.swift.constants(&line, self.mtu_bytes));
        if timely.rtt_low > timely.rtt_high {
            let (low, high) = (timely.rtt_low.ns(), timely.rtt_high.ns());
            return Err(format!("timely.rtt_low is {low} ns, above rtt_high, {high} ns; write at most rtt_high"));
        }
        let (least, most) = (swift.scaling_window_min, swift.scaling_window_max);
        if least >= most {
            return Err(format!(
                "swift.scaling_min_packets is {least}, not below scaling_max_packets, {most}; write less"
            ));
        }
        let windows = [
            ("dctcp", self.dctcp.initial_window_bytes, self.dctcp.max_window_bytes),
            ("swift", self.swift.initial_window_bytes, self.swift.max_window_bytes),
        ];
        for (table, initial, max) in windows {
            if let (Some(initial), Some(max)) = (initial, max)
                && initial > max
            {
                return Err(format!(
                    "{table}.initial_window_bytes is {initial}, above max_window_bytes, {max}; write at most {max}"
                ));
            }
        }
        let (low, high) = (self.irn.timeout_low, self.irn.timeout_high);
        match (low, high) {
            (Some(low), Some(high)) if low > high => {
                Err(format!("irn.timeout_low is {low} ns, above timeout_high, {high} ns; write at most timeout_high"))
            }
            _ => Ok(()),
        }
    }

    fn check_window(&self) -> Result<(), String> {
        let (packets, max) = (self.window_packets, NicProfile::window_packets_max(self.policy));
        if (1..=max).contains(&packets) {
            return Ok(());
        }
        let policy = self.policy.name();
        Err(format!("window_packets is {packets}; write 1 to {max} with policy = \"{policy}\""))
    }

    /// Refuses tables of controls that are not used, because their keys would have no effect.
    fn check_tables(&self) -> Result<(), String> {
        let given = [
            ("bdp-window", CongestionAlgorithm::BdpWindow, self.bdp_window != BdpWindowKeys::default()),
            ("dctcp", CongestionAlgorithm::Dctcp, self.dctcp != DctcpKeys::default()),
            ("dcqcn", CongestionAlgorithm::Dcqcn, self.dcqcn != DcqcnKeys::default()),
            ("swift", CongestionAlgorithm::Swift, self.swift != SwiftKeys::default()),
            ("timely", CongestionAlgorithm::Timely, self.timely != TimelyKeys::default()),
        ];
        match given.iter().find(|(_, control, is_given)| *is_given && *control != self.congestion) {
            Some((name, ..)) => Err(format!(
                "the table {name} has no effect with congestion = \"{}\"; write congestion = \"{name}\", or remove it",
                self.congestion.name()
            )),
            None if self.irn != super::IrnKeys::default() && self.policy != rnic::nic::TransportPolicy::Irn => {
                Err(format!(
                    "the table irn has no effect with policy = \"{}\"; write policy = \"irn\", or remove it",
                    self.policy.name()
                ))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
