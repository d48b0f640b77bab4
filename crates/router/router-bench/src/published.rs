//! Published results of a cluster of routers over RDMA, compared with a model of the same hardware and with
//! measurements of this machine.
//!
//! *Published*: HiPINEB 2016 (KAIST): ConnectX-3 at 40 Gb/s, E5-2670v3, unreliable connections, SEND and RECV, median
//! one-hop latencies. The batch of each row is not printed; 73.0 / 13.5 is the printed ratio of 5.4, which determines
//! them.
//!
//! *Modelled*: the same steps, each with its minimum time: a doorbell, reads and writes of the host's memory as a
//! device sees them on a Haswell host (`pcie::host`, calibrated on the published PCIe measurements), packets of a card
//! on PCIe (`pcie::model::nic`) and on a line of 40 Gb/s (`netsim`). The work of programs is not included, so the model
//! gives what a tuned program could reach, and the published Ethernet figures are higher.

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

/// The transports between the nodes of the published cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// Ethernet frames between two cards.
    Ethernet,
    /// SEND and RECV of a RoCE card.
    Roce,
}

/// Median one-hop latencies in microseconds by [`FRAME_BYTES`]: transport, packets a message, latencies. *Published.*
pub const LATENCIES_US: [(Transport, u8, [f64; 6]); 5] = [
    (Transport::Ethernet, 1, [2.9, 3.3, 4.0, 5.3, 7.9, 10.3]),
    (Transport::Roce, 1, [1.5, 1.5, 1.5, 2.0, 2.0, 2.5]),
    (Transport::Roce, 8, [2.0, 2.0, 2.5, 3.0, 4.0, 5.0]),
    (Transport::Roce, 16, [3.0, 3.0, 3.5, 4.5, 6.0, 7.5]),
    (Transport::Roce, 32, [4.0, 4.0, 5.0, 6.5, 10.5, 13.5]),
];
/// The same for Ethernet with 1500 B, by packets a batch. *Published.*
pub const ETHERNET_1500_US: [(u8, f64); 6] = [(1, 10.3), (2, 18.0), (4, 31.4), (8, 53.8), (16, 62.1), (32, 73.0)];
/// The same for RoCE, by bytes of a message. *Published.*
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
/// The line rate of the published cards in Gb/s.
const LINE_GBPS: f64 = 40.0;
/// Bytes of RoCE's base transport header and its checksum.
const TRANSPORT_BYTES: u64 = 16;
/// The payload of a RoCE packet: the largest RoCE MTU below that of an Ethernet frame.
const MTU_BYTES: u64 = 1024;
/// The propagation delay of two metres of cable.
const PROPAGATION_NS: f64 = 10.0;
/// A poll of memory that a device has just written: one line from the cache.
const POLL_NS: f64 = 100.0;
/// The modelled host.
const HOST: &str = "hsw";
const READ_SAMPLES: u64 = 400;

/// The reason why the model could not be created.
#[derive(Debug, Error)]
pub enum ModelledError {
    /// The model of the host failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The model of PCIe failed.
    #[error(transparent)]
    Pcie(#[from] ModelError),
}

/// A model of the published hardware.
pub struct Cluster {
    /// The time of a device's read of 64 bytes of the host's memory.
    read_ns: f64,
    model: Model,
    card: NicModel,
    line: LinkRate,
}

impl Cluster {
    /// Creates the model from built-in parts.
    ///
    /// # Errors
    /// Fails if a part cannot be modelled.
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

    /// Returns the part of a latency that does not depend on the message: the time from the doorbell to the first byte
    /// at the sending card, plus the time from the last byte at the receiving card to the program that polls for it. A
    /// read of the host's memory is a round trip, a write is one way.
    fn fixed_ns(&self) -> f64 {
        let one_way_ns = self.read_ns / 2.0;
        one_way_ns + self.read_ns + PROPAGATION_NS + one_way_ns + POLL_NS
    }

    /// Returns the latency of a message of `packets` packets of `bytes` each, in microseconds. *Modelled*: the doorbell
    /// carries the request; packets follow one another on the line as soon as the first has been read.
    pub fn roce_us(&self, packets: u8, bytes: usize) -> f64 {
        self.message_us(u64::from(packets) * bytes as u64)
    }

    /// Returns the latency of a message of `bytes` bytes, in microseconds. *Modelled.*
    pub fn message_us(&self, bytes: u64) -> f64 {
        let packets = bytes.div_ceil(MTU_BYTES).max(1);
        let overhead = u64::from(ETHERNET_BYTES + IP_UDP_BYTES) + TRANSPORT_BYTES;
        (self.fixed_ns() + self.line.transmission_time(bytes + packets * overhead).ns()) / 1000.0
    }

    /// Returns the latency of `packets` frames with one doorbell, in microseconds. *Modelled*, with a tuned driver: the
    /// card fetches descriptors, then frames, and sends at the speed of PCIe or of the line, whichever is slower.
    ///
    /// # Errors
    /// Fails for frame sizes that the PCIe model does not cover.
    pub fn ethernet_us(&self, packets: u8, frame_bytes: usize) -> Result<f64, ModelledError> {
        let on_line = (frame_bytes as u64 + 20).max(u64::from(ETHERNET_BYTES_MIN));
        let span = self.model.span(frame_bytes as u64 - 4, 0)?;
        let crossing = |direction| {
            let traffic = self.card.traffic(&self.model, direction, span);
            traffic.sent_bytes.max(traffic.received_bytes) * 8.0 / self.model.tlp_gbps()
        };
        let slowest_ns = crossing(Direction::Transmit).max(crossing(Direction::Receive));
        let each_ns = slowest_ns.max(self.line.transmission_time(on_line).ns());
        Ok((self.fixed_ns() + self.read_ns + f64::from(packets) * each_ns) / 1000.0)
    }
}

/// Returns the published test that reads one cache line from the host's cache.
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

/// A measurement of this machine with the same size and batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MeasuredHop {
    /// The name of the interconnect.
    pub interconnect: &'static str,
    /// The *measured* median.
    pub p50_us: f64,
}

