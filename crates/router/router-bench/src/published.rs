//! What was published of a cluster of routers over RDMA, beside what a model says of the same hardware and what was
//! measured here.
//!
//! *Published*: HiPINEB 2016 (KAIST): ConnectX-3 at 40 Gb/s, E5-2670v3, unreliable connections, SEND and RECV, median
//! one-hop latencies. Its rows do not say their batches; 73.0 / 13.5 is the printed ratio of 5.4, which settles them.
//!
//! *Modelled*: the same steps with what each takes at least: a doorbell, reads and writes of the host's memory as a
//! device sees them on a Haswell host (`pcie::host`, calibrated on the published PCIe measurements), packets of a card
//! on PCIe (`pcie::model::nic`) and on a line of 40 Gb/s (`netsim`). What programs do is not in it: so the model says
//! what a tuned one could reach, and the published Ethernet figures are not that.

use netsim::endpoint::{ETHERNET_BYTES, ETHERNET_BYTES_MIN, IP_UDP_BYTES};
use netsim::rate::LinkRate;
use pcie::host::{HostError, System};
use pcie::link::Link;
use pcie::model::nic::{Direction, NicModel};
use pcie::model::{CompletionSize, Mode, Model, ModelError};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use serde::Serialize;
use thiserror::Error;

use crate::interconnect::{ETHERNET_BYTES as FRAME_ETHERNET_BYTES, FRAME_BYTES, Hop};
use crate::statistics::median;

/// How the published cluster carried packets between its nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// Frames between two cards.
    Ethernet,
    /// SEND and RECV of a RoCE card.
    Roce,
}

/// Median one-hop latencies in microseconds by [`FRAME_BYTES`]: with what, packets a message. *Published.*
pub const LATENCIES_US: [(Transport, u8, [f64; 6]); 5] = [
    (Transport::Ethernet, 1, [2.9, 3.3, 4.0, 5.3, 7.9, 10.3]),
    (Transport::Roce, 1, [1.5, 1.5, 1.5, 2.0, 2.0, 2.5]),
    (Transport::Roce, 8, [2.0, 2.0, 2.5, 3.0, 4.0, 5.0]),
    (Transport::Roce, 16, [3.0, 3.0, 3.5, 4.5, 6.0, 7.5]),
    (Transport::Roce, 32, [4.0, 4.0, 5.0, 6.5, 10.5, 13.5]),
];
/// The same of Ethernet with 1500 B, by packets that go together. *Published.*
pub const ETHERNET_1500_US: [(u8, f64); 6] = [(1, 10.3), (2, 18.0), (4, 31.4), (8, 53.8), (16, 62.1), (32, 73.0)];
/// The same of RoCE, by bytes of a message. *Published.*
pub const ROCE_MESSAGES_US: [(u32, f64); 11] = [
    (64, 1.5),
    (128, 1.5),
    (256, 1.5),
    (512, 2.0),
    (1024, 2.0),
    (1500, 2.5),
    (4096, 3.0),
    (8192, 3.5),
    (16_384, 5.5),
    (32_768, 9.0),
    (65_536, 16.5),
];
/// What batching gained at small packets, times. *Published.*
pub const BATCH_GAIN: (f64, f64) = (3.7, 4.8);

/// The line that fits the RoCE rows within 0.22 us (rms), in microseconds.
pub fn fit_us(packets: u8, bytes: usize) -> f64 {
    1.75 + 0.0506 * f64::from(packets - 1) + 0.000_214 * f64::from(packets) * bytes as f64
}

/// Gb/s of the published cards.
const LINE_GBPS: f64 = 40.0;
/// RoCE's base transport header and its checksum.
const TRANSPORT_BYTES: u64 = 16;
/// Payload of a RoCE packet: the largest MTU below an Ethernet frame's.
const MTU_BYTES: u64 = 1024;
/// Two metres of cable.
const PROPAGATION_NS: f64 = 10.0;
/// A look at memory that a device has just written: one line from its cache.
const POLL_NS: f64 = 100.0;
/// The host with whose PCIe it is modelled.
const HOST: &str = "hsw";
const READ_SAMPLES: u64 = 400;

