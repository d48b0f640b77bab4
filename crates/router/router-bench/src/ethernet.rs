//! Forwarding between two virtual Ethernet interfaces: the router by AF_XDP and by AF_PACKET, beside the Linux kernel's
//! own forwarding between interfaces of the same kind, with the same routes, in the same run.
//!
//! ```text
//!   source ── veth ── node: one of the subjects ── veth ── sink
//! ```
//!
//! All figures are *measured*. The source sends as fast as it can from the first processor; each of the router's
//! subjects forwards on the second. The kernel forwards a packet wherever it is received, which for virtual Ethernet is
//! in the sender's call: so it is measured like that, on one processor, and with packets steered to the second (RPS).
//! The sink is a kernel that has no route for what comes: dropping it is a part of every figure. What is reported is
//! what arrives while more is offered than can be forwarded, and the highest rate at which nothing is lost; of IPv4 and
//! of IPv6.

mod bed;
mod subject;
mod traffic;
mod zero_loss;

use std::io;
use std::time::Duration;

use serde::Serialize;

use router_ports::netlink::NetlinkError;
use router_ports::{InterfaceError, ethernet::OpenError};

use crate::core::{IMIX, SIZES, name_of};
use crate::fib::Rounds;
use bed::Bed;
use traffic::Load;
pub use zero_loss::ZeroLoss;

/// Bytes of a frame check sequence, which virtual Ethernet has not.
const FCS_BYTES: usize = 4;

/// The shortest frame there, in bytes.
const FRAME_BYTES_MIN: usize = 64 - FCS_BYTES;

/// The two families, in the order in which everything of them is kept.
const VERSIONS: [Version; 2] = [Version::V4, Version::V6];

/// Which family packets are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Version {
    /// 4 or 6.
    pub fn number(self) -> u8 {
        match self {
            Version::V4 => 4,
            Version::V6 => 6,
        }
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of destinations.
    pub seed: u64,
    /// Sizes of frames, check sequence included, of IPv4 and of IPv6.
    pub sizes: [Vec<usize>; 2],
    /// What is searched for the highest rate without a loss: sizes that frames have in turn.
    pub searched: [Vec<Vec<usize>>; 2],
    /// Rounds of each figure; subjects take turns.
    pub rounds: usize,
    /// How long a round is.
    pub round: Duration,
    /// Frames of each latency's distribution.
    pub probes: usize,
    /// How long a trial of a search is.
    pub trial_short: Duration,
    /// How long the trial is that holds what a search found.
    pub trial: Duration,
    /// The part to which a search knows a rate.
    pub precision: f64,
    /// Routes of each family, each with a destination.
    pub destinations: usize,
}

impl Options {
    /// As reported: two to three minutes.
    pub fn full() -> Options {
        let searched: Vec<Vec<usize>> = SIZES.iter().map(|size| vec![*size]).chain([IMIX.to_vec()]).collect();
        Options {
            seed: 1,
            sizes: [SIZES.to_vec(), SIZES.to_vec()],
            searched: [searched.clone(), searched],
            rounds: 5,
            round: Duration::from_millis(150),
            probes: 4000,
            trial_short: Duration::from_millis(50),
            trial: Duration::from_millis(250),
            precision: 0.02,
            destinations: 4000,
        }
    }