/// One cell of a published table with the corresponding modelled and measured values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The transport in the published cluster.
    pub transport: Transport,
    /// The number of packets in a message.
    pub batch: u8,
    /// The frame size in bytes; for published message sizes, the size of the message.
    pub bytes: u32,
    /// The *published* median in microseconds.
    pub published_us: f64,
    /// The *modelled* latency in microseconds.
    pub modelled_us: f64,
    /// The *measured* latencies of this machine.
    pub measured: Vec<MeasuredHop>,
}

fn measured_hops(hops: &[Hop], batch: u8, frame_bytes: usize) -> Vec<MeasuredHop> {
    let same = hops.iter().filter(|hop| (hop.batch, hop.frame_bytes) == (batch, frame_bytes));
    same.map(|hop| MeasuredHop { interconnect: hop.interconnect, p50_us: hop.latency.p50_us }).collect()
}

/// Returns the first published table: one-hop latency by size and batch.
///
/// # Errors
/// Fails as [`Cluster::ethernet_us`] does.
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
    let measured = measured_hops(hops, batch, frame_bytes);
    Ok(Cell { transport, batch, bytes: frame_bytes as u32, published_us, modelled_us, measured })
}

/// Returns the second published table: Ethernet's batches of 1500 B, and RoCE by bytes of a message.
///
/// # Errors
/// Fails as [`Cluster::ethernet_us`] does.
pub fn batch_table(cluster: &Cluster, hops: &[Hop]) -> Result<Vec<Cell>, ModelledError> {
    let ethernet = ETHERNET_1500_US
        .into_iter()
        .map(|(batch, published_us)| cell(cluster, hops, (Transport::Ethernet, batch, 1500), published_us));
    let roce = ROCE_MESSAGES_US.into_iter().map(|(bytes, published_us)| {
        let modelled_us = cluster.message_us(u64::from(bytes));
        // One packet is one message; longer messages correspond to the batches of 1500 B above.
        let measured = measured_hops(hops, 1, bytes as usize);
        Ok(Cell { transport: Transport::Roce, batch: 1, bytes, published_us, modelled_us, measured })
    });
    ethernet.chain(roce).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Quantiles;

    #[test]
    fn the_initial_latency_model_of_the_router_fits_the_published_figures_within_220_ns() {
        let model = router::batch::Latency::default();
        let mut squares = Vec::new();
        for (_, batch, row) in LATENCIES_US.into_iter().filter(|(transport, ..)| *transport == Transport::Roce) {
            for (published_us, bytes) in row.into_iter().zip(FRAME_BYTES) {
                let packets = usize::from(batch);
                squares.push((model.expected_ns(packets, packets * bytes) / 1000.0 - published_us).powi(2));
            }
        }
        let rms_us = (squares.iter().sum::<f64>() / squares.len() as f64).sqrt();
        assert!((rms_us - 0.22).abs() < 0.02, "{rms_us} us");
    }

    #[test]
    fn the_model_is_a_lower_bound_of_published_roce_latencies_and_near_them() {
        let cluster = Cluster::new().unwrap();
        assert!((300.0..900.0).contains(&cluster.read_ns), "a read of {} ns", cluster.read_ns);
        for cell in latency_table(&cluster, &[]).unwrap() {
            let ratio = cell.published_us / cell.modelled_us;
            match cell.transport {
                Transport::Roce => assert!((0.7..2.5).contains(&ratio), "{cell:?}: {ratio}"),
                // A weak baseline: a tuned driver takes 1.5 us at 1500 B.
                Transport::Ethernet => assert!((1.5..8.0).contains(&ratio), "{cell:?}: {ratio}"),
            }
        }
        let wire_us = cluster.ethernet_us(32, 1500).unwrap() - cluster.ethernet_us(1, 1500).unwrap();
        assert!((9.0..10.5).contains(&wire_us), "31 frames take {wire_us} us on the line");
    }

    #[test]
    fn measured_hops_are_in_the_cell_of_their_size_and_batch() {
        let cluster = Cluster::new().unwrap();
        let latency = Quantiles { p50_us: 1.25, ..Quantiles::default() };
        let hops = [Hop { interconnect: "lanes", frame_bytes: 1500, batch: 32, latency }];
        let measured_hops =
            |cells: Vec<Cell>| cells.into_iter().filter(|cell| !cell.measured.is_empty()).collect::<Vec<_>>();
        let found = measured_hops(latency_table(&cluster, &hops).unwrap());
        assert_eq!((found.len(), found[0].published_us, found[0].measured[0].p50_us), (1, 13.5, 1.25));
        let found = measured_hops(batch_table(&cluster, &hops).unwrap());
        assert_eq!((found.len(), found[0].published_us, found[0].batch), (1, 73.0, 32));
        assert_eq!(batch_table(&cluster, &[]).unwrap().len(), 17);
    }
}
