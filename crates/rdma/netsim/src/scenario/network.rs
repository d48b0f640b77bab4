//! The tables `switches` and `lines` of a scenario file.

use config::bytes;
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use sim::Span;

use super::simulated_ns;
use crate::impairment::{GilbertElliott, Impairments, Loss};
use crate::switch::{Ecn, LoadBalancing, Pfc, SwitchConfig};
use crate::topology::{NetworkNode, Topology};

/// Accepts a probability.
pub(super) fn probability<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    Err(D::Error::custom(format!("'{value}' is not a probability; write a number from 0 to 1")))
}

/// Accepts a positive number.
fn positive<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if value > 0.0 && value.is_finite() {
        return Ok(value);
    }
    Err(D::Error::custom(format!("'{value}' is not above 0; write a positive number")))
}

/// Settings of the switches, with [`SwitchConfig::default`] where the file gives none.
#[derive(Debug, Default, Deserialize)]
#[serde(try_from = "SwitchesFile")]
pub(super) struct SwitchesTable(pub SwitchConfig);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SwitchesFile {
    #[serde(deserialize_with = "bytes")]
    buffer_bytes: u64,
    #[serde(deserialize_with = "positive")]
    alpha: f64,
    ecn: bool,
    ecn_preset: EcnPreset,
    #[serde(deserialize_with = "optional_bytes")]
    ecn_kmin_bytes: Option<u64>,
    #[serde(deserialize_with = "optional_bytes")]
    ecn_kmax_bytes: Option<u64>,
    #[serde(deserialize_with = "optional_probability")]
    ecn_pmax: Option<f64>,
    pfc: bool,
    #[serde(deserialize_with = "positive")]
    pfc_alpha: f64,
    #[serde(deserialize_with = "bytes")]
    pfc_hysteresis_bytes: u64,
    trimming: bool,
    spreading: SpreadingName,
}

/// Marking thresholds that belong to a congestion control.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum EcnPreset {
    #[default]
    Dcqcn,
    DcqcnPaper,
    Dctcp,
}

impl EcnPreset {
    fn thresholds(self) -> Ecn {
        match self {
            Self::Dcqcn => Ecn::DCQCN,
            Self::DcqcnPaper => Ecn::DCQCN_PAPER,
            Self::Dctcp => Ecn::DCTCP,
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SpreadingName {
    Flow,
    Spray,
}

impl Default for SwitchesFile {
    fn default() -> Self {
        let (config, pfc) = (SwitchConfig::default(), Pfc::default());
        Self {
            buffer_bytes: config.buffer_bytes,
            alpha: config.alpha,
            ecn: true,
            ecn_preset: EcnPreset::default(),
            ecn_kmin_bytes: None,
            ecn_kmax_bytes: None,
            ecn_pmax: None,
            pfc: false,
            pfc_alpha: pfc.alpha,
            pfc_hysteresis_bytes: pfc.hysteresis_bytes,
            trimming: false,
            spreading: SpreadingName::Flow,
        }
    }
}

fn optional_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    bytes(deserializer).map(Some)
}

fn optional_probability<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    probability(deserializer).map(Some)
}

impl TryFrom<SwitchesFile> for SwitchesTable {
    type Error = String;

    fn try_from(file: SwitchesFile) -> Result<Self, String> {
        let preset = file.ecn_preset.thresholds();
        let ecn = Ecn {
            kmin_bytes: file.ecn_kmin_bytes.unwrap_or(preset.kmin_bytes),
            kmax_bytes: file.ecn_kmax_bytes.unwrap_or(preset.kmax_bytes),
            pmax: file.ecn_pmax.unwrap_or(preset.pmax),
        };
        let Ecn { kmin_bytes, kmax_bytes, .. } = ecn;
        if kmin_bytes > kmax_bytes {
            return Err(format!(
                "ecn_kmin_bytes is {kmin_bytes}, above ecn_kmax_bytes, {kmax_bytes}; write at most ecn_kmax_bytes"
            ));
        }
        let pfc = Pfc { alpha: file.pfc_alpha, hysteresis_bytes: file.pfc_hysteresis_bytes };
        Ok(Self(SwitchConfig {
            buffer_bytes: file.buffer_bytes,
            alpha: file.alpha,
            ecn: file.ecn.then_some(ecn),
            pfc: file.pfc.then_some(pfc),
            trimming: file.trimming,
            load_balancing: match file.spreading {
                SpreadingName::Flow => LoadBalancing::Ecmp,
                SpreadingName::Spray => LoadBalancing::PacketSpraying,
            },
        }))
    }
}

/// Impairments of links, in both directions.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinksTable {
    /// The impaired links.
    #[serde(default)]
    between: LinkSelection,
    #[serde(default, deserialize_with = "probability")]
    loss: f64,
    #[serde(default)]
    bursts: Option<GilbertElliottFile>,
    #[serde(default, deserialize_with = "probability")]
    reorder: f64,
    #[serde(default, deserialize_with = "simulated_ns")]
    reorder_delay: f64,
    #[serde(default, deserialize_with = "probability")]
    duplicate: f64,
    #[serde(default, deserialize_with = "probability")]
    corrupt: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum LinkSelection {
    #[default]
    All,
    Hosts,
    Switches,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GilbertElliottFile {
    #[serde(deserialize_with = "probability")]
    to_bad: f64,
    #[serde(deserialize_with = "probability")]
    to_good: f64,
    #[serde(default, deserialize_with = "probability")]
    loss_good: f64,
    #[serde(deserialize_with = "probability")]
    loss_bad: f64,
}

impl LinksTable {
    pub fn impairments(&self, topology: &Topology) -> Vec<(usize, usize, Impairments)> {
        let loss = match self.bursts {
            Some(GilbertElliottFile { to_bad, to_good, loss_good, loss_bad }) => {
                Loss::GilbertElliott(GilbertElliott { to_bad, to_good, loss_good, loss_bad })
            }
            None if self.loss > 0.0 => Loss::Uniform(self.loss),
            None => Loss::None,
        };
        let config = Impairments {
            loss,
            reorder: self.reorder,
            reorder_delay_max: Span::from_ns(self.reorder_delay),
            duplicate: self.duplicate,
            corrupt: self.corrupt,
        };
        if config.is_none() {
            return Vec::new();
        }
        let is_host_link = |ends: &[NetworkNode; 2]| ends.iter().any(|end| matches!(end, NetworkNode::Host(_)));
        let is_selected = |ends: &[NetworkNode; 2]| match self.between {
            LinkSelection::All => true,
            LinkSelection::Hosts => is_host_link(ends),
            LinkSelection::Switches => !is_host_link(ends),
        };
        let links = topology.links().iter().enumerate().filter(|(_, link)| is_selected(&link.ends));
        links.flat_map(|(link, _)| [(link, 0, config.clone()), (link, 1, config.clone())]).collect()
    }
}
