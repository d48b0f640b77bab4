//! Published figures of current servers, compared with what their simulated counterparts predict.
//!
//! No parameter was fitted to a figure of this list. A system with fewer than two of them states a wide error instead.

use crate::host::parameters::built_in;
use crate::host::prediction::Prediction;
use crate::host::{HostError, Summary, System};
use crate::test::{Cache, Iommu, Kind, Numa, Order, Test};

/// A published figure of a server.
#[derive(Clone, Copy, Debug)]
pub struct PublishedFigure {
    /// Name of the simulated system.
    pub system: &'static str,
    /// The figure, in words.
    pub what: &'static str,
    /// Its value.
    pub published: f64,
    /// Unit of the value.
    pub unit: &'static str,
    /// Whether the figure is a value or a bound.
    pub relation: Relation,
    /// Where it is published.
    pub source: &'static str,
    /// Tests whose error the prediction states for this figure; `None` if it states none.
    class: Option<ErrorClass>,
    predict: fn(&System) -> Result<f64, HostError>,
}

/// How a prediction has to compare with a published figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// The figure measures the predicted quantity.
    Equal,
    /// The measured system had another limit that came first.
    AtLeast,
    /// The figure contains more than the predicted quantity.
    AtMost,
}

/// Classes of tests for which a prediction states an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ErrorClass {
    Latency,
    Bandwidth,
    Iommu,
}

/// A prediction beside the published figure.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The published figure.
    pub figure: PublishedFigure,
    /// The predicted value.
    pub predicted: f64,
    /// Predicted minus published, in percent of the published value; 0 for a bound that is kept.
    pub deviation_percent: f64,
    /// The error that the system's file states, in percent; `None` if it states none.
    pub error_percent: Option<f64>,
}

/// IOTLB misses a MiB of received packets, last level and others, at an MTU of 1500 and of 3690 (Farshin 2023).
const MISSES_PER_MIB_1500: f64 = 510.0;
const MISSES_PER_MIB_3690: f64 = 450.0;
/// IOTLB misses a page of 4 KB on Emerald Rapids with eight cores.
const MISSES_PER_PAGE: f64 = 1.13;
const MIB: f64 = 1_048_576.0;
/// Transfers of each simulated test.
const SAMPLES: u64 = 20_000;
/// Parameters of a host with a device of an earlier generation or with fewer lanes than its own.
const LANES_8: &str = "link.lanes=8";
const GENERATION_4: &str = "link.generation=4";

const THESIS: &str = "Farshin, thesis, KTH 2023; Ice Lake Gold 6346, ConnectX-6 200G";
const AZURE: &str = "Azure AI benchmarking guide; H200 in a Xeon 8480C, copy engine";
const EMERALD: &str = "xlab-uiuc, Fast & Safe on Emerald Rapids, ConnectX-7, 8 cores";
const PLAYBOOK: &str = "LLM training playbook; H100 at Gen4 x8 in an EPYC 7R13";
const MILAN: &str = "Farshin, thesis, KTH 2023; EPYC 74F3, 200G";
const NVBANDWIDTH: &str = "NVIDIA/nvbandwidth issue 24; H100 at Gen5 x16, CPU unnamed";
const MI100: &str = "ROCm issue 2499; EPYC 7003, MI100 at Gen4 x16, rocm-bandwidth-test";
const MI210: &str = "rocm_bandwidth_test issue 129; EPYC 9554, MI210 at Gen4 x16";
const UCX: &str = "openucx/ucx pull request 8062; EPYC, part unnamed, relaxed ordering";
const VT_D: &str = "Linux VT-d patch, February 2023; Sapphire Rapids, 100G, lazy mode, iperf";

