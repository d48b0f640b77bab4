//! The RNIC's engine in real time, as a library: the code that the packet simulator drives, on a wire.
//!
//! * [`Live`]: a NIC on a wire, given turns by whoever waits for it. It allocates nothing for a packet, looks on for a
//!   bounded time, then sleeps until a packet comes or a timer is due.
//! * [`Wire`]: what carries packets. [`Udp`] speaks RoCEv2, or its selective extension, as the NIC's policy says
//!   (docs/rnic-wire.md); [`Lanes`] are rings in shared memory.
//! * [`Faulty`]: a wire on which packets are lost, late, doubled and spoilt, by a seed.
//!
//! There is no way around the verbs: what stands in for `libibverbs` later posts and polls through [`Live::nic_mut`],
//! brings the memory of its program as a [`rnic::nic::HostMemory`], and gives turns where programs poll and where they
//! sleep for a completion channel. Peers are known by number; names, addresses and GIDs are its own to map.
//!
//! ```
//! use std::time::Duration;
//!
//! use rnic::nic::{ByteMemory, Policy, Profile};
//! use rnic_live::{Live, Udp};
//!
//! let wire = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
//! let mut live = Live::new(Profile::new(Policy::Srnic), ByteMemory::new(4096), wire, 1).unwrap();
//! let cq = live.nic_mut().create_cq(16).unwrap();
//! let mut completions = [Default::default(); 4];
//! assert_eq!(live.completions(cq, &mut completions, Some(Duration::from_millis(1))).unwrap(), 0);
//! ```

mod faulty;
mod lanes;
mod live;
mod udp;
mod wire;

pub use faulty::{Faults, Faulty, Struck};
pub use lanes::{Lanes, WINDOW_BYTES};
pub use live::{ACK_TIMER_CODE, Connection, Live, LiveError, WireCounters};
pub use udp::Udp;
pub use wire::{Arrival, Wire, WireError};