    /// The smallest and the largest frames, fewer rounds: some seconds.
    pub fn quick() -> Options {
        Options {
            sizes: [vec![64, 1518], vec![64]],
            searched: [vec![vec![64], IMIX.to_vec()], vec![vec![64]]],
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

/// Who forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// The Linux kernel, where packets are received: in the sender's call.
    Kernel,
    /// The Linux kernel, with packets steered to the second processor.
    KernelSteered,
    /// The router, by AF_XDP.
    Xdp,
    /// The router, by AF_PACKET.
    PacketSocket,
}

impl Subject {
    /// All, in the order of their turns.
    pub const ALL: [Subject; 4] = [Subject::Kernel, Subject::KernelSteered, Subject::Xdp, Subject::PacketSocket];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Kernel => "kernel",
            Subject::KernelSteered => "kernel, steered",
            Subject::Xdp => "AF_XDP",
            Subject::PacketSocket => "AF_PACKET",
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// Routes of each family in the tables.
    pub destinations: usize,
    /// Processors that the source and the subjects had: with one, all share it.
    pub processors: usize,
    /// Each subject by family and size.
    pub cases: Vec<Case>,
    /// The highest rates without a loss.
    pub zero_loss: Vec<ZeroLoss>,
}

/// One subject and size.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Who.
    pub subject: Subject,
    /// 4 or 6.
    pub version: u8,
    /// Of a frame, check sequence included.
    pub size_bytes: usize,
    /// What arrived, in millions of frames a second.
    pub mpps: Rounds,
    /// What was offered meanwhile, in the median round.
    pub offered_mpps: f64,
    /// From the call that sends one frame until it is received, with nothing else under way.
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

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not without privileges.
    #[error("no network namespaces of its own: {0}; run it as root")]
    Namespace(io::Error),
    /// The system refuses something else.
    #[error("{doing}: {source}")]
    System {
        /// What was asked for.
        doing: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The kernel refuses interfaces, addresses or routes.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// An interface is not as expected.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// A port cannot be opened.
    #[error(transparent)]
    Port(#[from] OpenError),
    /// The router's tables refuse.
    #[error(transparent)]
    Route(#[from] router::RouteError),
    /// Nothing comes through.
    #[error("{subject:?} forwards nothing of IPv{}: {sent} frames were sent, and none arrived", version.number())]
    Silent {
        /// Who.
        subject: Subject,
        /// Of which family.
        version: Version,
        /// How many in vain.
        sent: usize,
    },
}

fn system(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { doing, source }
}

/// How often [`measure`] says that something begins.
pub fn steps(options: &Options) -> u64 {
    let sizes: usize = options.sizes.iter().map(Vec::len).sum();
    let searched: usize = options.searched.iter().map(Vec::len).sum();
    (1 + sizes + searched * Subject::ALL.len()) as u64
}

/// Measures all subjects; `step` hears what begins.
///
/// # Errors
/// When there are no namespaces to be had, or somebody forwards nothing.
pub fn measure(options: &Options, step: &mut dyn FnMut(&str)) -> Result<Results, Error> {
    step("namespaces");
    let processors = bed::processors();
    let mut beds = Vec::new();
    for subject in Subject::ALL {
        beds.push(Bed::new(subject, options)?);
    }
    let (mut cases, mut zero_loss) = (Vec::new(), Vec::new());
    for (version, (sizes, searched)) in VERSIONS.into_iter().zip(options.sizes.iter().zip(&options.searched)) {
        for size_bytes in sizes {
            step(&format!("overload and latency, IPv{}, {size_bytes} B", version.number()));
            cases.extend(of_size(&mut beds, version, *size_bytes, options)?);
        }
        // Of one size a subject carries about the same share of what arrives as of the size before it.
        let mut shares = vec![zero_loss::FIRST_SHARE; beds.len()];
        for sizes in searched {
            let frame_bytes: Vec<usize> = sizes.iter().map(|size| size - FCS_BYTES).collect();
            let load = Load { version, frame_bytes: &frame_bytes };
            for (bed, share) in beds.iter_mut().zip(&mut shares) {
                let (number, size, subject) = (version.number(), name_of(sizes), bed.subject().name());
                step(&format!("the highest rate without a loss, IPv{number}, {size} B, {subject}"));
                let (row, found) = zero_loss::search(bed, load, size, options, *share)?;
                zero_loss.push(row);
                *share = found;
            }
        }
    }
    Ok(Results { destinations: options.destinations, processors, cases, zero_loss })
}

/// All subjects in turns, with frames of one size.
fn of_size(beds: &mut [Bed], version: Version, size_bytes: usize, options: &Options) -> Result<Vec<Case>, Error> {
    let load = Load { version, frame_bytes: &[size_bytes - FCS_BYTES] };
    let mut arrived = vec![Vec::new(); beds.len()];
    let mut offered = vec![Vec::new(); beds.len()];
    for _ in 0..options.rounds {
        for (number, bed) in beds.iter_mut().enumerate() {
            let round = bed.overload(load, options.round)?;
            arrived[number].push(round.arrived_mpps);
            offered[number].push(round.offered_mpps);
        }
    }
    let case = |((bed, arrived), offered): ((&mut Bed, Vec<f64>), Vec<f64>)| {
        Ok(Case {
            subject: bed.subject(),
            version: version.number(),
            size_bytes,
            mpps: rounds(arrived),
            offered_mpps: rounds(offered).median,
            latency: latency(bed.probe(load, options.probes)?),
        })
    };
    beds.iter_mut().zip(arrived).zip(offered).map(case).collect()
}

fn rounds(mut values: Vec<f64>) -> Rounds {
    values.sort_unstable_by(f64::total_cmp);
    Rounds { median: values[values.len() / 2], best: values[values.len() - 1] }
}

/// Of times that frames took; `None` is a frame that did not arrive.
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
                    "every_subject_forwards is skipped: no network namespaces of its own ({error}); run it as root"
                );
            }
            Err(error) => panic!("{error}"),
            Ok(results) => {
                // That each forwards was seen before anything was measured; how fast, on a busy machine, is no matter.
                assert_eq!(results.cases.len(), 12);
                assert_eq!(begun.len() as u64, steps(&options), "{begun:?}");
                assert!(results.cases.iter().all(|case| case.offered_mpps > 0.0), "{:?}", results.cases);
                let searched: Vec<_> = results.zero_loss.iter().map(|row| (row.version, row.size.as_str())).collect();
                assert_eq!(searched, [[(4, "IMIX"); 4], [(6, "64"); 4]].concat());
                assert!(results.zero_loss.iter().all(|row| row.trials > 0 && row.mpps <= row.mpps_undisturbed));
            }
        }
    }
}