/// All published figures.
const FIGURES: [PublishedFigure; 18] = [
    PublishedFigure {
        system: "ice-lake",
        what: "rate from which packets of 3690 B are dropped, 4 KB pages",
        published: 150.0,
        unit: "Gb/s",
        relation: Relation::Equal,
        source: THESIS,
        class: Some(ErrorClass::Iommu),
        predict: |system| rate_of_walks(system, 3690, MISSES_PER_MIB_3690 / MIB),
    },
    PublishedFigure {
        system: "ice-lake",
        what: "bandwidth that is left of writes of 1500 B, 2 MB pages",
        published: 95.0,
        unit: "%",
        relation: Relation::Equal,
        source: THESIS,
        class: Some(ErrorClass::Iommu),
        predict: |system| {
            let packets = |iommu| gbps(system, &Test { order: Order::Sequential, ..test(Kind::BwWr, 1500, iommu) });
            Ok(100.0 * packets(Iommu::Pages2M)? / packets(Iommu::Off)?)
        },
    },
    PublishedFigure {
        system: "ice-lake",
        what: "received TCP, 1500 B, no IOMMU",
        published: 185.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: THESIS,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwWr, 1500, Iommu::Off)),
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "copies from the host to a GPU",
        published: 440.0,
        unit: "Gb/s",
        relation: Relation::Equal,
        source: AZURE,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwRd, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "copies from a GPU to the host",
        published: 440.0,
        unit: "Gb/s",
        relation: Relation::Equal,
        source: AZURE,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwWr, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "received TCP of its successor, strict mode, 4 KB pages",
        published: 229.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: EMERALD,
        class: Some(ErrorClass::Iommu),
        predict: |system| rate_of_walks(system, 4096, MISSES_PER_PAGE / 4096.0),
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "IOTLB misses of its successor, strict mode, 4 KB pages",
        published: MISSES_PER_PAGE * MIB / 4096.0,
        unit: "misses/MiB",
        relation: Relation::Equal,
        source: EMERALD,
        class: None,
        predict: |system| {
            // A page that is unmapped after its use is as if new: so is that of a window far beyond the IOTLB.
            let pages = Test { order: Order::Sequential, ..test(Kind::BwWr, 4096, Iommu::Pages4K) };
            Ok(run(system, &pages)?.iotlb_misses as f64 * MIB / (SAMPLES as f64 * 4096.0))
        },
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "reads of the host by a GPU's kernel",
        published: 281.6,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: NVBANDWIDTH,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwRd, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "writes of the host by a GPU's kernel",
        published: 422.4,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: NVBANDWIDTH,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwWr, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "sapphire-rapids",
        what: "sent TCP, reads of whole pages of 4 KB",
        published: 54.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: VT_D,
        class: None,
        predict: |system| gbps(system, &test(Kind::BwRd, 4096, Iommu::Pages4K)),
    },
    PublishedFigure {
        system: "milan",
        what: "received RDMA, relaxed ordering",
        published: 200.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: UCX,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwWr, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "milan",
        what: "copies between host and GPU, Gen4 x8",
        published: 113.6,
        unit: "Gb/s",
        relation: Relation::Equal,
        source: PLAYBOOK,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(&changed(system, LANES_8)?, &test(Kind::BwRd, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "milan",
        what: "copies between host and GPU in both directions at once, each",
        published: 200.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: MI100,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(system, &test(Kind::BwRdwr, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "milan",
        what: "received packets of 1500 B, 4 KB pages",
        published: 200.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: MILAN,
        class: Some(ErrorClass::Iommu),
        predict: |system| rate_of_walks(system, 1500, MISSES_PER_MIB_1500 / MIB),
    },
    PublishedFigure {
        system: "milan",
        what: "pointer chase of a GPU in host memory, its own path included",
        published: 1400.0,
        unit: "ns",
        relation: Relation::AtMost,
        source: PLAYBOOK,
        class: Some(ErrorClass::Latency),
        predict: |system| {
            let mut latencies_ns = Vec::new();
            changed(system, LANES_8)?.run(&test(Kind::LatRd, 64, Iommu::Off), &mut |ns| latencies_ns.push(ns))?;
            latencies_ns.sort_unstable_by(f64::total_cmp);
            Ok(latencies_ns[latencies_ns.len() / 2])
        },
    },
    PublishedFigure {
        system: "genoa",
        what: "copies between host and GPU, Gen4 x16",
        published: 224.0,
        unit: "Gb/s",
        relation: Relation::Equal,
        source: MI210,
        class: Some(ErrorClass::Bandwidth),
        predict: |system| gbps(&changed(system, GENERATION_4)?, &test(Kind::BwRd, 4096, Iommu::Off)),
    },
    PublishedFigure {
        system: "genoa",
        what: "copies between GPU and memory of the other socket, Gen4 x16",
        published: 224.0,
        unit: "Gb/s",
        relation: Relation::Equal,
        source: MI210,
        class: None,
        predict: |system| gbps(&changed(system, GENERATION_4)?, &remote(Kind::BwRd)),
    },
    PublishedFigure {
        system: "genoa",
        what: "the latter in both directions at once, each",
        published: 180.0,
        unit: "Gb/s",
        relation: Relation::AtLeast,
        source: MI210,
        class: None,
        predict: |system| gbps(&changed(system, GENERATION_4)?, &remote(Kind::BwRdwr)),
    },
];

/// Compares every published figure of `system`, or of all systems, with its prediction.
///
/// # Errors
/// A simulation is not possible.
pub fn compare(system: Option<&str>) -> Result<Vec<Comparison>, HostError> {
    let wanted = |figure: &&PublishedFigure| system.is_none_or(|name| name == figure.system);
    FIGURES.iter().filter(wanted).map(|figure| figure.compare()).collect()
}

impl PublishedFigure {
    fn compare(&self) -> Result<Comparison, HostError> {
        let system = System::named(self.system)?;
        let predicted = (self.predict)(&system)?;
        let percent = (predicted / self.published - 1.0) * 100.0;
        let deviation_percent = match self.relation {
            Relation::Equal => percent,
            Relation::AtLeast => percent.min(0.0),
            Relation::AtMost => percent.max(0.0),
        };
        let prediction = system.parameters().prediction.as_ref();
        let error_percent = prediction.zip(self.class).and_then(|(prediction, class)| class.stated(prediction));
        Ok(Comparison { figure: *self, predicted, deviation_percent, error_percent })
    }
}

impl Comparison {
    /// Returns whether the deviation is within the stated error, if there is one.
    pub fn is_within_error(&self) -> bool {
        self.error_percent.is_none_or(|error| self.deviation_percent.abs() <= error)
    }
}

impl ErrorClass {
    fn stated(self, prediction: &Prediction) -> Option<f64> {
        match self {
            Self::Latency => prediction.latency_error_percent,
            Self::Bandwidth => prediction.bandwidth_error_percent,
            Self::Iommu => prediction.iommu_error_percent,
        }
    }
}

fn test(kind: Kind, size_bytes: u32, iommu: Iommu) -> Test {
    Test {
        test: kind,
        size_bytes,
        window_bytes: 64 << 20,
        host_offset_bytes: 0,
        device_offset_bytes: 0,
        order: Order::Random,
        cache: Cache::Cold,
        iommu,
        numa: Numa::Local,
        samples: SAMPLES,
        seed: 1,
    }
}

fn remote(kind: Kind) -> Test {
    Test { numa: Numa::Remote, ..test(kind, 4096, Iommu::Off) }
}

fn run(system: &System, test: &Test) -> Result<Summary, HostError> {
    system.run(test, &mut |_| ())
}

fn gbps(system: &System, test: &Test) -> Result<f64, HostError> {
    run(system, test).map(|summary| summary.gbps())
}

/// Returns the rate of packets of `bytes`, in Gb/s, that causes as many misses of the IOTLB as the IOMMU can walk, that
/// of writes of which nearly all miss; or what the link carries, if that is less.
fn rate_of_walks(system: &System, bytes: u32, misses_per_byte: f64) -> Result<f64, HostError> {
    let summary = run(system, &test(Kind::BwWr, 64, Iommu::Pages4K))?;
    let misses_per_ns = summary.iotlb_misses as f64 / summary.elapsed_ns;
    Ok(gbps(system, &test(Kind::BwWr, bytes, Iommu::Off))?.min(misses_per_ns / misses_per_byte * 8.0))
}

fn changed(system: &System, change: &str) -> Result<System, HostError> {
    System::changed(system.name(), built_in(system.name()).unwrap_or_default(), &[change])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::names;

    /// The error, in percent, that is wide enough for a system without published figures.
    const WIDE_PERCENT: f64 = 30.0;

    #[test]
    fn predictions_are_within_their_stated_errors() {
        for one in compare(None).unwrap() {
            println!("{} {}: {} of {}", one.figure.system, one.figure.what, one.predicted, one.figure.published);
            assert!(one.is_within_error(), "{one:?}");
            let raw_gbps = System::named(one.figure.system).unwrap().link().raw_gbps();
            assert!(one.figure.unit != "Gb/s" || one.predicted < raw_gbps, "{one:?}: the link has {raw_gbps}");
        }
    }

    #[test]
    fn classes_without_two_published_figures_have_wide_errors_or_none() {
        for name in names() {
            let parameters = System::named(name).unwrap().parameters().clone();
            let Some(prediction) = parameters.prediction else { continue };
            for class in [ErrorClass::Latency, ErrorClass::Bandwidth, ErrorClass::Iommu] {
                let supports = |figure: &&PublishedFigure| figure.system == name && figure.class == Some(class);
                if FIGURES.iter().filter(supports).count() >= 2 {
                    continue;
                }
                assert!(class.stated(&prediction).is_none_or(|error| error >= WIDE_PERCENT), "{name} {class:?}");
            }
        }
    }

    #[test]
    fn a_figure_beyond_the_stated_error_is_found() {
        let figure = FIGURES[0];
        let shifted = |published| PublishedFigure { published, ..figure }.compare().unwrap();
        assert!(!shifted(20.0).is_within_error() && !shifted(1000.0).is_within_error());
        let bound = |relation| PublishedFigure { published: 20.0, relation, ..figure }.compare().unwrap();
        assert!(bound(Relation::AtLeast).is_within_error() && !bound(Relation::AtMost).is_within_error());
    }
}
