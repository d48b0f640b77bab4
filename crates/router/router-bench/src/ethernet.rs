//! Benchmark of forwarding between two virtual Ethernet interfaces: the router with AF_XDP and with AF_PACKET, compared
//! with the Linux kernel's own forwarding between interfaces of the same kind, with the same routes, in the same run.
//!
//! ```text
//!   source ── veth ── node: one of the subjects ── veth ── sink
//! ```
//!
//! All figures are *measured*. The source sends as fast as it can from the first processor; the router forwards on the
//! second. The kernel forwards a packet where it is received, which for virtual Ethernet is in the sender's call. It is
//! therefore measured in two ways: on one processor, and with packets steered to the second one (receive packet
//! steering, RPS). The sink is a kernel without a route for the packets; every figure includes the cost of dropping
//! them. The results are the rate at which packets arrive when more are offered than can be forwarded, and the highest
//! rate without a loss, for IPv4 and IPv6.

mod forwarding;
mod loss_ratios;
mod testbed;
mod topology;
mod traffic;
mod zero_loss;

use std::io;
use std::time::Duration;

use serde::Serialize;

use router_ports::netlink::NetlinkError;
use router_ports::{InterfaceError, ethernet::OpenError};

use crate::core::{IMIX, SIZES, name_of};
use crate::processor;
use crate::statistics::Rounds;
pub use loss_ratios::LossRatios;
use testbed::Testbed;
use traffic::Load;
pub use zero_loss::ZeroLoss;

/// Bytes of a frame check sequence, which virtual Ethernet does not have.
const FCS_BYTES: usize = 4;

/// The shortest frame on virtual Ethernet, in bytes.
const FRAME_BYTES_MIN: usize = 64 - FCS_BYTES;

/// The two families, in the order of every array indexed by family.
const VERSIONS: [Version; 2] = [Version::V4, Version::V6];

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Version {
    /// Returns the version number, 4 or 6.
    pub fn number(self) -> u8 {
        match self {
            Version::V4 => 4,
            Version::V6 => 6,
        }
    }
}

/// What a run measures.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed of destinations.
    pub seed: u64,
    /// Frame sizes for IPv4 and for IPv6, check sequence included.
    pub sizes: [Vec<usize>; 2],
    /// The traffic for which the highest rate without a loss is searched: frame sizes used round robin.
    pub searched: [Vec<Vec<usize>>; 2],
    /// The traffic for which NDR and PDR are searched.
    pub loss_ratios: [Vec<Vec<usize>>; 2],
    /// The rounds of each figure; subjects alternate.
    pub rounds: usize,
    /// The length of a round.
    pub round: Duration,
    /// The frames of each latency distribution.
    pub probes: usize,
    /// The length of a trial of a search.
    pub trial_short: Duration,
    /// The length of the trial that confirms the result of a search.
    pub trial: Duration,
    /// The relative precision of a search.
    pub precision: f64,
    /// The number of routes of each family, each with one destination.
    pub destinations: usize,
}

impl Options {
    /// The options of the committed results: two to three minutes.
    pub fn full() -> Options {
        let searched: Vec<Vec<usize>> = SIZES.iter().map(|size| vec![*size]).chain([IMIX.to_vec()]).collect();
        Options {
            seed: 1,
            sizes: [SIZES.to_vec(), SIZES.to_vec()],
            searched: [searched.clone(), searched],
            loss_ratios: [vec![vec![64], IMIX.to_vec()], vec![vec![64], IMIX.to_vec()]],
            rounds: 5,
            round: Duration::from_millis(150),
            probes: 4000,
            trial_short: Duration::from_millis(50),
            trial: Duration::from_millis(250),
            precision: 0.02,
            destinations: 4000,
        }
    }

    /// The smallest and the largest frames with fewer rounds: some seconds.
    pub fn quick() -> Options {
        Options {
            sizes: [vec![64, 1518], vec![64]],
            searched: [vec![vec![64], IMIX.to_vec()], vec![vec![64]]],
            loss_ratios: [vec![vec![64]], vec![]],
            rounds: 3,
            round: Duration::from_millis(100),
            probes: 500,
            trial_short: Duration::from_millis(15),
            trial: Duration::from_millis(30),
            precision: 0.05,
            ..Options::full()
        }
    }
}

