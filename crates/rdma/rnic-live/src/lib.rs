//! The RDMA engine in real time, as a library: the code that the packet simulator drives, on real packet I/O.
//!
//! * [`LiveNic`]: a NIC with its packet I/O. It makes progress only while a thread polls it or waits for a completion.
//!   It allocates nothing for a packet, spins for a bounded time, then blocks until a packet arrives or a timer is due.
//! * [`PacketIo`]: sends and receives packets. [`UdpIo`] speaks RoCEv2 or its selective extension, depending on the
//!   NIC's policy (docs/rnic-wire.md); [`LaneIo`] uses rings in shared memory.
//! * [`FaultyIo`]: packet I/O that loses, delays, duplicates and corrupts packets, determined by a seed.
//!
//! Verbs are the only interface. A stand-in for `libibverbs` posts and polls through [`LiveNic::nic_mut`], provides its
//! program's memory as a [`rnic::nic::HostMemory`], and polls the NIC where the program polls and where it waits for a
//! completion channel. Peers are numbers; mapping names, addresses and GIDs to them is up to the caller.
//!
//! ```
//! use std::time::Duration;
//!
//! use rnic::nic::{ByteMemory, TransportPolicy, NicProfile};
//! use rnic_live::{LiveNic, UdpIo};
//!
//! let io = UdpIo::bind("127.0.0.1:0".parse().unwrap()).unwrap();
//! let mut live = LiveNic::new(NicProfile::new(TransportPolicy::Srnic), ByteMemory::new(4096), io, 1).unwrap();
//! let cq = live.nic_mut().create_cq(16).unwrap();
//! let mut completions = [Default::default(); 4];
//! assert_eq!(live.wait_completions(cq, &mut completions, Some(Duration::from_millis(1))).unwrap(), 0);
//! ```

mod faulty;
mod lanes;
mod live_nic;
mod packet_io;
mod udp;

pub use faulty::{FaultCounters, FaultRates, FaultyIo};
pub use lanes::{LaneIo, WINDOW_BYTES};
pub use live_nic::{ACK_TIMER_CODE, LiveError, LiveNic, RNR_TIMER_CODE, ReceiveDrops};
pub use packet_io::{PacketIo, PacketIoError, ReceivedPacket};
pub use udp::UdpIo;
