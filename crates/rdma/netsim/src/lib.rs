//! A packet-level network simulator: switches, links, topologies and workloads around RDMA transport endpoints.

pub mod endpoint;
pub mod experiments;
pub mod ideal;
pub mod impairment;
pub mod import;
pub mod network;
mod packet;
pub mod pcap;
pub mod rate;
pub mod rdma;
pub mod results;
pub mod scenario;
pub mod series;
pub mod sliding_window;
pub mod switch;
pub mod topology;
pub mod transport;
pub mod workload;

pub use packet::{PACKET_BYTES_MAX, TrafficClass};