/// Why a model could not be made.
#[derive(Debug, Error)]
pub enum ModelledError {
    /// Of the host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Of PCIe.
    #[error(transparent)]
    Pcie(#[from] ModelError),
}

/// The published hardware, modelled.
pub struct Cluster {
    /// A device's read of 64 bytes of the host's memory.
    read_ns: f64,
    model: Model,
    card: NicModel,
    line: LinkRate,
}

impl Cluster {
    /// Of parts that need no file.
    ///
    /// # Errors
    /// When a part of it cannot be modelled.
    pub fn new() -> Result<Cluster, ModelledError> {
        let host = System::named(HOST)?;
        let test = Test { samples: READ_SAMPLES, ..read_test() };
        let mut reads_ns = Vec::with_capacity(READ_SAMPLES as usize);
        host.run(&test, &mut |ns| reads_ns.push(ns))?;
        let link: Link = *host.link();
        let model = Model::new(Mode::Corrected, link, CompletionSize::default())?;
        let card = NicModel::built_in("dpdk").expect("a card that needs no file");
        let line = LinkRate::from_gbps(LINE_GBPS).expect("a line of 40 Gb/s");
        Ok(Cluster { read_ns: median(reads_ns).unwrap_or(0.0), model, card, line })
    }

    /// From ringing the doorbell to the first byte at the card, and from the last byte at the other card to who waits
    /// for it: a read of the host's memory is there and back, a write one way.
    fn around_ns(&self) -> f64 {
        let one_way_ns = self.read_ns / 2.0;
        one_way_ns + self.read_ns + PROPAGATION_NS + one_way_ns + POLL_NS
    }

    /// A message of `packets` packets of `bytes` each, in microseconds. *Modelled*: the doorbell brings the request;
    /// packets follow one another on the line as soon as the first has been read.
    pub fn roce_us(&self, packets: u8, bytes: usize) -> f64 {
        self.message_us(u64::from(packets) * bytes as u64)
    }

    /// A message of so many bytes, in microseconds. *Modelled.*
    pub fn message_us(&self, bytes: u64) -> f64 {
        let packets = bytes.div_ceil(MTU_BYTES).max(1);
        let overhead = u64::from(ETHERNET_BYTES + IP_UDP_BYTES) + TRANSPORT_BYTES;
        (self.around_ns() + self.line.transmission_time(bytes + packets * overhead).ns()) / 1000.0
    }

    /// `packets` frames of so many bytes with one doorbell, in microseconds. *Modelled*, with a tuned driver: the card
    /// fetches descriptors, then frames, and sends as fast as PCIe or the line allows, whichever is slower.
    ///
    /// # Errors
    /// For frames that PCIe's arithmetic knows nothing of.
    pub fn ethernet_us(&self, packets: u8, frame_bytes: usize) -> Result<f64, ModelledError> {
        let on_line = (frame_bytes as u64 + 20).max(u64::from(ETHERNET_BYTES_MIN));
        let span = self.model.span(frame_bytes as u64 - 4, 0)?;
        let crossing = |direction| {
            let traffic = self.card.traffic(&self.model, direction, span);
            traffic.sent_bytes.max(traffic.received_bytes) * 8.0 / self.model.tlp_gbps()
        };
        let slowest_ns = crossing(Direction::Transmit).max(crossing(Direction::Receive));
        let each_ns = slowest_ns.max(self.line.transmission_time(on_line).ns());
        Ok((self.around_ns() + self.read_ns + f64::from(packets) * each_ns) / 1000.0)
    }
}

/// The published test of one line of memory that is in the host's cache.
fn read_test() -> Test {
    Test {
        test: Kind::LatRd,
        size_bytes: 64,
        window_bytes: 8 << 10,
        host_offset_bytes: 0,
        device_offset_bytes: 0,
        order: Order::default(),
        cache: Cache::HostWarm,
        iommu: Iommu::default(),
        numa: Numa::default(),
        samples: 1,
        seed: 1,
    }
}

/// What was measured here under the same size and batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Beside {
    /// Over which interconnect.
    pub interconnect: &'static str,
    /// *Measured*, the median.
    pub p50_us: f64,
}

/// One cell of a published table, and what stands beside it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// With what, in the published cluster.
    pub transport: Transport,
    /// Packets that go together.
    pub batch: u8,
    /// Bytes of a frame; of the whole message where that was published.
    pub bytes: u32,
    /// *Published*, a median in microseconds.
    pub published_us: f64,
    /// *Modelled*, in microseconds.
    pub modelled_us: f64,
    /// *Measured* here.
    pub measured: Vec<Beside>,
}

fn beside(hops: &[Hop], batch: u8, frame_bytes: usize) -> Vec<Beside> {
    let same = hops.iter().filter(|hop| (hop.batch, hop.frame_bytes) == (batch, frame_bytes));
    same.map(|hop| Beside { interconnect: hop.interconnect, p50_us: hop.latency.p50_us }).collect()
}