/// What forwards the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// The Linux kernel, on the processor where packets are received: in the sender's call.
    Kernel,
    /// The Linux kernel, with packets steered to the second processor.
    KernelSteered,
    /// The router with AF_XDP.
    Xdp,
    /// The router with AF_PACKET.
    PacketSocket,
}

impl Subject {
    /// All subjects, in the order in which they are measured.
    pub const ALL: [Subject; 4] = [Subject::Kernel, Subject::KernelSteered, Subject::Xdp, Subject::PacketSocket];

    /// Returns the name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Kernel => "kernel",
            Subject::KernelSteered => "kernel, steered",
            Subject::Xdp => "AF_XDP",
            Subject::PacketSocket => "AF_PACKET",
        }
    }
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// The number of routes of each family in the tables.
    pub destinations: usize,
    /// The number of processors of the source and the subjects; with one, they share it.
    pub processors: usize,
    /// The rates and latencies of each subject, by family and size.
    pub cases: Vec<Case>,
    /// The highest rates without a loss.
    pub zero_loss: Vec<ZeroLoss>,
    /// The rates by accepted loss.
    pub loss_ratios: Vec<LossRatios>,
}

/// The results of one subject at one size.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// The subject.
    pub subject: Subject,
    /// 4 or 6.
    pub version: u8,
    /// The frame size, check sequence included.
    pub size_bytes: usize,
    /// The frames that arrived, in millions a second.
    pub mpps: Rounds,
    /// The frames that were offered, in millions a second, in the median round.
    pub offered_mpps: f64,
    /// The latency from the call that sends one frame until it is received, with no other frame in flight.
    pub latency: Latency,
}

/// A distribution of times, in us.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
    /// Frames that did not arrive.
    pub lost: usize,
}

