//! The rack file: nodes, the device that joins them, the partitions of its windows, and access rules.
//!
//! A [`Rack`] holds the keys of a file, checked as far as possible without examining the machine. A [`RackFile`] keeps
//! the text as well, so that a later error, such as a device that is missing or too small, can name the line
//! ([`RackFile::error_at`]). The text may also be that of keys in etcd, one for each node. [`RunDir`] lists the paths
//! of the sockets, logs and directories of a running rack.
//!
//! Nothing here does I/O beyond reading files. `docs/rack.md` explains every key.

mod access;
mod address;
mod change;
mod check;
mod description;
mod file;
mod fnv;
mod keys;
mod parse;
mod ports;
mod publish;
mod run_dir;
mod schema;
mod text;
mod window_layout;

pub use access::AccessRule;
pub use change::RackChange;
pub use description::{
    ACCESS_PARTS_MAX, CONTROL_PARTITION_BYTES, DATA_PARTITION_BYTES_MIN, Device, LinkTiming,
    MODELLED_PARTITION_BYTES_MIN, NODES_MAX, Node, PAGE_BYTES, PARTITIONS_MAX, Partition, Partitions, Proxy, Rack,
    Timeouts, VERSION, WINDOW_BYTES_MAX,
};
pub use file::RackFile;
pub use keys::{LEASE_PREFIX, is_rack_key};
pub use parse::RackError;
pub use ports::PortList;
pub use publish::Publish;
pub use run_dir::{NodeRunDir, RunDir};
pub use schema::{Access, Backend, Class, Coherence, PciMode, Timing, Trust};
pub use window_layout::{SPAN_BYTES, SPANS_MAX, Spans, WindowLayout};
