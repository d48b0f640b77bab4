//! What a prediction rests on, and how far it may be off.

use serde::Deserialize;

use crate::test::{Iommu, Kind, Numa, Test};

/// Bytes of the smallest transfer whose bandwidth the published figures of current servers support: of smaller ones,
/// the device's rate of requests is the limit, which is assumed.
const LARGE_BYTES: u32 = 1024;

/// A statement about a system whose parameters do not come from measurements of it.
///
/// The errors are in percent of the predicted figure, for a class of tests each; absent ones are not known. Nor are
/// those of tests outside these classes, which no published figure supports.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// The sources of the parameters, in a phrase.
    pub rests_on: String,
    /// Error of latencies without address translation.
    #[serde(default)]
    pub latency_error_percent: Option<f64>,
    /// Error of bandwidths of large transfers in local memory, without address translation.
    #[serde(default)]
    pub bandwidth_error_percent: Option<f64>,
    /// Error of bandwidths of writes in local memory with address translation, and of latencies with it.
    #[serde(default)]
    pub iommu_error_percent: Option<f64>,
}

impl Prediction {
    /// Returns a prediction whose error is not known.
    pub fn unchecked(rests_on: String) -> Self {
        Self { rests_on, latency_error_percent: None, bandwidth_error_percent: None, iommu_error_percent: None }
    }

    /// Returns the stated errors with the keys of a parameter file.
    pub fn errors_percent(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let all = [
            ("prediction.latency_error_percent", self.latency_error_percent),
            ("prediction.bandwidth_error_percent", self.bandwidth_error_percent),
            ("prediction.iommu_error_percent", self.iommu_error_percent),
        ];
        all.into_iter().filter_map(|(key, error)| Some((key, error?)))
    }

    /// Returns the stated error of the figures of `test`, in percent of them.
    pub fn error_percent(&self, test: &Test) -> Option<f64> {
        let is_translated = test.iommu != Iommu::Off;
        match test.test {
            Kind::LatRd | Kind::LatWrrd if is_translated => self.iommu_error_percent,
            Kind::LatRd | Kind::LatWrrd => self.latency_error_percent,
            _ if test.numa == Numa::Remote => None,
            Kind::BwWr if is_translated => self.iommu_error_percent,
            _ if is_translated || test.size_bytes < LARGE_BYTES => None,
            Kind::BwRd | Kind::BwWr | Kind::BwRdwr => self.bandwidth_error_percent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::{Cache, Order};

    #[test]
    fn errors_are_stated_only_for_tests_that_published_figures_support() {
        let prediction = Prediction {
            rests_on: "figures".into(),
            latency_error_percent: Some(1.0),
            bandwidth_error_percent: Some(2.0),
            iommu_error_percent: Some(3.0),
        };
        for (kind, size_bytes, iommu, numa, expected) in [
            (Kind::LatRd, 64, Iommu::Off, Numa::Local, Some(1.0)),
            (Kind::LatWrrd, 64, Iommu::Off, Numa::Remote, Some(1.0)),
            (Kind::LatRd, 64, Iommu::Pages4K, Numa::Local, Some(3.0)),
            (Kind::BwRd, 4096, Iommu::Off, Numa::Local, Some(2.0)),
            (Kind::BwWr, 1024, Iommu::Off, Numa::Local, Some(2.0)),
            (Kind::BwRd, 64, Iommu::Off, Numa::Local, None),
            (Kind::BwRd, 4096, Iommu::Off, Numa::Remote, None),
            (Kind::BwWr, 64, Iommu::Pages4K, Numa::Local, Some(3.0)),
            (Kind::BwWr, 64, Iommu::Pages4K, Numa::Remote, None),
            (Kind::BwRd, 4096, Iommu::Pages4K, Numa::Local, None),
            (Kind::BwRdwr, 4096, Iommu::Pages2M, Numa::Local, None),
        ] {
            let test = Test {
                test: kind,
                size_bytes,
                window_bytes: 8192,
                host_offset_bytes: 0,
                device_offset_bytes: 0,
                order: Order::Random,
                cache: Cache::Cold,
                iommu,
                numa,
                samples: 1,
                seed: 1,
            };
            assert_eq!(prediction.error_percent(&test), expected, "{test:?}");
        }
    }
}