/// The first published table: one-hop latency by size and batch.
///
/// # Errors
/// See [`Cluster::ethernet_us`].
pub fn latency_table(cluster: &Cluster, hops: &[Hop]) -> Result<Vec<Cell>, ModelledError> {
    let mut cells = Vec::new();
    for (transport, batch, row) in LATENCIES_US {
        for (published_us, frame_bytes) in row.into_iter().zip(FRAME_BYTES) {
            cells.push(cell(cluster, hops, (transport, batch, frame_bytes), published_us)?);
        }
    }
    Ok(cells)
}

fn cell(
    cluster: &Cluster,
    hops: &[Hop],
    (transport, batch, frame_bytes): (Transport, u8, usize),
    published_us: f64,
) -> Result<Cell, ModelledError> {
    let modelled_us = match transport {
        Transport::Ethernet => cluster.ethernet_us(batch, frame_bytes)?,
        Transport::Roce => cluster.roce_us(batch, frame_bytes - FRAME_ETHERNET_BYTES),
    };
    let measured = beside(hops, batch, frame_bytes);
    Ok(Cell { transport, batch, bytes: frame_bytes as u32, published_us, modelled_us, measured })
}

/// The second published table: Ethernet's batches of 1500 B, and RoCE by bytes of a message.
///
/// # Errors
/// See [`Cluster::ethernet_us`].
pub fn batch_table(cluster: &Cluster, hops: &[Hop]) -> Result<Vec<Cell>, ModelledError> {
    let ethernet = ETHERNET_1500_US
        .into_iter()
        .map(|(batch, published_us)| cell(cluster, hops, (Transport::Ethernet, batch, 1500), published_us));
    let roce = ROCE_MESSAGES_US.into_iter().map(|(bytes, published_us)| {
        let modelled_us = cluster.message_us(u64::from(bytes));
        // One packet is one message; longer messages are what batches of 1500 B above are.
        let measured = beside(hops, 1, bytes as usize);
        Ok(Cell { transport: Transport::Roce, batch: 1, bytes, published_us, modelled_us, measured })
    });
    ethernet.chain(roce).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Quantiles;

    #[test]
    fn the_line_fits_the_published_rows_as_it_says() {
        let mut squares = Vec::new();
        for (_, batch, row) in LATENCIES_US.into_iter().filter(|(transport, ..)| *transport == Transport::Roce) {
            for (published_us, bytes) in row.into_iter().zip(FRAME_BYTES) {
                squares.push((fit_us(batch, bytes) - published_us).powi(2));
            }
        }
        let rms_us = (squares.iter().sum::<f64>() / squares.len() as f64).sqrt();
        assert!((rms_us - 0.22).abs() < 0.02, "{rms_us} us");
    }

    #[test]
    fn the_model_is_a_bound_for_what_was_published_of_roce_and_not_far_below_it() {
        let cluster = Cluster::new().unwrap();
        assert!((300.0..900.0).contains(&cluster.read_ns), "a read of {} ns", cluster.read_ns);
        for cell in latency_table(&cluster, &[]).unwrap() {
            let ratio = cell.published_us / cell.modelled_us;
            match cell.transport {
                Transport::Roce => assert!((0.7..2.5).contains(&ratio), "{cell:?}: {ratio}"),
                // A weak baseline: a tuned one takes 1.5 us at 1500 B.
                Transport::Ethernet => assert!((1.5..8.0).contains(&ratio), "{cell:?}: {ratio}"),
            }
        }
        let wire_us = cluster.ethernet_us(32, 1500).unwrap() - cluster.ethernet_us(1, 1500).unwrap();
        assert!((9.0..10.5).contains(&wire_us), "31 frames take {wire_us} us on the line");
    }

    #[test]
    fn what_was_measured_stands_beside_the_same_size_and_batch() {
        let cluster = Cluster::new().unwrap();
        let latency = Quantiles { p50_us: 1.25, ..Quantiles::default() };
        let hops = [Hop { interconnect: "lanes", frame_bytes: 1500, batch: 32, latency }];
        let beside = |cells: Vec<Cell>| cells.into_iter().filter(|cell| !cell.measured.is_empty()).collect::<Vec<_>>();
        let found = beside(latency_table(&cluster, &hops).unwrap());
        assert_eq!((found.len(), found[0].published_us, found[0].measured[0].p50_us), (1, 13.5, 1.25));
        let found = beside(batch_table(&cluster, &hops).unwrap());
        assert_eq!((found.len(), found[0].published_us, found[0].batch), (1, 73.0, 32));
        assert_eq!(batch_table(&cluster, &[]).unwrap().len(), 17);
    }
}
