//! The memory and the queues of the NIC: a slot for each message that may be sent, and for each that may arrive.

use rnic::nic::{ByteMemory, CqNumber, Nic, NicError, SrqNumber};
use rnic::verbs::{AccessFlags, LKey, ProtectionDomain, ReceiveRequest, Registration, SGES_MAX, Sge};
use router::NODES_MAX;
use router::batch::FIXED_PACKETS_MAX;
use router::batch::message::{DESCRIPTOR_BYTES, HEADER_BYTES};

/// One message holds a full batch of maximum-size Ethernet packets: 48 KiB.
pub(super) const SLOT_BYTES: usize = 48 << 10;
/// Length of a maximum-size Ethernet packet.
const PACKET_BYTES_USUAL: usize = 1518;
/// Slots of messages to send.
pub(super) const SENDS: usize = 64;
/// Slots of messages to receive: twice what one poll of the NIC receives.
pub(super) const RECEIVES: usize = 2 * POLL_PACKETS_MAX;
pub(super) const POLL_PACKETS_MAX: usize = 64;
const MEMORY_BYTES: usize = (SENDS + RECEIVES) * SLOT_BYTES;

const _: () = assert!(
    HEADER_BYTES + FIXED_PACKETS_MAX * (DESCRIPTOR_BYTES + PACKET_BYTES_USUAL) + size_of::<u64>() <= SLOT_BYTES,
    "with its token"
);

/// The objects that all queue pairs share.
pub(super) struct Queues {
    key: LKey,
    pub(super) domain: ProtectionDomain,
    pub(super) send_cq: CqNumber,
    pub(super) receive_cq: CqNumber,
    pub(super) srq: SrqNumber,
}

impl Queues {
    /// Creates the queues, and posts a receive request for each slot.
    pub(super) fn new(nic: &mut Nic<ByteMemory>) -> Result<Self, NicError> {
        let domain = nic.allocate_domain()?;
        let access = AccessFlags::LOCAL_WRITE;
        let registration = Registration { domain, host_address: 0, address: 0, bytes: MEMORY_BYTES as u64, access };
        let queues = Self {
            key: nic.register(&registration)?.local,
            domain,
            send_cq: nic.create_cq(SENDS * usize::from(NODES_MAX))?,
            receive_cq: nic.create_cq(2 * RECEIVES)?,
            srq: nic.create_srq(RECEIVES)?,
        };
        for slot in SENDS as u64..(SENDS + RECEIVES) as u64 {
            nic.post_srq_recv(queues.srq, &queues.receive(slot))?;
        }
        Ok(queues)
    }

    /// Returns the buffer of a request: the first bytes of a slot.
    pub(super) fn local(&self, slot: u64, bytes: usize) -> [Sge; SGES_MAX] {
        let mut local = [Sge::default(); SGES_MAX];
        local[0] = Sge { address: slot * SLOT_BYTES as u64, bytes: bytes as u32, key: self.key };
        local
    }

    /// Returns the receive request with a slot.
    pub(super) fn receive(&self, slot: u64) -> ReceiveRequest {
        ReceiveRequest { id: slot, local: self.local(slot, SLOT_BYTES) }
    }
}

/// Returns memory for all slots, written to once. A page fault takes as long as several packets: the first long message
/// after short ones would be delayed by a dozen of them on either side, more packets would wait meanwhile and make the
/// next message longer, and so on for milliseconds.
pub(super) fn slots() -> ByteMemory {
    ByteMemory(vec![u8::MAX; MEMORY_BYTES])
}