/// The reason why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Network namespaces could not be created.
    #[error("cannot create network namespaces: {0}; run it as root")]
    Namespace(io::Error),
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was attempted.
        doing: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The kernel refused an interface, an address or a route.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// An interface is missing or cannot be used.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// A port could not be opened.
    #[error(transparent)]
    Port(#[from] OpenError),
    /// The router's tables refused a route.
    #[error(transparent)]
    Route(#[from] router::RouteError),
    /// A subject forwards nothing.
    #[error("{subject:?} forwards nothing of IPv{}: {sent} frames were sent, and none arrived", version.number())]
    Silent {
        /// The subject.
        subject: Subject,
        /// The family of the frames.
        version: Version,
        /// The number of frames that were sent.
        sent: usize,
    },
}

fn system(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { doing, source }
}

/// Returns the number of steps that [`measure`] reports.
pub fn steps(options: &Options) -> u64 {
    let sizes: usize = options.sizes.iter().map(Vec::len).sum();
    let searched: usize = options.searched.iter().chain(&options.loss_ratios).map(Vec::len).sum();
    (1 + sizes + searched * Subject::ALL.len()) as u64
}

/// Measures all subjects; `step` is called with the name of each step that begins.
///
/// # Errors
/// Fails if namespaces cannot be created or a subject forwards nothing.
pub fn measure(options: &Options, step: &mut dyn FnMut(&str)) -> Result<Results, Error> {
    step("namespaces");
    let processors = processor::usable().map_or(1, |usable| usable.len());
    let mut testbeds = Vec::new();
    for subject in Subject::ALL {
        testbeds.push(Testbed::new(subject, options)?);
    }
    let (mut cases, mut zero_loss, mut loss_ratios) = (Vec::new(), Vec::new(), Vec::new());
    for (family, version) in VERSIONS.into_iter().enumerate() {
        let (sizes, searched) = (&options.sizes[family], &options.searched[family]);
        for size_bytes in sizes {
            step(&format!("overload and latency, IPv{}, {size_bytes} B", version.number()));
            cases.extend(of_size(&mut testbeds, version, *size_bytes, options)?);
        }
        // A subject carries about the same share of what arrives as at the size before.
        let mut shares = vec![zero_loss::FIRST_SHARE; testbeds.len()];
        for sizes in searched {
            let frame_bytes: Vec<usize> = sizes.iter().map(|size| size - FCS_BYTES).collect();
            let load = Load { version, frame_bytes: &frame_bytes };
            for (testbed, share) in testbeds.iter_mut().zip(&mut shares) {
                let (number, size, subject) = (version.number(), name_of(sizes), testbed.subject().name());
                step(&format!("the highest rate without a loss, IPv{number}, {size} B, {subject}"));
                let (row, found) = zero_loss::search(testbed, load, size, options, *share)?;
                zero_loss.push(row);
                *share = found;
            }
        }
        for sizes in &options.loss_ratios[family] {
            let frame_bytes: Vec<usize> = sizes.iter().map(|size| size - FCS_BYTES).collect();
            let load = Load { version, frame_bytes: &frame_bytes };
            for testbed in &mut testbeds {
                let (number, size, subject) = (version.number(), name_of(sizes), testbed.subject().name());
                step(&format!("NDR and PDR, IPv{number}, {size} B, {subject}"));
                loss_ratios.push(loss_ratios::search(testbed, load, size, options)?);
            }
        }
    }
    Ok(Results { destinations: options.destinations, processors, cases, zero_loss, loss_ratios })
}

/// Measures all subjects in alternating rounds, with frames of one size.
fn of_size(
    testbeds: &mut [Testbed],
    version: Version,
    size_bytes: usize,
    options: &Options,
) -> Result<Vec<Case>, Error> {
    let load = Load { version, frame_bytes: &[size_bytes - FCS_BYTES] };
    let mut arrived = vec![Vec::new(); testbeds.len()];
    let mut offered = vec![Vec::new(); testbeds.len()];
    for _ in 0..options.rounds {
        for (number, testbed) in testbeds.iter_mut().enumerate() {
            let round = testbed.overload(load, options.round)?;
            arrived[number].push(round.arrived_mpps);
            offered[number].push(round.offered_mpps);
        }
    }
    let case = |((testbed, arrived), offered): ((&mut Testbed, Vec<f64>), Vec<f64>)| {
        Ok(Case {
            subject: testbed.subject(),
            version: version.number(),
            size_bytes,
            mpps: Rounds::of_rates(arrived),
            offered_mpps: Rounds::of_rates(offered).median,
            latency: latency(testbed.probe(load, options.probes)?),
        })
    };
    testbeds.iter_mut().zip(arrived).zip(offered).map(case).collect()
}

/// Returns the distribution of the times that frames took; `None` is a frame that did not arrive.
fn latency(times: Vec<Option<Duration>>) -> Latency {
    let mut us: Vec<f64> = times.iter().flatten().map(|time| time.as_secs_f64() * 1e6).collect();
    us.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| us.get(((us.len() as f64 * share) as usize).min(us.len().saturating_sub(1))).copied();
    let value = |share| at(share).unwrap_or(f64::NAN);
    Latency { p50_us: value(0.5), p99_us: value(0.99), max_us: value(1.0), lost: times.len() - us.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_forwards_between_virtual_ethernet() {
        let options = Options {
            sizes: [vec![64, 1518], vec![64]],
            searched: [vec![IMIX.to_vec()], vec![vec![64]]],
            loss_ratios: [vec![], vec![vec![64]]],
            rounds: 1,
            round: Duration::from_millis(20),
            probes: 20,
            trial_short: Duration::from_millis(5),
            trial: Duration::from_millis(10),
            precision: 0.5,
            destinations: 100,
            ..Options::quick()
        };
        let mut begun = Vec::new();
        match measure(&options, &mut |what| begun.push(what.to_owned())) {
            Err(Error::Namespace(error)) => {
                println!(
                    "every_subject_forwards is skipped: cannot create network namespaces ({error}); run it as root"
                );
            }
            Err(error) => panic!("{error}"),
            Ok(results) => {
                // The warm-up has shown that each subject forwards; a test does not check rates.
                assert_eq!(results.cases.len(), 12);
                assert_eq!(begun.len() as u64, steps(&options), "{begun:?}");
                assert!(results.cases.iter().all(|case| case.offered_mpps > 0.0), "{:?}", results.cases);
                let searched: Vec<_> = results.zero_loss.iter().map(|row| (row.version, row.size.as_str())).collect();
                assert_eq!(searched, [[(4, "IMIX"); 4], [(6, "64"); 4]].concat());
                assert!(results.zero_loss.iter().all(|row| row.trials > 0 && row.mpps <= row.mpps_undisturbed));
                let rates: Vec<_> = results.loss_ratios.iter().map(|row| (row.version, row.trials > 0)).collect();
                assert_eq!(rates, [(6, true); 4]);
            }
        }
    }
}
