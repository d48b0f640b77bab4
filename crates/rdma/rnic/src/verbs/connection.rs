//! The transitions of a reliable connection.

use super::access::AccessFlags;
use super::address::NicAddress;
use super::modify::{Mtu, QpAttributes};
use super::state::QpState;
use crate::wire::{Psn, QpNumber};

/// Outstanding READs and atomics in each direction.
const READS_MAX: u8 = 16;
/// Retry count; of RNR retries, 7 mean infinitely many.
const RETRIES: u8 = 7;

/// The parameters of a reliable connection, which its two ends exchange out of band before connecting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RcConnection {
    /// The peer's address.
    pub peer: NicAddress,
    /// The peer's queue pair.
    pub destination: QpNumber,
    /// Packet sequence number of the peer's first packet.
    pub receive_psn: Psn,
    /// Packet sequence number of the first packet sent.
    pub send_psn: Psn,
    /// Largest payload of a packet.
    pub mtu: Mtu,
    /// Operations allowed to the peer.
    pub access: AccessFlags,
    /// Retransmission time-out, 4.096 us x 2^code, of policies without a time-out of their own.
    pub ack_timer_code: u8,
    /// Time for which the peer waits after an RNR NAK, as coded in table 46.
    pub rnr_timer_code: u8,
}

impl RcConnection {
    /// Returns the states that bring a queue pair from reset to ready-to-send, with the attributes of each.
    pub fn transitions(&self) -> [(QpState, QpAttributes); 3] {
        let none = QpAttributes::default();
        let init = QpAttributes { partition_index: Some(0), port: Some(1), access: Some(self.access), ..none };
        let receive = QpAttributes {
            path: Some(self.peer),
            mtu: Some(self.mtu),
            destination: Some(self.destination),
            receive_psn: Some(self.receive_psn),
            responder_reads_max: Some(READS_MAX),
            rnr_timer_code: Some(self.rnr_timer_code),
            ..none
        };
        let send = QpAttributes {
            send_psn: Some(self.send_psn),
            initiator_reads_max: Some(READS_MAX),
            ack_timer_code: Some(self.ack_timer_code),
            retries: Some(RETRIES),
            rnr_retries: Some(RETRIES),
            ..none
        };
        [(QpState::Init, init), (QpState::ReadyToReceive, receive), (QpState::ReadyToSend, send)]
    }
}
